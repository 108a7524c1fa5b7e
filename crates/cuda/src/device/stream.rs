//! Streams, recorded sections and events.

use super::{Device, Function, Pinned, graph, human};
use crate::args::{Args, Grid};
use crate::ffi::driver::{OUT_OF_MEMORY, call};
use crate::{Error, Result};
use cudarc::driver::sys::{
    CUevent, CUevent_flags_enum::CU_EVENT_DISABLE_TIMING, CUgraphExec, CUlaunchAttribute,
    CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CUlaunchAttributeValue,
    CUlaunchConfig, CUstream, CUstream_flags_enum::CU_STREAM_NON_BLOCKING,
    CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
};
use std::ffi::c_void;
use std::ops::Range;

/// A queue of device work.
#[derive(Debug)]
pub struct Stream {
    device: &'static Device,
    pub(crate) raw: CUstream,
    /// Whether it is destroyed when this is dropped.
    owned: bool,
}

// SAFETY: a handle of the driver, which allows its use from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream that does not wait for the default stream.
    pub(crate) fn new(device: &'static Device) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuStreamCreate(&mut raw, CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Self { device, raw, owned: true })
    }

    /// A stream with precedence over those of [`Self::new`]: what it has to do is begun before waiting blocks of theirs.
    pub(crate) fn first_served(device: &'static Device) -> Result<Self> {
        device.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        call!(device, cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuStreamCreateWithPriority(&mut raw, CU_STREAM_NON_BLOCKING as u32, greatest))?;
        Ok(Self { device, raw, owned: true })
    }

    /// A stream that somebody else keeps alive as long as this value.
    pub(crate) fn borrowed(device: &'static Device, raw: *mut c_void) -> Self {
        Self { device, raw: raw.cast(), owned: false }
    }

    /// The default stream.
    pub(crate) fn default_of(device: &'static Device) -> Self {
        Self::borrowed(device, std::ptr::null_mut())
    }

    /// The device it belongs to.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// The handle, as other libraries take it.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Waits for all work given so far.
    pub(crate) fn synchronize(&self) -> Result<()> {
        call!(self.device, cuStreamSynchronize(self.raw))
    }

    /// What is given to this stream from now on waits until another has passed a mark.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        call!(self.device, cuStreamWaitEvent(self.raw, event.raw, 0))
    }

    /// Device memory in the order of the stream; 0 bytes give a null address.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: the driver writes the address.
            let status = unsafe { (self.device.driver.cuMemAllocAsync)(&mut address, bytes, self.raw) };
            if status == OUT_OF_MEMORY {
                let name = &self.device.info.name;
                return Err(Error::OutOfMemory(format!("{name} has no {} free", human(bytes))));
            }
            self.device.driver.check("cuMemAllocAsync", status)?;
        }
        Ok(address)
    }

    /// Frees memory of [`Self::allocate`] once the stream has done all work given so far.
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        if address == 0 { Ok(()) } else { call!(self.device, cuMemFreeAsync(address, self.raw)) }
    }

    /// Launches a kernel. The arguments have the order and sizes of its signature.
    pub(crate) fn launch(&self, function: Function, grid: Grid, args: &mut Args) -> Result<()> {
        // SAFETY: the pointers are those of the arguments, which every launcher passes as its kernel's signature has them.
        unsafe { self.launch_with(function, grid, &mut args.pointers(), false) }
    }

    /// Launches a kernel. A `chained` one may start before the kernel ahead of it on the stream has ended, and waits for that
    /// end itself.
    ///
    /// # Safety
    /// `pointers` point at the kernel's arguments, in order and of the sizes of its signature.
    pub(crate) unsafe fn launch_with(
        &self,
        function: Function,
        Grid { grid: [gx, gy, gz], block: [bx, by, bz], shared }: Grid,
        pointers: &mut [*mut c_void],
        chained: bool,
    ) -> Result<()> {
        let mut attribute = CUlaunchAttribute {
            id: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: shared,
            hStream: self.raw,
            attrs: &mut attribute,
            numAttrs: chained.into(),
        };
        let function = function.raw(shared)?;
        call!(self.device, cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()))
    }

    /// Fills with zero.
    pub(crate) fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        self.fill(at, 0, bytes)
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, at: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 { Ok(()) } else { call!(self.device, cuMemsetD8Async(at, value, bytes, self.raw)) }
    }

    /// Copies within the device.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        call!(self.device, cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw))
    }

    /// Copies from host memory.
    ///
    /// # Safety
    /// Both sides have `bytes` bytes; the host does not change or free its side until the stream has done the copy.
    pub(crate) unsafe fn upload_from(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            Ok(())
        } else {
            call!(self.device, cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw))
        }
    }

    /// Copies into host memory.
    ///
    /// # Safety
    /// Both sides have `bytes` bytes; the host does not use or free its side until the stream has done the copy.
    pub(crate) unsafe fn download_to(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            Ok(())
        } else {
            call!(self.device, cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw))
        }
    }

    /// Copies from pinned memory; it must not change until the stream has done the copy.
    pub(crate) fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= from.bytes());
        // SAFETY: the engine's ring keeps the memory, and writes to it only after the event behind this copy.
        unsafe { self.upload_from(to, from.start(), bytes) }
    }

    /// Copies into pinned memory from byte `offset` on; the contents are valid once the stream has done the copy.
    pub(crate) fn download(&self, to: &Pinned, offset: usize, from: u64, bytes: usize) -> Result<()> {
        debug_assert!(offset + bytes <= to.bytes());
        // SAFETY: the engine's ring keeps the memory, and reads it only after the event behind this copy.
        unsafe { self.download_to(to.start().wrapping_add(offset), from, bytes) }
    }

    /// Copies into page-locked memory and waits, so that the slice is never written to after the call.
    pub(crate) fn download_now(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the wait below ends the copy before the slice can go out of scope.
        let queued = unsafe { self.download_to(to.as_mut_ptr(), from, to.len()) };
        let done = self.synchronize(); // even if the copy was refused: an earlier one may still be running
        queued.and(done)
    }

    /// Records everything `work` puts on this stream into a graph instead of running it. The recording ends even if the
    /// work fails. What libraries fill with zero in `counters` while they work is filled once, at the beginning.
    pub(crate) fn capture(&self, counters: &Range<u64>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        call!(self.device, cuStreamBeginCapture_v2(self.raw, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32))?;
        let fill = if counters.is_empty() {
            Ok(())
        } else {
            self.zero(counters.start, (counters.end - counters.start) as usize)
        };
        let done = fill.and_then(|()| work());
        let mut graph = std::ptr::null_mut();
        let ended = call!(self.device, cuStreamEndCapture(self.raw, &mut graph));
        let made = done.and(ended).and_then(|()| {
            graph::without_fills(self.device, graph, counters)?;
            let mut exec = std::ptr::null_mut();
            call!(self.device, cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
            Ok(Graph { device: self.device, exec })
        });
        if !graph.is_null() {
            let _ = call!(self.device, cuGraphDestroy(graph));
        }
        made
    }

    /// Runs a graph.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        call!(self.device, cuGraphLaunch(graph.exec, self.raw))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            let _ = self.device.make_current();
            let _ = call!(self.device, cuStreamDestroy_v2(self.raw));
        }
    }
}

/// A recorded section.
#[derive(Debug)]
pub struct Graph {
    device: &'static Device,
    exec: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuGraphExecDestroy(self.exec));
    }
}

/// A point on a stream.
#[derive(Debug)]
pub struct Event {
    device: &'static Device,
    raw: CUevent,
}

// SAFETY: the driver's functions for events may be called by any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event; one that is `timed` can be subtracted from another.
    pub fn new(device: &'static Device, timed: bool) -> Result<Self> {
        device.make_current()?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuEventCreate(&mut raw, if timed { 0 } else { CU_EVENT_DISABLE_TIMING as u32 }))?;
        Ok(Self { device, raw })
    }

    /// Marks the stream's present end.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        call!(self.device, cuEventRecord(self.raw, stream.raw))
    }

    /// Waits until the stream has passed the mark.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device, cuEventSynchronize(self.raw))
    }

    /// Whether the stream has passed the mark; also after a fault, when it will not pass anything any more.
    pub fn has_passed(&self) -> bool {
        // SAFETY: the event is there as long as this is.
        let status = unsafe { (self.device.driver.cuEventQuery)(self.raw) };
        status != cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_READY as u32
    }

    /// Milliseconds since an earlier event; both have passed.
    pub fn since(&self, earlier: &Self) -> Result<f32> {
        let mut ms = 0.0;
        call!(self.device, cuEventElapsedTime(&mut ms, earlier.raw, self.raw))?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuEventDestroy_v2(self.raw));
    }
}
