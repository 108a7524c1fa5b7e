//! The tile unit's side of `halves`: four tiles of results at a time, for weights that are kept in bf16.

use super::kernel::LINE;
use super::tiles::{ROWS, SIDE, TILE, bits, zeros};
use std::arch::asm;
use std::arch::x86_64::*;

/// Four tiles of the product with a weight that is kept in bf16.
pub(super) struct Block {
    /// Tiles along k.
    pub steps: usize,
    /// The first tile of 16 rows of a, and of the 16 below them.
    pub a: [*const f32; 2],
    /// Where panels begin, and how many rows each has: from one pair of steps to the next, in floats.
    pub b: [(*const f32, usize); 4],
    /// Where the results go, and from one row to the next.
    pub c: *mut f32,
    pub c_rs: usize,
    /// The first of the panels that are fetched meanwhile, and from one to the next.
    pub ahead: *const f32,
    pub panel: usize,
    /// Which of how many blocks this is that share the fetching.
    pub share: [usize; 2],
}

impl Block {
    /// Fetches this block's share of the next panels for one tile of b, of `PANELS` in each step: some lines of each quarter of each panel
    /// in turns. Not more at once: they take the line buffers that loading the tile needs.
    #[inline(always)]
    fn fetch<const PANELS: usize>(&self, step: usize, tile: usize) {
        const CUTS: usize = 4;
        let [block, blocks] = self.share;
        let (lines, cut) = (ROWS.div_ceil(blocks), self.steps * ROWS / CUTS * LINE);
        let first = ((block * self.steps + step) * PANELS + tile) * lines;
        for line in first..first + lines {
            let (stream, along) = (line % (CUTS * PANELS), line / (CUTS * PANELS));
            // Of more than 16 blocks the last have nothing left to fetch.
            if along * LINE >= cut {
                return;
            }
            let at = stream % PANELS * self.panel + stream / PANELS * cut + along * LINE;
            // SAFETY: an address is not followed, only asked for.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.ahead.wrapping_add(at).cast()) };
        }
    }
}

/// Adds the product of the tile of a in `$a` and one of b, which passes through `$b`, to `$c`.
macro_rules! multiply {
    ($c:literal, $a:literal, $b:literal, ($ptr:expr, $rows:expr), $step:expr) => {
        asm!(
            concat!("tileloadd tmm", $b, ", [{b} + {s}*1]"),
            concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b),
            b = in(reg) $ptr.wrapping_add($step * ROWS * $rows), s = in(reg) 4 * $rows,
            options(nostack, preserves_flags, readonly)
        )
    };
}

macro_rules! load_a {
    ($a:literal, $ptr:expr, $step:expr) => {
        asm!(
            concat!("tileloadd tmm", $a, ", [{a} + {s}*1]"),
            a = in(reg) $ptr.wrapping_add($step * TILE), s = in(reg) 64_usize,
            options(nostack, preserves_flags, readonly)
        )
    };
}

macro_rules! store {
    ($c:literal, $at:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{c} + {s}*1], tmm", $c),
            c = in(reg) $at, s = in(reg) 4 * $stride, options(nostack, preserves_flags)
        )
    };
}

/// 16 rows by four panels.
///
/// # Safety
/// The block is good for its tiles, and the thread has tiles.
pub(super) unsafe fn one_by_four(t: &Block) {
    // SAFETY: guaranteed by the caller; the compiler uses no tiles itself.
    unsafe {
        zeros();
        for step in 0..t.steps {
            load_a!(4, t.a[0], step);
            t.fetch::<4>(step, 0);
            multiply!(0, 4, 5, (t.b[0].0, t.b[0].1), step);
            t.fetch::<4>(step, 1);
            multiply!(1, 4, 6, (t.b[1].0, t.b[1].1), step);
            t.fetch::<4>(step, 2);
            multiply!(2, 4, 7, (t.b[2].0, t.b[2].1), step);
            t.fetch::<4>(step, 3);
            multiply!(3, 4, 5, (t.b[3].0, t.b[3].1), step);
        }
        store!(0, t.c, t.c_rs);
        store!(1, t.c.wrapping_add(ROWS), t.c_rs);
        store!(2, t.c.wrapping_add(2 * ROWS), t.c_rs);
        store!(3, t.c.wrapping_add(3 * ROWS), t.c_rs);
    }
}

/// 32 rows by two panels.
///
/// # Safety
/// As [`one_by_four`].
pub(super) unsafe fn two_by_two(t: &Block) {
    let below = t.c.wrapping_add(ROWS * t.c_rs);
    // SAFETY: as in `one_by_four`.
    unsafe {
        zeros();
        for step in 0..t.steps {
            load_a!(4, t.a[0], step);
            t.fetch::<2>(step, 0);
            multiply!(0, 4, 6, (t.b[0].0, t.b[0].1), step);
            t.fetch::<2>(step, 1);
            multiply!(1, 4, 7, (t.b[1].0, t.b[1].1), step);
            load_a!(5, t.a[1], step);
            asm!(
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                options(nostack, preserves_flags, nomem)
            );
        }
        store!(0, t.c, t.c_rs);
        store!(1, t.c.wrapping_add(ROWS), t.c_rs);
        store!(2, below, t.c_rs);
        store!(3, below.wrapping_add(ROWS), t.c_rs);
    }
}

/// Rounds up to 16 rows to tiles one after the other, 32 steps each. Rows that are not there keep what `to` held.
///
/// # Safety
/// The rows have k floats, a multiple of 32; `to` is good for k tiles of a thirty-second; [`tiles::are_there`](super::tiles::are_there).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn round_rows((from, stride): (*const f32, usize), [count, k]: [usize; 2], to: *mut f32) {
    for row in 0..count {
        for step in (0..k).step_by(SIDE) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let at = from.add(row * stride + step);
                let (x, y) = (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16)));
                let to = to.add(step / SIDE * TILE + row * ROWS);
                _mm512_storeu_si512(to.cast(), bits(_mm512_cvtne2ps_pbh(y, x)));
            }
        }
    }
}
