//! One product cut into blocks of c, each computed by one task on its own. At most a small b is packed before ([`packs`]).
//!
//! order  as [`gemm`](super::gemm): how a product is cut changes no bit, so it may depend on the threads.

use super::local::{Beside, Given, PACKED_ROWS, local};
use super::plan::{KC, slice_len};
use super::workspace::LocalScratch;
use super::{Gemm, MatMut, MatRef, gemv, narrow};
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
    narrow::fits(g) || slice_len(g.k) * g.n * size_of::<f32>() <= STAY_BYTES
}

/// Whether b is worth packing before the blocks, all of it: its columns are contiguous, and every block reads it.
pub(super) fn packs(g: &Gemm<'_>) -> bool {
    g.b.cs != 1 && g.m > 0 && g.n > 0 && g.k > 0 && fits(g) && !narrow::fits(g) && !gemv::fits(g)
}

/// Floats of scratch that a block needs for its rows of a, and for a panel of b, where k is at most this.
pub(super) fn scratch_len(k: usize) -> [usize; 2] {
    let kc = k.next_multiple_of(8).min(KC);
    [(PACKED_ROWS * kc).max(narrow::SCRATCH), super::MAX_NR * kc]
}

/// How c is cut.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// Into so many rows at a time.
    Rows(usize),
    /// Into so many columns at a time.
    Columns(usize),
    /// Along the wider of a and b, so many of its columns at a time ([`narrow`]).
    Wide(usize),
}

impl Cut {
    /// For a product that is one of several, of `rows` together; with b `packed` or as it is.
    pub(super) fn new(g: &Gemm<'_>, rows: usize, threads: usize, packed: bool) -> Self {
        let packs_b = g.b.cs != 1 && !packed;
        if narrow::fits(g) {
            Self::Wide(narrow::size(g.m.max(g.n), threads))
        } else if packed {
            Self::Rows(ROWS)
        } else if gemv::fits(g) || (packs_b && g.n >= 2 * COLUMNS) || g.m < ROWS.min(g.n) {
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
            Self::Wide(size) => g.m.max(g.n).div_ceil(size),
        }
    }

    /// Rows and columns of a block.
    fn part(self, g: &Gemm<'_>, index: usize) -> (Range<usize>, Range<usize>) {
        let cut = |size: usize, len: usize| index * size..len.min((index + 1) * size);
        match self {
            Self::Rows(size) => (cut(size, g.m), 0..g.n),
            Self::Columns(size) => (0..g.m, cut(size, g.n)),
            Self::Wide(size) if g.n > g.m => (0..g.m, cut(size, g.n)),
            Self::Wide(size) => (cut(size, g.m), 0..g.n),
        }
    }

    /// Computes block `index` on the calling thread; `packed` is b, if it was packed before, and `beside` what the rows of c are used with
    /// next. Returns the rows and columns.
    ///
    /// # Safety
    /// As [`gemm`](super::gemm); `index` is below [`Cut::blocks`].
    pub(super) unsafe fn run(
        self,
        g: &Gemm<'_>,
        index: usize,
        (packed, beside): (Option<*const f32>, Option<Beside>),
        (isa, scratch): (Isa, &mut LocalScratch),
    ) -> (Range<usize>, Range<usize>) {
        let (rows, columns) = self.part(g, index);
        if matches!(self, Self::Wide(_)) {
            let part = if g.n > g.m { columns.clone() } else { rows.clone() };
            // SAFETY: guaranteed by the caller; `narrow::fits` was asked.
            unsafe { narrow::run(g, part, (isa, scratch)) };
            return (rows, columns);
        }
        // SAFETY: the block is not empty and inside c; the rest is guaranteed by the caller.
        unsafe {
            let a = MatRef { ptr: g.a.ptr.add(rows.start * g.a.rs), ..g.a };
            let b = MatRef { ptr: g.b.ptr.add(columns.start * g.b.cs), ..g.b };
            let c = MatMut { ptr: g.c.ptr.add(rows.start * g.c.rs + columns.start), ..g.c };
            let block = Gemm { m: rows.len(), n: columns.len(), a, b, c, epilogue: None, ..*g };
            if gemv::fits(g) && g.k > 0 {
                gemv::columns(isa, &block, 0..block.n);
            } else {
                let beside = beside.map(|beside| beside.rows_from(rows.start));
                local(scratch, isa, &block, Given { packed, streams: true, beside });
            }
        }
        (rows, columns)
    }
}
