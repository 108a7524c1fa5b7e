//! Eager ops on host memory: copied to a GPU, computed there, copied back.

use crate::device::{Device, Stream};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

/// The stream and the device memory of one call; both are given back when this is dropped, after all work is done.
#[derive(Debug)]
pub struct Staging {
    stream: ManuallyDrop<Stream>,
    taken: Vec<u64>,
}

/// Streams that no call uses at the moment.
static IDLE: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

/// Whether a GPU can be used, asked once.
fn usable(index: usize) -> Result<()> {
    static KNOWN: Mutex<BTreeMap<usize, Result<()>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry(index).or_insert_with(|| crate::usable(index)).clone()
}

impl Staging {
    /// Opens GPU `index`, with a stream that nobody else uses.
    ///
    /// # Errors
    /// The reason why that GPU cannot be used.
    pub fn new(index: usize) -> Result<Self> {
        usable(index)?;
        let device = Device::open(index)?;
        let idle = {
            let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
            let found = idle.iter().position(|stream| stream.device().info.index == index);
            found.map(|at| idle.swap_remove(at))
        };
        let stream = match idle {
            Some(stream) => stream,
            None => {
                let _current = device.enter()?;
                Stream::new(device)?
            }
        };
        Ok(Self { stream: ManuallyDrop::new(stream), taken: Vec::new() })
    }

    /// The stream for ops on this memory.
    pub fn stream(&self) -> *mut c_void {
        self.stream.raw()
    }

    /// Uninitialised device memory; null for 0 bytes.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn allocate(&mut self, bytes: usize) -> Result<*mut c_void> {
        let _current = self.stream.device().enter()?;
        let address = self.stream.allocate(bytes)?;
        self.taken.push(address);
        let address = usize::try_from(address)
            .map_err(|_| Error::Input(format!("address {address:#x} does not fit a pointer")))?;
        Ok(std::ptr::without_provenance_mut(address))
    }

    /// Puts a copy of host memory to the device on the stream.
    ///
    /// # Safety
    /// `bytes` of memory on both sides; `from` is not written before [`Self::wait`] or the drop.
    ///
    /// # Errors
    /// The driver refuses the copy.
    pub unsafe fn upload(&self, to: *mut c_void, from: *const u8, bytes: usize) -> Result<()> {
        let _current = self.stream.device().enter()?;
        // SAFETY: the caller of `upload` guarantees both sides; `wait` or the drop outlasts the copy.
        unsafe { self.stream.upload_from(to.addr() as u64, from, bytes) }
    }

    /// Puts a copy of device memory to the host on the stream.
    ///
    /// # Safety
    /// `bytes` of memory on both sides; nobody uses `to` before [`Self::wait`] or the drop.
    ///
    /// # Errors
    /// The driver refuses the copy.
    pub unsafe fn download(&self, to: *mut u8, from: *const c_void, bytes: usize) -> Result<()> {
        let _current = self.stream.device().enter()?;
        // SAFETY: the caller of `download` guarantees both sides; `wait` or the drop outlasts the copy.
        unsafe { self.stream.download_to(to, from.addr() as u64, bytes) }
    }

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn wait(&self) -> Result<()> {
        let _current = self.stream.device().enter()?;
        self.stream.synchronize()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Ok(_current) = self.stream.device().enter() {
            for &address in &self.taken {
                // A failure has no remedy here; the driver frees the memory when the process ends.
                let _ = self.stream.free(address);
            }
        }
        // The host's memory may be freed after this. A stream that failed is not used again, and not destroyed either.
        if self.wait().is_ok() {
            // SAFETY: `self.stream` is not used after this line.
            let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
    }
}
