//! Memory for the duration of one call.

use crate::Result;
use crate::device::Stream;
use std::cell::RefCell;

/// Gives the device memory that a call needs besides its arrays.
pub trait Memory {
    /// `bytes` of device memory, aligned to 256 bytes, not zeroed, valid for work put on `stream` before the call returns.
    fn take(&self, stream: &Stream, bytes: usize) -> Result<u64>;
}

/// Memory of the driver's pool in the order of the stream; freed, in that order too, when this is dropped.
#[derive(Debug, Default)]
pub struct StreamMemory {
    taken: RefCell<Vec<(Stream, u64)>>,
}

impl Memory for StreamMemory {
    fn take(&self, stream: &Stream, bytes: usize) -> Result<u64> {
        let _current = stream.device().enter()?;
        let address = stream.allocate(bytes)?;
        self.taken.borrow_mut().push((Stream::borrowed(stream.device(), stream.raw()), address));
        Ok(address)
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        for (stream, address) in self.taken.get_mut().drain(..) {
            // A failure has no remedy here; the driver frees the memory when the process ends.
            let _ = stream.device().enter().and_then(|_current| stream.free(address));
        }
    }
}
