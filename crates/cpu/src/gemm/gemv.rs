//! Few rows times a matrix whose columns are contiguous (generation): b is streamed once, unpacked.
//!
//! order  as `element::dot`: 32 lanes over k and a fixed tree, whatever m and the threads.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::{Beta, Gemm};
use crate::element::{LANES, dot, tree};
use crate::isa::{Isa, IsaKind};
use crate::math::fma;
use crate::multiversion;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// More rows than that are faster packed.
pub(super) const FEW: usize = 4;
/// The same of products whose rows are apart ([`Gemm::rows_apart`]).
pub(super) const MOST_APART: usize = 64;
/// Columns in a task.
const BLOCK: usize = 64;
/// How far ahead b is fetched, in floats.
const AHEAD: usize = 1024;

/// Whether this path can compute the product, and is the fastest.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    g.m <= g.few && g.b.rs == 1 && g.a.cs == 1
}

/// # Safety
/// As [`gemm`](super::gemm), and [`fits`].
pub(super) unsafe fn gemv(team: &Team, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    team.chunks(g.n, BLOCK, |block, worker| {
        // SAFETY: guaranteed by the caller; tasks have different columns.
        unsafe { columns(isa, g, block.clone()) };
        g.finish(0..g.m, block, worker);
    })
}

/// Some columns of c, on the calling thread, without the epilogue.
///
/// # Safety
/// As [`gemv`], for these columns.
pub(super) unsafe fn columns(isa: Isa, g: &Gemm<'_>, columns: Range<usize>) {
    // SAFETY: column j < n of b and row i < m of a are k contiguous floats.
    let column = |j: usize| unsafe { std::slice::from_raw_parts(g.b.ptr.add(j * g.b.cs), g.k) };
    // SAFETY: as above.
    let row = |i: usize| unsafe { std::slice::from_raw_parts(g.a.ptr.add(i * g.a.rs), g.k) };
    let put = |i: usize, j: usize, sum: f32| {
        // SAFETY: element (i, j) of c, which the caller alone uses.
        unsafe {
            let c = g.c.ptr.add(i * g.c.rs + j);
            *c = if g.beta == Beta::Accumulate { *c + g.alpha * sum } else { g.alpha * sum };
        }
    };
    let tiled = g.m / TILE_ROWS * TILE_ROWS;
    for first in columns.clone().step_by(SOME) {
        let some = first..columns.end.min(first + SOME);
        for i in (0..tiled).step_by(TILE_ROWS) {
            let rows = [0, 1, 2, 3].map(|r| row(i + r));
            for j in some.clone().step_by(2) {
                let pair = [j, (j + 1).min(some.end - 1)];
                let sums = tile(isa, pair.map(column), rows, i == 0);
                for (c, &j) in pair.iter().enumerate().take(some.end - j) {
                    (0..TILE_ROWS).for_each(|r| put(i + r, j, sums[c][r]));
                }
            }
        }
        for j in some {
            for i in tiled..g.m {
                let (w, x) = (column(j), row(i));
                put(i, j, if i == 0 { first_dot(isa, w, x) } else { dot(isa, w, x) });
            }
        }
    }
}

/// Columns that all rows are multiplied with before the next: they stay in the first-level cache.
const SOME: usize = 8;
/// Rows that are multiplied with two columns at a time: more sums than a processor has registers would be slower.
const TILE_ROWS: usize = 4;

/// The sums of two columns with four rows, in the order of [`dot`].
fn tile(isa: Isa, w: [&[f32]; 2], x: [&[f32]; TILE_ROWS], fetches: bool) -> [[f32; TILE_ROWS]; 2] {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where these instructions were detected; all slices have the length of the first.
        IsaKind::Avx512 => unsafe { super::x86::tile_dots(w, x, fetches.then_some(AHEAD)) },
        _ => tile_dots(isa, w, x, fetches),
    }
}

multiversion! {
    /// The [`dot`] of each column with each row; `fetches` for columns that come from memory.
    fn tile_dots<const FMA: bool>(w: [&[f32]; 2], x: [&[f32]; TILE_ROWS], fetches: bool) -> [[f32; TILE_ROWS]; 2] {
        let k = w[0].len();
        let whole = k - k % LANES;
        // A variable for each sum: of an array of them the compiler keeps none in registers.
        let [mut a0, mut a1, mut a2, mut a3] = [[0.0; LANES]; TILE_ROWS];
        let [mut b0, mut b1, mut b2, mut b3] = [[0.0; LANES]; TILE_ROWS];
        for at in (0..whole).step_by(LANES) {
            let [w0, w1] = [lanes(w[0], at), lanes(w[1], at)];
            if fetches {
                fetch_ahead(w0);
                fetch_ahead(w1);
            }
            let [x0, x1, x2, x3] = x.map(|x| lanes(x, at));
            add_products::<FMA>(&mut a0, w0, x0);
            add_products::<FMA>(&mut b0, w1, x0);
            add_products::<FMA>(&mut a1, w0, x1);
            add_products::<FMA>(&mut b1, w1, x1);
            add_products::<FMA>(&mut a2, w0, x2);
            add_products::<FMA>(&mut b2, w1, x2);
            add_products::<FMA>(&mut a3, w0, x3);
            add_products::<FMA>(&mut b3, w1, x3);
        }
        let mut acc = [[a0, a1, a2, a3], [b0, b1, b2, b3]];
        for c in 0..2 {
            for r in 0..TILE_ROWS {
                for (lane, at) in (whole..k).enumerate() {
                    acc[c][r][lane] = fma::<FMA>(w[c][at], x[r][at], acc[c][r][lane]);
                }
            }
        }
        acc.map(|rows| rows.map(|lanes| tree(lanes, |a, b| a + b)))
    }

    /// As [`dot`], for a `w` that comes from memory.
    fn first_dot<const FMA: bool>(w: &[f32], x: &[f32]) -> f32 {
        let (ws, w_rest) = w.as_chunks::<LANES>();
        let (xs, x_rest) = x.as_chunks::<LANES>();
        let mut acc = [0.0; LANES];
        for (w, x) in ws.iter().zip(xs) {
            fetch_ahead(w);
            for lane in 0..LANES {
                acc[lane] = fma::<FMA>(w[lane], x[lane], acc[lane]);
            }
        }
        for ((acc, &w), &x) in acc.iter_mut().zip(w_rest).zip(x_rest) {
            *acc = fma::<FMA>(w, x, *acc);
        }
        tree(acc, |a, b| a + b)
    }
}

/// acc += w x, lane by lane.
#[inline(always)]
fn add_products<const FMA: bool>(acc: &mut [f32; LANES], w: &[f32; LANES], x: &[f32; LANES]) {
    for lane in 0..LANES {
        acc[lane] = fma::<FMA>(w[lane], x[lane], acc[lane]);
    }
}

/// The lanes of a vector from element `at` on.
#[inline(always)]
fn lanes(x: &[f32], at: usize) -> &[f32; LANES] {
    // one check, which the compiler hoists where the vectors have one length
    match x[at..at + LANES].try_into() {
        Ok(lanes) => lanes,
        Err(_) => unreachable!("the range has this length"),
    }
}

/// Brings the two cache lines at some distance after `w` into the cache; they are of the same column or the next.
#[inline(always)]
fn fetch_ahead(w: &[f32; LANES]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let p = w.as_ptr().wrapping_add(AHEAD);
        // SAFETY: a hint; any address is allowed, and every x86-64 has the instruction.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(p.cast());
            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(16).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = w;
}
