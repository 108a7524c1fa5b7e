//! Rows times a matrix whose columns are contiguous (generation, serving): b is streamed once, unpacked.
//!
//! order  k is cut into slices by its length alone; the sum of a slice is that of `dots`, and the slices are added to c in order. So the
//! bits of a row depend neither on the other rows nor on the threads.

use super::dots::{COLUMNS, DotTile, LANES, ROWS, Sums};
use super::kernel::Kernels;
use super::{Beta, Gemm, Rows, kernels};
use crate::isa::Isa;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// More rows than that are packed, unless they must be apart ([`Gemm::rows_apart`]).
pub(super) const FEW: usize = 4;
/// Columns in a task.
const BLOCK: usize = 64;
/// The longest slice of k: 8 columns of it and 6 rows of a stay in the first-level cache together.
const SLICE: usize = 768;

/// Whether this path can compute the product, and is the fastest.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    let few = match g.rows {
        Rows::Fastest => g.m <= FEW,
        Rows::Dots => true,
        Rows::Packed | Rows::Kept(_) => false,
    };
    few && g.b.rs == 1 && g.a.cs == 1
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
    let call = Call { g, kernels: kernels(isa), slice: slice_len(g.k) };
    // Eight columns at a time that are as far from each other as they can be: the processor's own prefetching is given long streams.
    let apart = columns.len() / COLUMNS;
    for first in columns.start..columns.start + apart {
        // SAFETY: guaranteed by the caller: the last of these columns is below the end.
        unsafe { call.columns(Part { first, step: apart, count: COLUMNS }) };
    }
    let first = columns.start + apart * COLUMNS;
    // SAFETY: guaranteed by the caller.
    unsafe { call.columns(Part { first, step: 1, count: columns.end - first }) };
}

/// Length of a slice of k; the last may be shorter.
fn slice_len(k: usize) -> usize {
    k.div_ceil(k.div_ceil(SLICE).max(1)).next_multiple_of(LANES)
}

/// Up to [`COLUMNS`] columns, `step` from one to the next.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    step: usize,
    count: usize,
}

struct Call<'a> {
    g: &'a Gemm<'a>,
    kernels: &'static Kernels,
    slice: usize,
}

impl Call<'_> {
    /// All rows of some columns.
    ///
    /// # Safety
    /// As [`columns`], for these columns.
    unsafe fn columns(&self, some: Part) {
        let (g, most) = (self.g, self.kernels.dots.len());
        // Groups of rows as even as they can be.
        let groups = g.m.div_ceil(most);
        for k0 in (0..g.k).step_by(self.slice) {
            let k = self.slice.min(g.k - k0);
            for group in 0..groups {
                let rows = group * g.m / groups..(group + 1) * g.m / groups;
                let kernel = &self.kernels.dots[rows.len() - 1];
                let mut sums: Sums = [[0.0; COLUMNS]; ROWS];
                let mut done = 0;
                while done < some.count {
                    let (wide, dots) = match some.count - done {
                        left if left >= kernel.columns => (kernel.columns, kernel.many),
                        _ => (1, kernel.one),
                    };
                    let column = some.first + done * some.step;
                    // SAFETY: the rows are below m, the columns below n, the steps below k, and all are contiguous along k (`fits`); the kernel
                    // is for so many rows and columns, of an `Isa` this machine has.
                    unsafe {
                        dots(&DotTile {
                            k,
                            a: g.a.ptr.add(rows.start * g.a.rs + k0),
                            a_rs: g.a.rs,
                            b: g.b.ptr.add(column * g.b.cs + k0),
                            b_cs: g.b.cs * some.step,
                            sums: sums.as_mut_ptr().cast::<f32>().add(done),
                        });
                    }
                    done += wide;
                }
                // SAFETY: guaranteed by the caller.
                unsafe { self.put(rows, some, &sums, g.beta == Beta::Accumulate || k0 > 0) };
            }
        }
    }

    /// c (+)= alpha sums
    ///
    /// # Safety
    /// The caller alone uses these elements of c.
    unsafe fn put(&self, rows: Range<usize>, some: Part, sums: &Sums, adds: bool) {
        let alpha = self.g.alpha;
        for (row, sums) in rows.zip(sums) {
            // SAFETY: an element of a row below m and a column below n.
            unsafe {
                let c = self.g.c.ptr.add(row * self.g.c.rs + some.first);
                let new = |old: f32, sum: f32| if adds { old + alpha * sum } else { alpha * sum };
                if some.step == 1 && some.count == COLUMNS {
                    let c = &mut *c.cast::<[f32; COLUMNS]>();
                    (0..COLUMNS).for_each(|j| c[j] = new(c[j], sums[j]));
                } else {
                    for (j, &sum) in sums[..some.count].iter().enumerate() {
                        let c = c.add(j * some.step);
                        *c = new(if adds { *c } else { 0.0 }, sum);
                    }
                }
            }
        }
    }
}
