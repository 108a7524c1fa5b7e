//! Where memory is: the one place that decides which engine an op runs on.

use crate::cuda::eager;
use crate::error::{OpError, Result};
use std::ffi::c_void;

/// A CUDA stream as a C program has it; null is the default stream. Ignored for host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Stream(pub *mut c_void);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Self = Self(std::ptr::null_mut());
    /// All arrays are host memory, and the driver is not asked: for a caller who made them. No stream has this address.
    pub const HOST: Self = Self(std::ptr::without_provenance_mut(usize::MAX));
}

impl Default for Stream {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The memory that an array is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Host memory.
    Host,
    /// Memory of the CUDA device of this number.
    Device(u32),
}

/// The place of an address. Without a CUDA driver in the process everything is host memory.
pub fn place_of(address: *const c_void) -> Place {
    match eager::device_of(address) {
        Some(index) => Place::Device(index as u32),
        None => Place::Host,
    }
}

/// Whether ops can run on a CUDA device here.
pub fn cuda_available() -> bool {
    eager::available()
}

/// The common place of the arrays of a call.
pub(super) fn common(op: &str, addresses: &[*const c_void], stream: Stream) -> Result<Place> {
    if stream == Stream::HOST {
        return Ok(Place::Host);
    }
    let mut place = None;
    for &address in addresses {
        let found = place_of(address);
        match place.replace(found) {
            Some(before) if before != found => {
                let text = format!("{op}: arrays are on {before:?} and {found:?}, expected one place");
                return Err(OpError::invalid(text));
            }
            _ => {}
        }
    }
    Ok(place.unwrap_or(Place::Host))
}
