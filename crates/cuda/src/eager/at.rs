//! Where an eager op runs: a stream of a GPU, and who gives memory for the duration of a call.

use super::memory::Memory;
use crate::Result;
use crate::args::{Args, Grid};
use crate::device::{Current, Device, DeviceInfo, Stream};
use crate::ffi::library::{NVRTC, Open};
use crate::kernels::Kernel;
use ironhorse_core::eager::Array;
use std::ffi::c_void;
use std::sync::OnceLock;

/// A stream of a GPU, whose context is current on this thread as long as this lives.
pub struct OnStream<'a> {
    pub(super) stream: Stream,
    memory: &'a dyn Memory,
    _current: Current,
}

impl<'a> OnStream<'a> {
    /// Enters this stream (null: the default stream) of GPU `index`.
    pub fn new(index: usize, stream: *mut c_void, memory: &'a dyn Memory) -> Result<Self> {
        let device = Device::open(index)?;
        Ok(Self { stream: Stream::borrowed(device, stream), memory, _current: device.enter()? })
    }

    /// The GPU.
    pub fn info(&self) -> &'static DeviceInfo {
        &self.stream.device().info
    }

    /// The stream.
    pub fn stream(&self) -> *mut c_void {
        self.stream.raw()
    }

    /// Device memory for the duration of this call: aligned to 256 bytes, not zeroed.
    pub(super) fn scratch(&self, bytes: usize) -> Result<u64> {
        self.memory.take(&self.stream, bytes)
    }

    /// Puts a kernel on the stream. The arguments have the order and sizes of its signature.
    pub(super) fn launch(&self, kernel: &Kernel, grid: Grid, mut args: Args) -> Result<()> {
        self.stream.launch(self.stream.device().function(kernel)?, grid, &mut args)
    }

    /// Zero in all `len` elements of those arrays that are not null.
    pub(super) fn fill_zero<const N: usize>(&self, arrays: [Array; N], len: usize) -> Result<()> {
        self.fill(arrays, 0, len)
    }

    /// NaN in all `len` elements of those arrays that are not null: the statistics of empty rows.
    pub(super) fn fill_nan<const N: usize>(&self, arrays: [Array; N], len: usize) -> Result<()> {
        self.fill(arrays, 0xff, len) // all bits set are a NaN in every type
    }

    fn fill<const N: usize>(&self, arrays: [Array; N], byte: u8, len: usize) -> Result<()> {
        let mut given = arrays.into_iter().filter(|array| array.is_some());
        given.try_for_each(|array| self.stream.fill(array.at.addr() as u64, byte, len * array.float.size()))
    }
}

/// Whether there is a GPU that eager ops can use.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        // cuBLASLt may be missing: matrix products then run by a kernel of ours.
        Device::check(0).and_then(|()| Open::find(NVRTC).map(drop)).is_ok()
    })
}
