//! Measuring what this machine can do at most.

use crate::buffer::Buffer;
use crate::gemm::{multiply_tiles, multiply_vectors};
use crate::isa::Isa;
use crate::math::fma;
use crate::memory::Span;
use crate::multiversion;
use crate::team::Team;
use ironhorse_core::Operands;
use std::time::Instant;

/// Measures the limits of this machine: multiply-adds of the kernels of products on what is in the first-level cache or in registers, counted as
/// two operations each, and the bytes read and written by `a = s·a + b` on arrays beyond the caches.
#[derive(Clone, Copy, Debug)]
pub struct Limits;

/// How often the loops of vectors and of tiles multiply: for less than a millisecond.
const VECTOR_TILES: usize = 1 << 10;
const TILE_STEPS: usize = 1 << 12;
/// Floats of each of the two streamed arrays: 256 MiB each, beyond the caches.
const STREAM: usize = 1 << 26;
const STREAM_CHUNK: usize = 1 << 16;
/// The best of this many counts: a limit is what is possible, not what is usual. Figures of a debug build are not for
/// comparing, and its commands should start soon.
const REPEATS: usize = if cfg!(debug_assertions) { 1 } else { 8 };
/// How many counts of these loops: the first ones are over before the processor has its speed, and a shared machine is fast at moments only.
const PRODUCT_REPEATS: usize = 16 * REPEATS;

multiversion! {
    /// a = s·a + b: every byte that moves is counted, as a line that is written was read before
    fn update<const FMA: bool>(a: &mut [f32], b: &[f32], s: f32) {
        for (a, b) in a.iter_mut().zip(b) {
            *a = fma::<FMA>(s, *a, *b);
        }
    }
}

impl Limits {
    /// Takes about a second and half a gigabyte.
    pub fn measure(threads: usize) -> ironhorse_core::Limits {
        let flops_per_s = Self::measure_flops(threads, Operands::F32);
        let bytes_per_s = Self::measure_bandwidth(threads);
        ironhorse_core::Limits { flops_per_s, bytes_per_s }
    }

    /// The arithmetic limit alone, with products of operands that are rounded so; takes little memory. A shared machine is faster at one
    /// moment than at another, so measure before and after what is to be compared, and take the larger.
    pub fn measure_flops(threads: usize, operands: Operands) -> f64 {
        let team = Team::new(threads);
        let vectors = product_rate(&team, || multiply_vectors(Isa::detect(), VECTOR_TILES));
        let rounded = operands == Operands::Bf16;
        if rounded { vectors.max(product_rate(&team, || multiply_tiles(TILE_STEPS))) } else { vectors }
    }

    /// The limit of the memory alone.
    pub fn measure_bandwidth(threads: usize) -> f64 {
        stream_rate(&Team::new(threads), Isa::detect())
    }
}

/// The best of some repeats, in units per second.
fn best(units: f64, repeats: usize, mut run: impl FnMut()) -> f64 {
    run();
    let fastest = (0..repeats).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    units / fastest.fold(f64::INFINITY, f64::min)
}

/// With a loop that returns its operations.
fn product_rate(team: &Team, multiply: impl Fn() -> usize + Sync) -> f64 {
    let flops = (multiply() * team.threads()) as f64;
    best(flops, if flops > 0.0 { PRODUCT_REPEATS } else { 0 }, || {
        // A panic is not possible here; a shorter run would only lower the figure.
        let _ = team.run(team.threads(), &|_, _| {
            multiply();
        });
    })
}

fn stream_rate(team: &Team, isa: Isa) -> f64 {
    let (mut a, b) = (Buffer::zeroed(STREAM), Buffer::zeroed(STREAM));
    let target = Span::of_slice(a.as_mut_slice());
    best((3 * STREAM * size_of::<f32>()) as f64, REPEATS, || {
        let _ = team.chunks(STREAM, STREAM_CHUNK, |r, _| {
            // SAFETY: tasks have disjoint ranges of `a`, which outlives the run.
            let a = unsafe { target.get_mut(r.clone()) };
            update(isa, a, &b.as_slice()[r], 3.0);
        });
    })
}
