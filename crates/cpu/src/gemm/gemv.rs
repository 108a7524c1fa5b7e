//! Rows times a matrix whose columns are contiguous (generation, serving): b is streamed once, unpacked.
//!
//! order  k is cut into slices by its length alone; the sum of a slice is that of `dots`, and the slices are added in order. So the bits of a
//! row depend neither on the other rows nor on the threads.

use super::dots::{DotTile, MOST_SUMS};
use super::kernel::{Kernels, LINE};
use super::{Beta, Gemm, kernels};
use crate::element::LANES;
use crate::isa::Isa;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// More rows than that are packed, unless they must be apart ([`Gemm::rows_apart`]).
pub(super) const FEW: usize = 4;
/// Columns in a task.
const BLOCK: usize = 64;
/// Columns that all rows are multiplied with before the next, and the longest slice of k: so many columns of it and some rows of a stay in the
/// first-level cache together.
const SOME: usize = 8;
const SLICE: usize = 768;

/// Whether this path can compute the product, and is the fastest.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    g.m <= g.few && g.b.rs == 1 && g.a.cs == 1
}

/// Length of a slice of k; the last may be shorter.
fn slice_len(k: usize) -> usize {
    k.div_ceil(k.div_ceil(SLICE).max(1)).next_multiple_of(LANES)
}

/// # Safety
/// As [`gemm`](super::gemm), and [`fits`].
pub(super) unsafe fn gemv(team: &Team, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    team.chunks(g.n, BLOCK, |block, worker| {
        // What this thread is likely to get next.
        let after = block.start + team.threads() * BLOCK;
        // SAFETY: guaranteed by the caller; tasks have different columns.
        unsafe { columns(isa, g, block.clone(), after) };
        g.finish(0..g.m, block, worker);
    })
}

/// Some columns of c, on the calling thread, without the epilogue. Columns from `after` on follow.
///
/// # Safety
/// As [`gemv`], for these columns.
pub(super) unsafe fn columns(isa: Isa, g: &Gemm<'_>, columns: Range<usize>, after: usize) {
    let kernels = kernels(isa);
    for first in columns.clone().step_by(SOME) {
        let some = first..columns.end.min(first + SOME);
        let next = if some.end < columns.end { some.end } else { after };
        // SAFETY: guaranteed by the caller.
        unsafe { some_columns(kernels, g, &some, next.min(g.n)..g.n.min(next + SOME)) };
    }
}

/// All rows of [`SOME`] columns, while the next are fetched.
///
/// # Safety
/// As [`columns`].
unsafe fn some_columns(kernels: &Kernels, g: &Gemm<'_>, some: &Range<usize>, next: Range<usize>) {
    // Groups of rows as even as they can be.
    let groups = g.m.div_ceil(kernels.dots.len());
    let group = |i: usize| i * g.m / groups..(i + 1) * g.m / groups;
    let slice = slice_len(g.k);
    let mut ahead = Ahead::new(g, next, groups * g.k.div_ceil(slice));
    for k0 in (0..g.k).step_by(slice) {
        let k = slice.min(g.k - k0);
        for rows in (0..groups).map(group) {
            let kernel = &kernels.dots[rows.len() - 1];
            let mut lines = ahead.share();
            let mut column = some.start;
            while column < some.end {
                let (wide, dots) = match some.end - column {
                    left if left >= kernel.columns => (kernel.columns, kernel.many),
                    _ => (1, kernel.one),
                };
                let now = (lines * wide).div_ceil(some.end - column);
                lines -= now;
                let mut sums = [0.0; MOST_SUMS];
                // SAFETY: the rows are below m, the columns below n, the steps below k, and all three are contiguous along k (`fits`); the
                // kernels are of an `Isa` this machine has, and this one is for so many rows and columns; nobody else uses these elements of c.
                unsafe {
                    let tile = DotTile {
                        k,
                        a: g.a.ptr.add(rows.start * g.a.rs + k0),
                        a_rs: g.a.rs,
                        b: g.b.ptr.add(column * g.b.cs + k0),
                        b_cs: g.b.cs,
                        fetch: ahead.take(now),
                        lines: now,
                    };
                    dots(&tile, &mut sums);
                    let adds = g.beta == Beta::Accumulate || k0 > 0;
                    for (row, sums) in rows.clone().zip(sums.chunks_exact(wide)) {
                        let c = std::slice::from_raw_parts_mut(g.c.ptr.add(row * g.c.rs + column), wide);
                        for (c, sum) in c.iter_mut().zip(sums) {
                            *c = if adds { *c + g.alpha * sum } else { g.alpha * sum };
                        }
                    }
                }
                column += wide;
            }
        }
    }
}

/// Columns that are fetched while others are multiplied, a part with each group of rows: the memory is busy all the time.
struct Ahead {
    at: *const f32,
    lines: usize,
    shares: usize,
}

impl Ahead {
    /// In so many shares. Columns that do not follow each other are fetched at once.
    fn new(g: &Gemm<'_>, columns: Range<usize>, shares: usize) -> Self {
        let at = |column: usize| g.b.ptr.wrapping_add(column * g.b.cs);
        let lines = g.k.div_ceil(LINE);
        if g.b.cs == g.k {
            return Self { at: at(columns.start), lines: (columns.len() * g.k).div_ceil(LINE), shares };
        }
        for column in columns {
            (0..lines).for_each(|line| fetch(at(column).wrapping_add(line * LINE)));
        }
        Self { at: g.b.ptr, lines: 0, shares: 1 }
    }

    /// Lines of the next share.
    fn share(&mut self) -> usize {
        let share = self.lines.div_ceil(self.shares.max(1));
        self.shares = self.shares.saturating_sub(1);
        share
    }

    /// Where the next `lines` begin.
    fn take(&mut self, lines: usize) -> *const f32 {
        let at = self.at;
        self.at = self.at.wrapping_add(lines * LINE);
        self.lines = self.lines.saturating_sub(lines);
        at
    }
}

/// Asks for the cache line at `p`, which need not be mapped.
fn fetch(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint; any address is allowed, and every x86-64 has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
