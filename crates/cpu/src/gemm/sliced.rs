//! Products of bf16 operands that sum over many rows of a narrow matrix and of a wide one, on the tile unit: the gradients of weights of
//! small models. Most of the time goes into packing the wide matrix, which memory delivers fastest row after row. So a task has a slice of
//! k and all of c: it packs both matrices and leaves its sums, and those of all slices are added afterwards.
//!
//! order  slices of k as of products of vectors; in a slice the unit adds two neighbouring products at a time, from zero. Then the slices are added in
//! order, and their sum to c.

use super::kernel::{Ahead, Kernels, LINE, Packing, Tile, rows_apart};
use super::plan::{KC, slice_len};
use super::{Beta, Gemm, MatRef, narrow, rounding_kernels};
use crate::isa::Isa;
use std::ops::Range;

/// Columns of the narrow and of the wide matrix, at most.
const NARROW: usize = 64;
const WIDE: usize = 1024;
/// Floats of sums, at most.
const MOST: usize = 1 << 20;

/// Whether a product of so many rows and columns may be computed so.
fn fits([m, n]: [usize; 2]) -> bool {
    m.min(n) <= NARROW && m.max(n) <= WIDE
}

/// Floats that a worker needs, however many steps products of so many rows and columns have.
pub(super) fn most_scratch(size: [usize; 2], kernels: &Kernels) -> usize {
    let padded = |count: usize| count.next_multiple_of(kernels.mr.max(kernels.nr)) * KC;
    if fits(size) && kernels.enter.is_some() { size.map(padded).iter().sum() } else { 0 }
}

/// Floats of the sums of so many slices of them.
pub(super) fn most_sums(size: [usize; 2], slices: usize, kernels: &Kernels) -> usize {
    if fits(size) && kernels.enter.is_some() { (size[0] * size[1] + LINE) * slices } else { 0 }
}

/// A product that is computed so.
pub(super) struct Sliced<'a> {
    g: &'a Gemm<'a>,
    kernels: &'static Kernels,
    /// Both have a row for each step.
    narrow: MatRef,
    wide: MatRef,
    /// Columns of both.
    m: usize,
    n: usize,
    /// Whether the wide matrix is a, so that sums are those of c transposed.
    transposed: bool,
    kc: usize,
}

impl<'a> Sliced<'a> {
    /// How a product that rounds its operands is computed so, if it is: that depends on its sizes, strides and epilogue and on the
    /// machine alone.
    pub(super) fn new(g: &'a Gemm<'a>, isa: Isa) -> Option<Self> {
        if !g.is_rounded() || g.epilogue.is_some() {
            return None;
        }
        let kernels = rounding_kernels(isa);
        let (wide, narrow, of_b) = narrow::sides(g);
        let (wide, kc) = (wide.transposed(), slice_len(g.k));
        let (m, n) = (g.m.min(g.n), g.m.max(g.n));
        let fits = kernels.enter.is_some()
            && [narrow, wide].iter().all(|matrix| matrix.cs == 1)
            && self::fits([m, n])
            && g.k > kc
            && g.k.div_ceil(kc) * m * n <= MOST;
        fits.then_some(Self { g, kernels, narrow, wide, m, n, transposed: !of_b, kc })
    }

    pub(super) fn slices(&self) -> usize {
        self.g.k.div_ceil(self.kc)
    }

    /// Floats of the sums of all slices.
    pub(super) fn sums_len(&self) -> usize {
        self.slices() * self.m * self.n
    }

    /// Floats of both matrices, packed: of the narrow one, and of both.
    fn packed(&self) -> [usize; 2] {
        let room = self.kernels.room(self.kc);
        let narrow = self.m.next_multiple_of(self.kernels.mr) * room;
        [narrow, narrow + self.n.next_multiple_of(self.kernels.nr) * room]
    }

    /// Floats that a worker needs.
    pub(super) fn scratch(&self) -> usize {
        self.packed()[1]
    }

    /// Leaves the sums of a slice.
    ///
    /// # Safety
    /// As [`gemm`](super::gemm); `sums` is good for [`Sliced::sums_len`] floats and `scratch` for [`Sliced::scratch`], and nobody else uses the
    /// sums of this slice.
    pub(super) unsafe fn task(&self, slice: usize, sums: *mut f32, scratch: *mut f32) {
        let &Self { kernels, narrow, wide, m, n, .. } = self;
        let k0 = slice * self.kc;
        let k = self.kc.min(self.g.k - k0);
        let (a, b) = (scratch, scratch.wrapping_add(self.packed()[0]));
        let packing = |from: MatRef, count: usize, dst: *mut f32| Packing {
            src: from.ptr.wrapping_add(k0 * from.rs),
            s_w: 1,
            s_k: from.rs,
            count,
            k,
            dst,
        };
        // SAFETY: the steps are inside both matrices, and the scratch holds both packed; a block is inside the sums of this slice; the
        // kernels are of an `Isa` this machine has.
        unsafe {
            (kernels.pack_a)(&packing(narrow, m, a));
            (kernels.pack_b)(&packing(wide, n, b));
            if let Some(enter) = kernels.enter {
                enter();
            }
            for column in (0..n).step_by(kernels.nr) {
                for row in (0..m).step_by(kernels.mr) {
                    let (rows, columns) = (kernels.mr.min(m - row), kernels.nr.min(n - column));
                    let vectors = columns.div_ceil(kernels.lanes);
                    let tile = Tile {
                        k,
                        a: a.add(row * kernels.room(k)),
                        a_rows: rows_apart(1),
                        a_cs: kernels.mr,
                        b: b.add(column * kernels.room(k)),
                        b_rs: kernels.nr,
                        c: sums.add((slice * m + row) * n + column),
                        c_rs: n,
                        rows,
                        columns,
                        last: columns - (vectors - 1) * kernels.lanes,
                        alpha: self.g.alpha,
                        accumulate: false,
                        fetch: std::ptr::null(),
                        ahead: Ahead::NOTHING,
                        fetches_c: false,
                        past_caches: false,
                    };
                    (kernels.packed(rows, vectors))(&tile);
                }
            }
            if let Some(leave) = kernels.leave {
                leave();
            }
        }
    }

    /// Adds the sums of all slices, for some rows of c.
    ///
    /// # Safety
    /// All slices have left their sums; these rows of c are writable, and nobody else uses them.
    pub(super) unsafe fn finish(&self, rows: Range<usize>, sums: *const f32) {
        let &Self { g, m, n, .. } = self;
        // SAFETY: guaranteed by the caller; `sums` has `m` rows of `n` floats for each slice.
        let sums = unsafe { std::slice::from_raw_parts(sums, self.sums_len()) };
        let mut total = [0.0; WIDE];
        let add = |row: usize, part: Range<usize>, total: &mut [f32; WIDE]| {
            let total = &mut total[..part.len()];
            total.fill(0.0);
            for slice in sums.chunks_exact(m * n) {
                let sums = &slice[row * n..][part.clone()];
                total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            }
        };
        let put = |row: usize, column: usize, sum: f32| {
            // SAFETY: an element of these rows of c.
            let c = unsafe { &mut *g.c.ptr.add(row * g.c.rs + column) };
            *c = if g.beta == Beta::Accumulate { *c + sum } else { sum };
        };
        if self.transposed {
            for column in 0..m {
                add(column, rows.clone(), &mut total);
                rows.clone().zip(&total).for_each(|(row, &sum)| put(row, column, sum));
            }
        } else {
            for row in rows {
                add(row, 0..n, &mut total);
                (0..n).zip(&total).for_each(|(column, &sum)| put(row, column, sum));
            }
        }
    }
}
