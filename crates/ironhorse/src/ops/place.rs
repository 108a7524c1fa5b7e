//! Where memory is: the one place that decides which engine an op runs on.

use super::error::{Code, OpError, Result};
use std::ffi::c_void;

/// A CUDA stream as a C program has it; null is the default stream. Without meaning for memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Stream(pub *mut c_void);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Self = Self(std::ptr::null_mut());
}

impl Default for Stream {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Where an array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of the host.
    Host,
    /// Memory of the CUDA device of this number.
    Device(u32),
}

/// Where `address` is. Memory is the host's as long as no ops on devices exist: an address of a device cannot be told
/// apart without the driver, and nothing here loads it.
pub fn place_of(_address: *const c_void) -> Place {
    Place::Host
}

/// Whether ops run on a CUDA device here.
pub fn cuda_available() -> bool {
    false
}

/// The common place of the arrays of a call.
pub(super) fn common(op: &str, addresses: &[*const c_void]) -> Result<Place> {
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

/// For an op that exists for the host only.
pub(super) fn host_only(op: &str, addresses: &[*const c_void]) -> Result {
    match common(op, addresses)? {
        Place::Host => Ok(()),
        place => Err(OpError {
            code: Code::NotAvailable,
            text: format!("{op}: the arrays are on {place:?}, expected memory of the host"),
        }),
    }
}
