//! A GPU: what it is, and the context we work in.

use crate::ffi::driver::{Driver, call};
use crate::memory::human;
use crate::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUdevice};
use std::cell::Cell;
use std::ffi::CStr;
use std::rc::Rc;

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its index.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub compute: (u32, u32),
    /// Multiprocessors.
    pub sms: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Bytes of L2 cache.
    pub l2: usize,
    /// Shared memory a block may ask for.
    pub shared_per_block: usize,
}

impl DeviceInfo {
    /// The architecture NVRTC compiles for: `sm_90a`, `sm_80`.
    pub fn arch(&self) -> String {
        let (major, minor) = self.compute;
        format!("sm_{major}{minor}{}", if self.compute == (9, 0) { "a" } else { "" })
    }
}

/// A GPU with its primary context retained.
#[derive(Debug)]
pub struct Device {
    pub(crate) driver: Driver,
    /// What it is.
    pub info: DeviceInfo,
    raw: CUdevice,
    context: CUcontext,
    /// Bytes in our buffers.
    held: Cell<usize>,
    /// The most there were at a time.
    peak: Cell<usize>,
}

/// The least driver we work with: that of CUDA 12.0, version 525.
const LEAST_DRIVER: u32 = 12000;

impl Device {
    /// Opens a GPU by index.
    pub fn open(index: usize) -> Result<Rc<Self>> {
        let (driver, info, raw) = choose(index)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the context.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, raw) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        let device = Rc::new(Self { driver, info, raw, context, held: Cell::new(0), peak: Cell::new(0) });
        device.make_current()?;
        Ok(device)
    }

    /// Whether there is such a GPU and it is new enough.
    pub fn check(index: usize) -> Result<()> {
        choose(index).map(|_| ())
    }

    /// All GPUs of this machine.
    pub fn list() -> Result<Vec<DeviceInfo>> {
        let driver = start()?;
        (0..count(&driver)?).map(|index| describe(&driver, index).map(|(info, _)| info)).collect()
    }

    /// Makes this device the one that driver calls of this thread mean.
    pub fn make_current(&self) -> Result<()> {
        call!(self, cuCtxSetCurrent(self.context))
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        call!(self, cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// The error of asking for so many more bytes than there are.
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

    /// Bytes in our buffers now, and the most there were at a time.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.held.get(), self.peak.get())
    }

    /// Runs something whose memory is not a run's and leaves the peak as it was.
    pub(crate) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        let peak = self.peak.get();
        let result = work();
        self.peak.set(peak.max(self.held.get()));
        result
    }

    /// Counts a buffer.
    pub(crate) fn took(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
        self.peak.set(self.peak.get().max(self.held.get()));
    }

    /// Counts a buffer that is gone.
    pub(crate) fn gave_back(&self, bytes: usize) {
        self.held.set(self.held.get().saturating_sub(bytes));
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = call!(self, cuDevicePrimaryCtxRelease_v2(self.raw));
    }
}

/// A GPU by index, if it is there and new enough.
pub(crate) fn choose(index: usize) -> Result<(Driver, DeviceInfo, CUdevice)> {
    let driver = start()?;
    let count = count(&driver)?;
    if count == 0 {
        return Err(Error::NoDevice(
            "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?); use --device cpu".into(),
        ));
    }
    if index >= count {
        let last = count - 1;
        return Err(Error::NoDevice(format!(
            "there is no GPU {index}: this machine has {count}, cuda:0 to cuda:{last}"
        )));
    }
    let (info, raw) = describe(&driver, index)?;
    if info.compute < (8, 0) {
        return Err(Error::NoDevice(format!(
            "{} has compute capability {}.{}; bf16 tensor cores need 8.0 or newer; use --device cpu",
            info.name, info.compute.0, info.compute.1
        )));
    }
    Ok((driver, info, raw))
}

/// Loads the driver and starts it.
fn start() -> Result<Driver> {
    let driver = Driver::load()?;
    let mut version = 0;
    // SAFETY: the driver writes the version.
    driver.check("cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&mut version) })?;
    let version = version.max(0) as u32;
    if version < LEAST_DRIVER {
        return Err(Error::NoDevice(format!(
            "the NVIDIA driver is too old: it supports CUDA {}.{}, 12.0 is needed; install driver 525 or newer",
            version / 1000,
            version % 1000 / 10
        )));
    }
    // SAFETY: no arguments that matter.
    driver.check("cuInit", unsafe { (driver.cuInit)(0) }).map_err(|error| {
        Error::NoDevice(format!("{error}: no usable GPU; check nvidia-smi, or use --device cpu"))
    })?;
    Ok(driver)
}

fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the driver writes the count.
    driver.check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count.max(0) as usize)
}

fn describe(driver: &Driver, index: usize) -> Result<(DeviceInfo, CUdevice)> {
    let mut raw = 0;
    // SAFETY: the driver writes the handle.
    driver.check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut raw, index as i32) })?;
    let mut name = [0_i8; 256];
    // SAFETY: the driver writes at most 256 bytes and ends them with 0.
    let status = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), 256, raw) };
    driver.check("cuDeviceGetName", status)?;
    // SAFETY: ended with 0 by the driver; the array was zeroed before.
    let name = unsafe { CStr::from_ptr(name.as_ptr().cast()) }.to_string_lossy().into_owned();
    let attribute = |which: u32| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes the value.
        let status = unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, raw) };
        driver.check("cuDeviceGetAttribute", status)?;
        Ok(value.max(0) as u32)
    };
    let mut memory = 0;
    // SAFETY: the driver writes the size.
    driver.check("cuDeviceTotalMem", unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory, raw) })?;
    let info = DeviceInfo {
        index,
        name,
        compute: (attribute(75)?, attribute(76)?),
        sms: attribute(16)?,
        memory,
        l2: attribute(38)? as usize,
        shared_per_block: attribute(97)? as usize,
    };
    Ok((info, raw))
}
