//! Running a call on a GPU: arrays go there, the op works on a stream of its own, and what it wrote comes back.

use super::Pointer;
use super::call::MOST;
use ironhorse::cuda;
use ironhorse::eager::At;
use ironhorse::ops::{OpError, Staging, Stream};

/// Memory of an array in a call.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub name: &'static str,
    pub start: usize,
    pub bytes: usize,
    pub written: bool,
    /// Made by the call: nothing is in it yet.
    pub new: bool,
    /// What an op reads: `start`, or a private copy.
    pub source: usize,
}

impl Range {
    pub const NONE: Self = Self { name: "", start: 0, bytes: 0, written: false, new: false, source: 0 };
    pub const READ: Self = Self::NONE;
    pub const WRITTEN: Self = Self { written: true, ..Self::NONE };
    pub const NEW: Self = Self { new: true, ..Self::WRITTEN };
}

/// Where an op works: what it gets for the arrays and as its stream.
pub struct Where {
    stream: Stream,
    /// The GPU, and addresses by number of the array; `None` is the host, where arrays are used as they are.
    device: Option<(usize, [usize; MOST])>,
}

impl Where {
    /// Arrays are memory of the host, and nobody needs to be asked.
    pub(super) const HOST: Self = Self { stream: Stream::HOST, device: None };

    /// The stream.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// An array to read.
    pub fn read<T>(&self, array: Pointer<T>) -> *const T {
        self.write(array)
    }

    /// An array to write; only of those got as outputs.
    pub fn write<T>(&self, array: Pointer<T>) -> *mut T {
        match &self.device {
            None => array.host,
            Some((_, addresses)) => std::ptr::without_provenance_mut(addresses[array.slot]),
        }
    }

    /// Runs a direct op there.
    pub fn direct(&self, work: impl FnOnce(&At<'_>) -> Result<(), OpError>) -> Result<(), OpError> {
        let Some((gpu, _)) = self.device else { return work(&At::Host) };
        let memory = cuda::eager::StreamMemory::default();
        work(&At::Device(cuda::eager::At::new(gpu, self.stream.0, &memory)?))
    }
}

/// Runs an op on a GPU and waits for it. After an error of the op nothing was written.
///
/// The caller holds the arrays of `ranges` until this returns.
pub(super) fn run(
    op: &str,
    gpu: usize,
    ranges: &[Range],
    run: impl FnOnce(&Where) -> Result<(), OpError>,
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
    run(&Where { stream: Stream(staging.stream()), device: Some((gpu, addresses)) })?;
    for (range, &from) in ranges.iter().zip(&addresses).filter(|(range, _)| range.written) {
        let to = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: the array has this many bytes, may be written, and outlives `staging`, which waits.
        unsafe { staging.download(to, std::ptr::without_provenance(from), range.bytes) }.map_err(named)?;
    }
    staging.wait().map_err(named)
}
