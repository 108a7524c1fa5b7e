//! What only measurements use: kernels (noise to compute with, a checksum, a copy, a pause), and the time of work on a stream.

use crate::Result;
use crate::args::{Args, Grid};
use crate::device::{Event, Stream};
use crate::kernels::Spec;
use ironhorse_core::DType;

const THREADS: u32 = 512;

/// The module of these kernels.
pub(crate) fn spec() -> Spec {
    Spec::new("common/limits.cu")
}

/// A grid of a size that fills the stream's device.
pub(crate) fn full_grid(stream: &Stream) -> Grid {
    Grid::linear(8 * stream.device().info.sms as usize, THREADS)
}

/// Fills memory with random numbers, so that the power drawn is that of real data.
pub(crate) fn fill_with_noise(stream: &Stream, at: u64, bytes: usize) -> Result<()> {
    noise(stream, "limits_noise", at, bytes)
}

/// As [`fill_with_noise`], with numbers of this type.
pub(crate) fn fill_with_noise_of(stream: &Stream, dtype: DType, at: u64, bytes: usize) -> Result<()> {
    noise(stream, if dtype.size() == 1 { "limits_noise_fp8" } else { "limits_noise" }, at, bytes)
}

fn noise(stream: &Stream, kernel: &'static str, at: u64, bytes: usize) -> Result<()> {
    let noise = stream.device().function(&spec().kernel(kernel))?;
    stream.launch(noise, full_grid(stream), &mut Args::new().ptr(at).u64(bytes as u64 / 16))
}

/// Milliseconds of what `work` puts on the stream: the mean of `repeats` runs in a row, right behind `skip` others.
pub(crate) fn mean_ms(
    stream: &Stream,
    skip: u32,
    repeats: u32,
    mut work: impl FnMut() -> Result<()>,
) -> Result<f32> {
    let (start, end) = (Event::new(stream.device(), true)?, Event::new(stream.device(), true)?);
    (0..skip).try_for_each(|_| work())?;
    start.record(stream)?;
    (0..repeats).try_for_each(|_| work())?;
    end.record(stream)?;
    end.synchronize()?;
    Ok(end.since(&start)? / repeats.max(1) as f32)
}
