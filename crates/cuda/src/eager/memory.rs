//! Memory for the time of one call.

use super::gpu::Gpu;
use crate::Result;
use std::cell::RefCell;
use std::ffi::c_void;

/// Who gives memory that a call needs besides its arrays.
pub trait Memory {
    /// `bytes` of device memory, aligned to 256 bytes, not zeroed, good for work put on `stream` before the call returns.
    fn take(&self, gpu: &Gpu, stream: *mut c_void, bytes: usize) -> Result<u64>;
}

/// Memory of the driver's pool, in the order of the stream: given back, again in that order, when this is dropped.
#[derive(Debug, Default)]
pub struct StreamMemory {
    taken: RefCell<Vec<Taken>>,
}

#[derive(Debug)]
struct Taken {
    gpu: &'static Gpu,
    stream: *mut c_void,
    address: u64,
}

impl Memory for StreamMemory {
    fn take(&self, gpu: &Gpu, stream: *mut c_void, bytes: usize) -> Result<u64> {
        let gpu = Gpu::open(gpu.info.index)?;
        let address = gpu.allocate(stream, bytes)?;
        self.taken.borrow_mut().push(Taken { gpu, stream, address });
        Ok(address)
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        for Taken { gpu, stream, address } in self.taken.get_mut().drain(..) {
            // Nothing can be done about a failure; the driver frees it when the process ends.
            let _ = gpu.free(stream, address);
        }
    }
}
