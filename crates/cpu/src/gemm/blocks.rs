//! One product cut into blocks of c, each computed by one task on its own: no operand is packed before, no barrier.
//!
//! order  as [`gemm`](super::gemm): how a product is cut changes no bit, so it may depend on the threads.

use super::local::PACKED_ROWS;
use super::plan::{KC, slice_len};
use super::workspace::LocalScratch;
use super::{Gemm, MatMut, MatRef, gemm_local, gemv};
use crate::isa::Isa;
use std::ops::Range;

/// Bytes of a slice of b that may stay where it is: every block reads it again, so it must stay in the second-level cache.
const STAY_BYTES: usize = 400 << 10;
/// Columns of c in a block, where it is cut by columns: whole panels of every kernel.
const COLUMNS: usize = 96;
/// Rows of c in a block: of one that packs its rows of a, and of one that packs b again, from and to.
const ROWS: usize = PACKED_ROWS;
const MOST_ROWS: usize = 256;

/// Whether blocks are faster than a shared packed operand: b is small.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    slice_len(g.k) * g.n * size_of::<f32>() <= STAY_BYTES
}

/// Floats of scratch that a block needs for its rows of a, and for a panel of b, where k is at most this.
pub(super) fn scratch_len(k: usize) -> [usize; 2] {
    let kc = k.next_multiple_of(8).min(KC);
    [PACKED_ROWS * kc, super::MAX_NR * kc]
}

/// How c is cut.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// Into so many rows at a time.
    Rows(usize),
    /// Into so many columns at a time.
    Columns(usize),
}

impl Cut {
    /// For a product that is one of several, of `rows` together.
    pub(super) fn new(g: &Gemm<'_>, rows: usize, threads: usize) -> Self {
        let packs_b = g.b.cs != 1;
        if gemv::fits(g) || (packs_b && g.n >= 2 * COLUMNS) || g.m < ROWS.min(g.n) {
            Self::Columns(COLUMNS) // each block packs its own part of b, if any
        } else if packs_b {
            Self::Rows((rows / (4 * threads)).next_multiple_of(8).clamp(ROWS, MOST_ROWS))
        } else {
            Self::Rows(ROWS)
        }
    }

    pub(super) fn blocks(self, g: &Gemm<'_>) -> usize {
        match self {
            _ if g.m == 0 || g.n == 0 => 0,
            Self::Rows(size) => g.m.div_ceil(size),
            Self::Columns(size) => g.n.div_ceil(size),
        }
    }

    /// Rows and columns of a block.
    fn part(self, g: &Gemm<'_>, index: usize) -> (Range<usize>, Range<usize>) {
        let cut = |size: usize, len: usize| index * size..len.min((index + 1) * size);
        match self {
            Self::Rows(size) => (cut(size, g.m), 0..g.n),
            Self::Columns(size) => (0..g.m, cut(size, g.n)),
        }
    }

    /// Computes block `index` on the calling thread.
    ///
    /// # Safety
    /// As [`gemm`](super::gemm); `index` is below [`Cut::blocks`].
    pub(super) unsafe fn run(
        self,
        g: &Gemm<'_>,
        index: usize,
        (isa, scratch, worker): (Isa, &mut LocalScratch, usize),
    ) {
        let (rows, columns) = self.part(g, index);
        // SAFETY: the block is not empty and inside c; the rest is guaranteed by the caller.
        unsafe {
            let a = MatRef { ptr: g.a.ptr.add(rows.start * g.a.rs), ..g.a };
            let b = MatRef { ptr: g.b.ptr.add(columns.start * g.b.cs), ..g.b };
            let c = MatMut { ptr: g.c.ptr.add(rows.start * g.c.rs + columns.start), ..g.c };
            let block = Gemm { m: rows.len(), n: columns.len(), a, b, c, epilogue: None, ..*g };
            if gemv::fits(g) && g.k > 0 {
                gemv::columns(isa, &block, 0..block.n);
            } else {
                gemm_local(scratch, isa, &block);
            }
        }
        g.finish(rows, columns, worker);
    }
}
