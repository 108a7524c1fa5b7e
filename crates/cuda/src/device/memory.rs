//! Memory of the device, and page-locked memory of the host.

use super::{Device, Stream};
use crate::Result;
use crate::ffi::driver::{OUT_OF_MEMORY, call};
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::c_void;

/// Device memory.
#[derive(Debug)]
pub struct Buffer {
    device: &'static Device,
    address: CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// Uninitialised memory; 0 bytes give a null address.
    pub fn new(device: &'static Device, bytes: usize) -> Result<Self> {
        let mut address = 0;
        if bytes > 0 {
            device.make_current()?;
            // SAFETY: the driver writes the address.
            let status = unsafe { (device.driver.cuMemAlloc_v2)(&mut address, bytes) };
            if status == OUT_OF_MEMORY {
                return Err(device.out_of_memory(bytes));
            }
            device.driver.check("cuMemAlloc", status)?;
            device.count_allocated(bytes);
        }
        Ok(Self { device, address, bytes })
    }

    /// A copy of host data.
    pub fn from_host(device: &'static Device, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(device, bytes.len())?;
        if !bytes.is_empty() {
            let stream = Stream::default_of(device);
            // SAFETY: the buffer is as large as `bytes`, which outlives the wait below.
            unsafe { stream.upload_from(buffer.address, bytes.as_ptr(), bytes.len())? };
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
            self.device.count_freed(self.bytes);
        }
    }
}

/// Page-locked host memory: the device copies to and from it while the host goes on.
#[derive(Debug)]
pub struct Pinned {
    device: &'static Device,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: nothing but this value has the address, and every call makes the device current on its own thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeroed memory.
    pub fn new(device: &'static Device, bytes: usize) -> Result<Self> {
        let memory = Self::unwritten(device, bytes)?;
        // SAFETY: just allocated with this size.
        unsafe { std::ptr::write_bytes(memory.start, 0, bytes.max(1)) };
        Ok(memory)
    }

    /// Memory with whatever contents the driver returned.
    pub fn unwritten(device: &'static Device, bytes: usize) -> Result<Self> {
        device.make_current()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        call!(device, cuMemHostAlloc(&mut start, bytes.max(1), 0))?;
        Ok(Self { device, start: start.cast(), bytes })
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
        // SAFETY: allocated with this size; the driver's memory is initialised, whoever wrote it.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its contents, to change. The caller has waited for every copy out of it.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = call!(self.device, cuMemFreeHost(self.start.cast()));
    }
}
