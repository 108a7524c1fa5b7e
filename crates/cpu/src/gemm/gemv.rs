//! Few rows times a matrix whose columns are contiguous (token-by-token generation): b is streamed once, unpacked.
//!
//! order  as `element::dot`: 32 lanes over k and a fixed tree, whatever m and the threads.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::{Beta, Gemm};
use crate::element::{LANES, dot, tree};
use crate::isa::Isa;
use crate::math::fma;
use crate::multiversion;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// More rows than that are faster packed.
const MAX_ROWS: usize = 4;
/// Columns in a task.
const BLOCK: usize = 64;
/// How far ahead b is fetched, in floats.
const AHEAD: usize = 1024;

/// Whether this path can compute the product, and is the fastest.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    g.m <= MAX_ROWS && g.b.rs == 1 && g.a.cs == 1
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
    for j in columns {
        // SAFETY: column j < n of b is k contiguous floats.
        let w = unsafe { std::slice::from_raw_parts(g.b.ptr.add(j * g.b.cs), g.k) };
        for i in 0..g.m {
            // SAFETY: row i < m of a is k contiguous floats.
            let x = unsafe { std::slice::from_raw_parts(g.a.ptr.add(i * g.a.rs), g.k) };
            let sum = g.alpha * if i == 0 { first_dot(isa, w, x) } else { dot(isa, w, x) };
            // SAFETY: element (i, j) of c, which the caller alone uses.
            unsafe {
                let c = g.c.ptr.add(i * g.c.rs + j);
                *c = if g.beta == Beta::Accumulate { *c + sum } else { sum };
            }
        }
    }
}

multiversion! {
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
