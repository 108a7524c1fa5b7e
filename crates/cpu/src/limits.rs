//! Measuring what this machine can do at most.

use crate::buffer::Buffer;
use crate::gemm::{Gemm, MatMut, MatRef, Workspace, gemm, multiply_tiles};
use crate::isa::Isa;
use crate::math::fma;
use crate::memory::Span;
use crate::multiversion;
use crate::team::Team;
use ironhorse_core::Operands;
use std::hint::black_box;
use std::time::Instant;

/// Measures the limits of this machine: multiply-adds in registers, counted as two operations each, and the bytes read
/// and written by `a = s·a + b` on arrays beyond the caches.
#[derive(Clone, Copy, Debug)]
pub struct Limits;

/// Accumulators of the register loop: enough to hide the latency of two multiply-add units.
const CHAINS: usize = 12;
const LANES: usize = 16;
const CHAIN_STEPS: usize = 1 << 18;
/// Floats of each of the two streamed arrays: 256 MiB each, beyond the caches.
const STREAM: usize = 1 << 26;
const STREAM_CHUNK: usize = 1 << 16;
/// Steps of the loop of products of tiles, each of 64 cycles.
const TILE_STEPS: usize = 1 << 12;
/// Side of the matrix product that backs up the register loops where the compiler spills them.
const SIDE: usize = 768;
/// The best of this many counts: a limit is what is possible, not what is usual. Figures of a debug build are not for
/// comparing, and its commands should start soon.
const REPEATS: usize = if cfg!(debug_assertions) { 1 } else { 8 };
/// How many counts of the register loop, each of which takes less than a millisecond: the first ones are over before the processor has its
/// speed, and a shared machine is fast at moments only.
const REGISTER_REPEATS: usize = 16 * REPEATS;

multiversion! {
    /// Independent chains of x = x·a + b.
    fn chains<const FMA: bool>(steps: usize, a: f32, b: f32) -> f32 {
        let mut x = [[1.0_f32; LANES]; CHAINS];
        for _ in 0..steps {
            for chain in &mut x {
                for lane in chain {
                    *lane = fma::<FMA>(*lane, a, b);
                }
            }
        }
        x.iter().flatten().sum()
    }

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
        let (team, isa) = (Team::new(threads), Isa::detect());
        let registers = register_rate(&team, isa).max(product_rate(&team, isa, operands));
        if operands == Operands::Bf16 { registers.max(tile_rate(&team)) } else { registers }
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

fn register_rate(team: &Team, isa: Isa) -> f64 {
    let flops = (2 * CHAINS * LANES * CHAIN_STEPS * team.threads()) as f64;
    best(flops, REGISTER_REPEATS, || {
        // A panic is not possible here; a shorter run would only lower the figure.
        let _ = team.run(team.threads(), &|_, _| {
            black_box(chains(isa, black_box(CHAIN_STEPS), black_box(0.5), black_box(0.25)));
        });
    })
}

fn tile_rate(team: &Team) -> f64 {
    let flops = (multiply_tiles(1) * TILE_STEPS * team.threads()) as f64;
    best(flops, if flops > 0.0 { REGISTER_REPEATS } else { 0 }, || {
        let _ = team.run(team.threads(), &|_, _| {
            multiply_tiles(TILE_STEPS);
        });
    })
}

fn product_rate(team: &Team, isa: Isa, operands: Operands) -> f64 {
    // Zeros or ones need less power than numbers do.
    let numbers = || (0..SIDE * SIDE).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect::<Vec<f32>>();
    let (a, b, mut c) = (numbers(), numbers(), vec![0.0; SIDE * SIDE]);
    let mut workspace = Workspace::new();
    let c = MatMut { ptr: c.as_mut_ptr(), rs: SIDE };
    let [a, b] = [&a, &b].map(|m| MatRef::row_major(m.as_ptr(), SIDE));
    let product = Gemm::new((SIDE, SIDE, SIDE), a, b, c).operands(operands);
    best(2.0 * (SIDE as f64).powi(3), REPEATS, || {
        // SAFETY: the three matrices are `SIDE` by `SIDE` and distinct.
        let _ = unsafe { gemm(team, &mut workspace, isa, &product) };
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
