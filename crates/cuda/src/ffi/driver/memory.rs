//! Memory on the device, and page-locked memory on the host.

use super::{OUT_OF_MEMORY, Stream, call};
use crate::Result;
use crate::device::Device;
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::c_void;
use std::rc::Rc;

/// Device memory.
#[derive(Debug)]
pub struct Buffer {
    device: Rc<Device>,
    address: CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// Memory with whatever it held; 0 bytes give a null address.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        if bytes > 0 {
            device.make_current()?;
            // SAFETY: the driver writes the address.
            let status = unsafe { (device.driver.cuMemAlloc_v2)(&mut address, bytes) };
            if status == OUT_OF_MEMORY {
                return Err(device.out_of_memory(bytes));
            }
            device.driver.check("cuMemAlloc", status)?;
            device.took(bytes);
        }
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// A copy of host data.
    pub fn from_host(device: &Rc<Device>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(device, bytes.len())?;
        if !bytes.is_empty() {
            let stream = Stream::default_of(device);
            call!(
                device,
                cuMemcpyHtoDAsync_v2(buffer.address, bytes.as_ptr().cast(), bytes.len(), stream.raw)
            )?;
            stream.synchronize()?;
        }
        Ok(buffer)
    }

    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.address != 0 {
            let _ = self.device.make_current();
            let _ = call!(self.device, cuMemFree_v2(self.address));
            self.device.gave_back(self.bytes);
        }
    }
}

/// Page-locked host memory: copies to and from it run beside the host.
#[derive(Debug)]
pub struct Pinned {
    device: Rc<Device>,
    start: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// Zeroed memory.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        let memory = Self::unwritten(device, bytes)?;
        // SAFETY: just allocated with this size.
        unsafe { std::ptr::write_bytes(memory.start, 0, bytes.max(1)) };
        Ok(memory)
    }

    /// Memory whose contents are whatever the driver gave.
    pub fn unwritten(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        device.make_current()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        call!(device, cuMemHostAlloc(&mut start, bytes.max(1), 0))?;
        Ok(Self { device: device.clone(), start: start.cast(), bytes })
    }

    /// Its address on the host.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its contents. The caller has waited for every copy into it.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated with this size; the system's memory holds bytes, whoever wrote them.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its contents, to change. The caller has waited for every copy out of it.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuMemFreeHost(self.start.cast()));
    }
}
