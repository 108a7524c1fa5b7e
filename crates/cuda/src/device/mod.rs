//! A GPU of this process: opened once, shared by the engine, eager ops and kernels of users on all threads, never closed.
//!
//! ```text
//! info.rs    which GPUs exist        modules.rs     loaded kernels: one cache per GPU
//! memory.rs  memory of the device    stream.rs      streams, graphs, events
//!            and pinned memory       tensor_map.rs  matrices as TMA copies them
//! graph.rs   changes of a graph before it runs
//! ```

mod graph;
mod info;
mod memory;
mod modules;
mod stream;
mod tensor_map;

pub(crate) use info::FP8_COMPUTE;
pub(crate) use info::peers;
pub use info::{DeviceInfo, Peer};
pub(crate) use memory::{Buffer, Pinned};
pub(crate) use modules::Function;
pub use stream::Stream;
pub(crate) use stream::{Event, Graph};
pub(crate) use tensor_map::Matrix;

use crate::ffi::driver::{Driver, call};
use crate::ffi::library::{DRIVER, is_loaded};
use crate::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode_enum};
use modules::Modules;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// More GPUs than any machine has.
const MOST_DEVICES: usize = 64;

/// A GPU with its primary context retained: the context that PyTorch and programs of the CUDA runtime use too.
#[derive(Debug)]
pub struct Device {
    pub(crate) driver: Driver,
    /// Its properties.
    pub info: DeviceInfo,
    /// Whether a kernel can start before the one ahead of it has ended, also in a graph.
    pub(crate) chains: bool,
    context: CUcontext,
    modules: Modules,
    /// Bytes in all buffers.
    held: AtomicUsize,
    /// The most bytes held at a time since [`Device::restart_peak`].
    peak: AtomicUsize,
}

// SAFETY: the handles belong to the driver, which allows their use from any thread; none is ever destroyed.
unsafe impl Send for Device {}
// SAFETY: as above; everything that changes is atomic or behind a lock.
unsafe impl Sync for Device {}

impl Device {
    /// The GPU of this index, opened at its first use.
    pub fn open(index: usize) -> Result<&'static Self> {
        static DEVICES: [OnceLock<Device>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];
        let Some(slot) = DEVICES.get(index) else {
            return Err(Error::NoDevice(format!("there is no GPU {index}")));
        };
        if let Some(device) = slot.get() {
            return Ok(device);
        }
        // A failure is not remembered: a busy GPU may be free at the next call.
        let device = Self::start(index)?;
        Ok(slot.get_or_init(|| device))
    }

    fn start(index: usize) -> Result<Self> {
        let (driver, info, raw) = info::choose(index)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the context.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, raw) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        let chains = info::chains(&driver, &info)?;
        let (held, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(Self { driver, info, chains, context, modules: Modules::default(), held, peak })
    }

    /// Whether the GPU exists and is new enough.
    pub fn check(index: usize) -> Result<()> {
        info::choose(index).map(|_| ())
    }

    /// All GPUs of this machine.
    pub fn list() -> Result<Vec<DeviceInfo>> {
        info::list()
    }

    /// Makes this the device of the driver calls of this thread.
    pub fn make_current(&self) -> Result<()> {
        call!(self, cuCtxSetCurrent(self.context))
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(crate) fn enter(&'static self) -> Result<Current> {
        let mut now = std::ptr::null_mut();
        call!(self, cuCtxGetCurrent(&mut now))?;
        if now == self.context {
            return Ok(Current { device: self, before: None });
        }
        self.make_current()?;
        // Without a context, the CUDA runtime works on the first GPU: its context may stay, and libraries that use the runtime find
        // it at the next call. Autograd calls the backward on such threads.
        let stays = now.is_null() && self.info.index == 0;
        Ok(Current { device: self, before: (!stays).then_some(now) })
    }

    /// Lets this thread allocate and load code although work of some stream is being recorded, until the guard is dropped.
    pub(crate) fn while_recording(&self) -> Result<Relaxed<'_>> {
        let mut mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        call!(self, cuThreadExchangeStreamCaptureMode(&mut mode))?;
        Ok(Relaxed { device: self, before: mode })
    }

    /// Bytes that are free, and bytes in total.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        call!(self, cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// The error of asking for more bytes than are free.
    pub(crate) fn out_of_memory(&self, needs: usize) -> Error {
        let (free, total) = self.memory().unwrap_or_default();
        Error::OutOfMemory(format!(
            "{} more are needed on {}, which has {} free of {}; use a smaller --batch or --recompute full",
            human(needs),
            self.info.name,
            human(free),
            human(total)
        ))
    }

    /// Bytes in buffers now, and the most at a time.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.held.load(Ordering::Relaxed), self.peak.load(Ordering::Relaxed))
    }

    /// Counts the peak from now on: what an engine before this one held is not part of it.
    pub(crate) fn restart_peak(&self) {
        self.peak.store(self.held.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Runs work whose memory is not part of a training run and leaves the peak as it was.
    pub(crate) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        let (_, peak) = self.held();
        let result = work();
        self.peak.store(peak.max(self.held().0), Ordering::Relaxed);
        result
    }

    fn count_allocated(&self, bytes: usize) {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(held, Ordering::Relaxed);
    }

    fn count_freed(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A context that is current on this thread; the one before, if there was one or it is not the first GPU's, becomes current
/// again when this is dropped.
pub(crate) struct Current {
    device: &'static Device,
    before: Option<CUcontext>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = call!(self.device, cuCtxSetCurrent(before)); // null: no context was current
        }
    }
}

/// What this thread may do while work is being recorded; as before when this is dropped.
pub(crate) struct Relaxed<'a> {
    device: &'a Device,
    before: u32,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let _ = call!(self.device, cuThreadExchangeStreamCaptureMode(&mut self.before));
    }
}

/// The GPU whose memory `address` is; `None` for host memory. Asks only a driver that the process has already loaded:
/// without one there is no device memory.
pub fn device_of(address: *const c_void) -> Option<usize> {
    use cudarc::driver::sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
    use cudarc::driver::sys::CUpointer_attribute_enum::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    };
    let driver = loaded_driver()?;
    let ask = |attribute: u32| -> Option<u32> {
        let mut value = 0_u32;
        let out = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the driver writes four bytes; any address may be asked about.
        let status = unsafe { (driver.cuPointerGetAttribute)(out, attribute, address.addr() as u64) };
        (status == 0).then_some(value)
    };
    if ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32)? != CU_MEMORYTYPE_DEVICE as u32 {
        return None;
    }
    ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32).map(|index| index as usize)
}

/// The driver, if this process has loaded it.
fn loaded_driver() -> Option<&'static Driver> {
    static LOADED: OnceLock<Option<Driver>> = OnceLock::new();
    if let Some(driver) = LOADED.get() {
        return driver.as_ref();
    }
    if !is_loaded(DRIVER) {
        return None;
    }
    LOADED.get_or_init(|| Driver::load().ok()).as_ref()
}

/// Bytes as people read them.
pub(crate) fn human(bytes: usize) -> String {
    let gib = bytes as f64 / (1_u64 << 30) as f64;
    if gib >= 0.1 { format!("{gib:.1} GiB") } else { format!("{:.1} MiB", gib * 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        assert_eq!(human(3 << 29), "1.5 GiB");
        assert_eq!(human(1 << 20), "1.0 MiB");
    }
}
