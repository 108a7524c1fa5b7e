//! Running a call on a GPU: arrays are copied there, the op works on a stream of its own, and what it wrote is copied back.

use super::Slot;
use ironhorse::ops::{OpError, Staging, Stream};
use std::ffi::c_void;

/// Memory of an array in a call.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub start: usize,
    pub bytes: usize,
    pub written: bool,
    /// Made by the call: it holds nothing yet.
    pub new: bool,
    /// What an op reads: `start`, or a private copy.
    pub source: usize,
}

impl Range {
    pub const NONE: Self = Self { start: 0, bytes: 0, written: false, new: false, source: 0 };
}

/// The stream of a call and the addresses of its arrays while its op runs.
pub struct Placed {
    /// The stream to run on.
    pub stream: Stream,
    /// The addresses on a GPU, by the number of the array; empty on the host.
    addresses: Vec<usize>,
}

impl Placed {
    /// The place of a call on the host, which uses arrays where they are.
    pub(super) const HOST: Self = Self { stream: Stream::HOST, addresses: Vec::new() };

    /// The address of the array in a slot.
    pub fn address(&self, slot: Slot) -> *mut c_void {
        match self.addresses.get(slot.number) {
            Some(&address) => std::ptr::with_exposed_provenance_mut(address),
            None => slot.host(),
        }
    }
}

/// Runs an op on a GPU and waits for it. After an error of the op nothing was written.
///
/// The caller holds the arrays of `ranges` until this returns.
pub(super) fn run(
    op: &str,
    gpu: usize,
    ranges: &[Range],
    run: impl FnOnce(&Placed) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let named = |error: ironhorse::cuda::Error| {
        let error = OpError::from(error);
        OpError { text: format!("{op}: {}", error.text), ..error }
    };
    let mut staging = Staging::new(gpu).map_err(named)?;
    let mut addresses = vec![0; ranges.len()];
    for (i, range) in ranges.iter().enumerate() {
        // One array given twice is one array there too.
        let same = |other: &Range| (other.source, other.bytes) == (range.source, range.bytes);
        if let Some(twin) = ranges[..i].iter().position(same) {
            addresses[i] = addresses[twin];
            continue;
        }
        let to = staging.allocate(range.bytes).map_err(named)?;
        addresses[i] = to.addr();
        if !range.new {
            // SAFETY: the array, or the private copy, has this many bytes and outlives `staging`, which waits.
            unsafe { staging.upload(to, std::ptr::with_exposed_provenance(range.source), range.bytes) }
                .map_err(named)?;
        }
    }
    let placed = Placed { stream: Stream(staging.stream()), addresses };
    run(&placed)?;
    for (range, &from) in ranges.iter().zip(&placed.addresses).filter(|(range, _)| range.written) {
        let to = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: the array has this many bytes, may be written, and outlives `staging`, which waits.
        unsafe { staging.download(to, std::ptr::without_provenance(from), range.bytes) }.map_err(named)?;
    }
    staging.wait().map_err(named)
}
