//! Products that sum over many rows of a narrow matrix and of a wide one: the gradients of weights of small models.
//!
//! Nothing is packed: a step of a tile is a row of the wide matrix, of which it takes one cache line, and a row of the narrow one.
//! A slice of k is short, so that its part of the wide matrix stays in the second-level cache and its part of the narrow one in the
//! first; while it is multiplied the next slice is fetched. A tile has its rows along the wide matrix, so where that is b the
//! result is computed transposed.
//!
//! order  as [`gemm`](super::gemm), with slices of [`SLICE`] steps.

use super::kernel::{AHEAD_ROWS, Ahead, LINE, Tile, Tiling, rows_apart};
use super::workspace::LocalScratch;
use super::{Beta, Gemm, MatMut, MatRef, Rows, gemv, kernels};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::IsaKind;
use std::ops::Range;

/// Steps of a slice of k. Those of the narrow matrix take half of a first-level cache of 32 KB.
pub(super) const SLICE: usize = 64;
/// Columns of the narrow matrix, at most.
const NARROW: usize = 64;
/// Columns of the wide matrix in a task, from and to.
const LEAST: usize = 32;
const MOST: usize = 256;
/// Addresses to fetch for a slice of a matrix of so many columns, at most.
const fn units(columns: usize) -> usize {
    SLICE / AHEAD_ROWS * (columns / LINE + 1)
}

/// Whether a product is computed in this order.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    let rows = g.a.rs == 1 && g.b.cs == 1;
    rows && g.rows == Rows::Fastest
        && g.m.min(g.n) <= NARROW
        && g.k > SLICE
        && !g.is_rounded()
        && !gemv::fits(g)
}

/// Floats of scratch that a task needs.
pub(super) const SCRATCH: usize = MOST * NARROW;

/// The wide matrix, transposed, the narrow one, and whether the result is transposed.
pub(super) fn sides(g: &Gemm<'_>) -> (MatRef, MatRef, bool) {
    if g.n > g.m { (g.b.transposed(), g.a.transposed(), true) } else { (g.a, g.b, false) }
}

/// Columns of the wide matrix in a task, if there are `columns` of them.
pub(super) fn size(columns: usize, threads: usize) -> usize {
    // Two tasks for each thread, or one where they would be too small: three tasks keep two threads busy for as long as four.
    let half = columns / (2 * threads);
    let size = if half >= LEAST { half } else { columns.div_ceil(threads) };
    size.next_multiple_of(LINE).clamp(LEAST, MOST)
}

/// Computes some columns of the wide matrix times the narrow one, on the calling thread.
///
/// # Safety
/// As [`gemm`](super::gemm) for these rows, or columns, of c; [`fits`]; there are at most [`MOST`].
pub(super) unsafe fn run(g: &Gemm<'_>, part: Range<usize>, (isa, scratch): (Isa, &mut LocalScratch)) {
    let (wide, narrow, transposed) = sides(g);
    let n = g.m.min(g.n);
    // SAFETY: the part is inside the matrix.
    let a = unsafe { wide.ptr.add(part.start) };
    let c = if transposed {
        scratch.packed_a.reserve(SCRATCH);
        let c = MatMut { ptr: scratch.packed_a.as_mut_ptr(), rs: n };
        if g.beta == Beta::Accumulate {
            // SAFETY: these columns of c are this task's, and the scratch is long enough.
            unsafe { turn(isa, columns_of(g, &part).into(), [n, part.len()], c) };
        }
        c
    } else {
        // SAFETY: the part is inside c.
        MatMut { ptr: unsafe { g.c.ptr.add(part.start * g.c.rs) }, rs: g.c.rs }
    };
    let (mut wides, mut narrows) = ([std::ptr::null(); units(MOST)], [std::ptr::null(); units(NARROW)]);
    for k0 in (0..g.k).step_by(SLICE) {
        let k = SLICE.min(g.k - k0);
        let next = g.k.min(k0 + 2 * SLICE).saturating_sub(k0 + SLICE);
        let ahead = (k0 + SLICE) * wide.cs;
        let wides = {
            let count = fetches(a.wrapping_add(ahead), (next, wide.cs), part.len(), &mut wides);
            &wides[..count]
        };
        let narrows = {
            let from = narrow.ptr.wrapping_add((k0 + SLICE) * narrow.rs);
            // Several rows of less than a line are in one.
            let count = if n < LINE { 0 } else { fetches(from, (next, narrow.rs), n, &mut narrows) };
            &narrows[..count]
        };
        // SAFETY: step k0 is inside both matrices.
        let (a, b) = unsafe { (a.add(k0 * wide.cs), narrow.ptr.add(k0 * narrow.rs)) };
        let slice = Slice {
            k,
            a,
            a_cs: wide.cs,
            b,
            b_rs: narrow.rs,
            c,
            columns: n,
            accumulate: k0 > 0 || g.beta == Beta::Accumulate,
        };
        // SAFETY: the slice is inside both matrices, and this part of c is this task's.
        unsafe { slice.run(isa, part.len(), g.alpha, [wides, narrows]) };
    }
    if transposed {
        // SAFETY: as above.
        unsafe { turn(isa, c.into(), [part.len(), n], columns_of(g, &part)) };
    }
}

/// Some columns of c.
fn columns_of(g: &Gemm<'_>, part: &Range<usize>) -> MatMut {
    MatMut { ptr: g.c.ptr.wrapping_add(part.start), rs: g.c.rs }
}

/// to[column, row] = from[row, column] for so many rows and columns.
///
/// # Safety
/// `from` is readable, and `to` is the caller's alone.
unsafe fn turn(isa: Isa, from: MatRef, [rows, columns]: [usize; 2], to: MatMut) {
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == IsaKind::Avx512 {
        // SAFETY: this machine has the instructions of an `Isa`; the rest is guaranteed by the caller.
        return unsafe { super::x86::turn(from, [rows, columns], to) };
    }
    for row in 0..rows {
        for column in 0..columns {
            // SAFETY: guaranteed by the caller.
            unsafe { *to.ptr.add(column * to.rs + row) = *from.ptr.add(row * from.rs + column) };
        }
    }
}

/// The addresses that cover `columns` columns of the next slice, whose first row is at `from`, into `list`. Returns how many there are.
fn fetches(from: *const f32, (steps, cs): (usize, usize), columns: usize, list: &mut [*const f32]) -> usize {
    let mut count = 0;
    let aligned = from.addr().is_multiple_of(LINE * size_of::<f32>()) && cs.is_multiple_of(LINE);
    // Rows that do not begin with a line may have one more.
    let columns = if aligned { columns } else { columns + LINE };
    for row in (0..steps).step_by(AHEAD_ROWS) {
        for column in (0..columns).step_by(LINE) {
            list[count] = from.wrapping_add(row * cs + column);
            count += 1;
        }
    }
    count
}

/// A slice of k of a task.
struct Slice {
    k: usize,
    a: *const f32,
    a_cs: usize,
    b: *const f32,
    b_rs: usize,
    c: MatMut,
    columns: usize,
    accumulate: bool,
}

impl Slice {
    /// Multiplies `rows` rows of a; `lists` is what to fetch of a and of b meanwhile, by all tiles together.
    ///
    /// # Safety
    /// The operands are readable, and c is the caller's alone.
    unsafe fn run(&self, isa: Isa, rows: usize, alpha: f32, lists: [&[*const f32]; 2]) {
        let kernels = kernels(isa);
        let tiling = Tiling::new(kernels, self.columns);
        let (high, wide) = (rows.div_ceil(tiling.rows), self.columns.div_ceil(tiling.columns));
        let tiles = high * wide;
        let each = lists.iter().map(|list| list.len()).sum::<usize>().div_ceil(tiles).max(1);
        let [wides, narrows] = lists.map(|list| list.chunks(each));
        let mut units = wides.map(|list| (list, self.a_cs)).chain(narrows.map(|list| (list, self.b_rs)));
        let (least, higher) = (rows / high.max(1), rows % high.max(1));
        let mut row = 0;
        for tile in 0..high {
            let height = least + usize::from(tile < higher); // none much lower than the others
            for column in (0..self.columns).step_by(tiling.columns) {
                let columns = tiling.columns.min(self.columns - column);
                let vectors = columns.div_ceil(kernels.lanes);
                let (list, rs) = units.next().unwrap_or((&[], 0));
                // SAFETY: the tile is inside the operands and c.
                unsafe {
                    let tile = Tile {
                        k: self.k,
                        a: self.a.add(row),
                        a_rows: rows_apart(1),
                        a_cs: self.a_cs,
                        b: self.b.add(column),
                        b_rs: self.b_rs,
                        c: self.c.ptr.add(row * self.c.rs + column),
                        c_rs: self.c.rs,
                        rows: height,
                        columns,
                        last: columns - (vectors - 1) * kernels.lanes,
                        alpha,
                        accumulate: self.accumulate,
                        fetch: std::ptr::null(),
                        ahead: Ahead::new(list, rs, self.k),
                        fetches_c: false,
                        past_caches: false,
                    };
                    tiling.kernel(height, vectors)(&tile);
                }
            }
            row += height;
        }
    }
}
