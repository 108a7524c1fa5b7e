//! Running a call on a GPU: arrays are copied there, the op works on a stream of its own, and what it wrote is copied back.

use ironhorse::ops::{OpError, Staging, Stream};
use std::ffi::c_void;

/// Arrays that a call has at most.
pub(super) const MOST: usize = 10;

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

/// Where the arrays of a call are while its op runs.
pub struct Placed {
    /// The stream to run on.
    pub stream: Stream,
    /// Addresses by slot.
    addresses: [usize; MOST],
}

impl Placed {
    /// On the host, where arrays are used in place.
    pub(super) fn host(ranges: &[Range]) -> Self {
        let mut addresses = [0; MOST];
        for (address, range) in addresses.iter_mut().zip(ranges) {
            *address = range.source;
        }
        Self { stream: Stream::HOST, addresses }
    }

    /// The address of the array in a slot.
    pub fn address(&self, slot: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.addresses[slot])
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
    let mut addresses = [0; MOST];
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
    run(&Placed { stream: Stream(staging.stream()), addresses })?;
    for (range, &from) in ranges.iter().zip(&addresses).filter(|(range, _)| range.written) {
        let to = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: the array has this many bytes, may be written, and outlives `staging`, which waits.
        unsafe { staging.download(to, std::ptr::without_provenance(from), range.bytes) }.map_err(named)?;
    }
    staging.wait().map_err(named)
}
