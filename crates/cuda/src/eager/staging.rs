//! Direct ops on memory of the host: copied to a GPU, computed there, copied back.

use super::gpu::Gpu;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// One call's stream and device memory; both are given back when this is dropped, after all work is done.
#[derive(Debug)]
pub struct Staging {
    gpu: &'static Gpu,
    stream: *mut c_void,
    taken: Vec<u64>,
}

/// Whether a GPU can be used, asked once.
fn usable(index: usize) -> Result<()> {
    static KNOWN: Mutex<BTreeMap<usize, Result<()>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry(index).or_insert_with(|| crate::usable(index)).clone()
}

impl Staging {
    /// On GPU `index`, with a stream that nobody else uses.
    ///
    /// # Errors
    /// The reason why that GPU cannot be used.
    pub fn new(index: usize) -> Result<Self> {
        usable(index)?;
        let gpu = Gpu::open(index)?;
        Ok(Self { gpu, stream: gpu.take_stream()?, taken: Vec::new() })
    }

    /// What ops on this memory must be given.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// Device memory with whatever it held; 0 bytes are null.
    ///
    /// # Errors
    /// There is not enough.
    pub fn allocate(&mut self, bytes: usize) -> Result<*mut c_void> {
        let address = self.gpu.allocate(self.stream, bytes)?;
        self.taken.push(address);
        let address = usize::try_from(address).map_err(|_| Error::Input("no such address".into()))?;
        Ok(std::ptr::without_provenance_mut(address))
    }

    /// Puts a copy of host memory to the device on the stream.
    ///
    /// # Safety
    /// `bytes` of memory on both sides; `from` is not written before [`Self::wait`] or the drop.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn upload(&self, to: *mut c_void, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { self.gpu.upload(self.stream, to.addr() as u64, from, bytes) }
    }

    /// Puts a copy of device memory to the host on the stream.
    ///
    /// # Safety
    /// `bytes` of memory on both sides; nobody uses `to` before [`Self::wait`] or the drop.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn download(&self, to: *mut u8, from: *const c_void, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { self.gpu.download(self.stream, to, from.addr() as u64, bytes) }
    }

    /// Waits for all of it.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&self) -> Result<()> {
        self.gpu.wait(self.stream)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for &address in &self.taken {
            // Nothing can be done about a failure; the driver frees it when the process ends.
            let _ = self.gpu.free(self.stream, address);
        }
        // The host's memory may go away after this. A stream that fails is not used again.
        if self.gpu.wait(self.stream).is_ok() {
            self.gpu.give_stream(self.stream);
        }
    }
}
