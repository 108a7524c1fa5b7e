//! The kernels of `heads` on the tile unit (AMX): operands are rounded to bf16 on their way into tiles, sums are f32.
//!
//! One instruction gives 16 vectors of 16 scores for up to 32 channels of a head, where vectors need a multiply-add for each vector and channel.
//! What is left is rounding: operands have so few numbers beside the scores that nothing is kept from call to call.
//!
//! order  the unit adds two neighbouring products at a time to each element, from zero for scores, else from what is there.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::heads::{FloatRows, HeadGradients, HeadKernels, HeadScores, HeadSums, QUERIES};
use super::heads_x86::{from_columns, head_dots, to_columns};
use super::tiles::{ROWS, SIDE, bits, enter, in_turns, leave, transpose_dwords, zeros};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// For these sizes of heads.
pub(super) static HEADS: [HeadKernels; 4] =
    [heads_of::<16>(), heads_of::<32>(), heads_of::<64>(), heads_of::<128>()];
/// Elements of a head, steps of a product over them, and keys of a call, at most.
const MOST_HEAD: usize = 128;
const MOST_STEPS: usize = MOST_HEAD / SIDE;
pub(super) const MOST_KEYS: usize = 128;
/// Tiles beside each other: of 32 queries.
const HALVES: usize = QUERIES / ROWS;

const fn heads_of<const HD: usize>() -> HeadKernels {
    HeadKernels {
        head_dim: HD,
        scores: tile_scores::<HD>,
        sums: tile_sums::<HD>,
        gradients: tile_gradients::<HD>,
        dots: head_dots::<HD>,
        to_columns: to_columns::<HD>,
        from_columns: from_columns::<HD>,
        enter: Some(enter),
        leave: Some(leave),
    }
}

/// A tile of bf16.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([__m512i; ROWS]);

/// Tiles that are written before they are loaded: all of a call together, so that none is loaded while it is still on its way to the cache.
struct Tiles<const N: usize>(MaybeUninit<[Tile; N]>);

impl<const N: usize> Tiles<N> {
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    /// Tile `i`, below `N`.
    fn at(&mut self, i: usize) -> *mut Tile {
        debug_assert!(i < N);
        self.0.as_mut_ptr().cast::<Tile>().wrapping_add(i)
    }
}

/// 16 by 16 sums.
#[repr(C, align(64))]
struct Sums([f32; ROWS * ROWS]);

macro_rules! load {
    ($tile:literal, $at:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $tile, ", [{at} + {s}*1]"), at = in(reg) $at, s = in(reg) $stride,
            options(nostack, preserves_flags, readonly))
    };
}

macro_rules! multiply {
    ($c:literal, $a:literal, $b:literal) => {
        asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, preserves_flags, nomem))
    };
}

macro_rules! store {
    ($tile:literal, $at:expr, $stride:expr) => {
        asm!(concat!("tilestored [{at} + {s}*1], tmm", $tile), at = in(reg) $at, s = in(reg) 4 * $stride,
            options(nostack, preserves_flags))
    };
}

/// Two vectors as one of bf16, the first in the lower half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn joined(first: __m512, second: __m512) -> __m512i {
    bits(_mm512_cvtne2ps_pbh(second, first))
}

/// Two vectors as one of bf16, lane by lane in turns: two steps of 16 columns, as a tile on the right has them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn paired(first: __m512, second: __m512) -> __m512i {
    _mm512_permutexvar_epi16(in_turns(), joined(first, second))
}

/// 16 floats of row `i`, or zeros where there is no such row.
///
/// # Safety
/// The rows have 16 floats from `column` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn sixteen(rows: &FloatRows, i: usize, column: usize) -> __m512 {
    if i >= rows.count {
        return _mm512_setzero_ps();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { _mm512_loadu_ps(rows.ptr.add(i * rows.rs + column)) }
}

/// 16 rows from `first` on, 32 of their columns, or 16 and zeros, as a tile on the left.
///
/// # Safety
/// As [`sixteen`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn left_of<const WIDTH: usize>(rows: &FloatRows, first: usize, column: usize) -> Tile {
    let mut tile = Tile([_mm512_setzero_si512(); ROWS]);
    for i in 0..ROWS {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let low = sixteen(rows, first + i, column);
            let high =
                if WIDTH > ROWS { sixteen(rows, first + i, column + ROWS) } else { _mm512_setzero_ps() };
            tile.0[i] = joined(low, high);
        }
    }
    tile
}

/// 32 rows from `first` on, 16 of their columns, as a tile on the right.
///
/// # Safety
/// As [`sixteen`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn right_of(rows: &FloatRows, first: usize, column: usize) -> Tile {
    let mut tile = Tile([_mm512_setzero_si512(); ROWS]);
    for i in 0..ROWS {
        let row = first + 2 * i;
        // SAFETY: guaranteed by the caller.
        tile.0[i] = unsafe { paired(sixteen(rows, row, column), sixteen(rows, row + 1, column)) };
    }
    tile
}

/// Adds to the first two tiles of sums: `steps` tiles on the left by as many pairs of them on the right.
///
/// # Safety
/// They are there, and the thread has entered.
#[inline(always)]
unsafe fn add_steps(left: *const Tile, right: *const Tile, steps: usize) {
    for step in 0..steps {
        let pair = right.wrapping_add(step * HALVES);
        // SAFETY: guaranteed by the caller; the compiler uses no tiles itself.
        unsafe {
            load!(4, left.wrapping_add(step), 64_usize);
            load!(5, pair, 64_usize);
            load!(6, pair.wrapping_add(1), 64_usize);
            multiply!(0, 4, 5);
            multiply!(1, 4, 6);
        }
    }
}

/// Scores, or what has their layout, as rows.
fn as_rows(scores: *const f32, count: usize) -> FloatRows {
    FloatRows { ptr: scores.cast_mut(), rs: QUERIES, count }
}

/// out[k, q] = Σ_d keys[k, d] queries[d, q]
///
/// # Safety
/// The machine has tiles, and the thread has entered; the pointers are good for what they are said to be.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile_scores<const HD: usize>(s: &HeadScores) {
    let (steps, blocks) = (HD.div_ceil(SIDE), s.keys.count.div_ceil(ROWS));
    let (mut left, mut right) =
        (Tiles::<{ MOST_KEYS / ROWS * MOST_STEPS }>::new(), Tiles::<{ MOST_STEPS * HALVES }>::new());
    // SAFETY: guaranteed by the caller; there are at most 128 keys, with room for a multiple of 16; the compiler uses no tiles itself.
    unsafe {
        let queries = as_rows(s.queries, HD);
        for i in 0..steps * HALVES {
            *right.at(i) = right_of(&queries, i / HALVES * SIDE, i % HALVES * ROWS);
        }
        for i in 0..blocks * steps {
            *left.at(i) = left_of::<HD>(&s.keys, i / steps * ROWS, i % steps * SIDE);
        }
        for block in 0..blocks {
            zeros();
            add_steps(left.at(block * steps), right.at(0), steps);
            let out = s.out.add(block * ROWS * QUERIES);
            store!(0, out, QUERIES);
            store!(1, out.add(ROWS), QUERIES);
        }
    }
}

/// sums[d, q] = or += Σ_k rows[k, d] weights[k, q]
///
/// # Safety
/// As [`tile_scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile_sums<const HD: usize>(s: &HeadSums<'_>) {
    let (steps, blocks) = (s.rows.count.div_ceil(SIDE), HD / ROWS);
    let mut left = Tiles::<{ MOST_HEAD / ROWS * MOST_KEYS / SIDE }>::new();
    let mut right = Tiles::<{ MOST_KEYS / SIDE * HALVES }>::new();
    // SAFETY: guaranteed by the caller; there are at most 128 keys; the compiler uses no tiles itself.
    unsafe {
        if let Some(keeps) = s.keeps {
            for at in (0..HD * QUERIES).step_by(ROWS) {
                let (to, keeps) = (s.sums.add(at), keeps.as_ptr().add(at % QUERIES));
                _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(keeps)));
            }
        }
        let weights = as_rows(s.weights, s.rows.count);
        for i in 0..steps * HALVES {
            *right.at(i) = right_of(&weights, i / HALVES * SIDE, i % HALVES * ROWS);
        }
        for i in 0..blocks * steps {
            let columns = right_of(&s.rows, i % steps * SIDE, i / steps * ROWS);
            *left.at(i) = Tile(transpose_dwords(columns.0));
        }
        for block in 0..blocks {
            let to = s.sums.add(block * ROWS * QUERIES);
            if s.keeps.is_some() {
                load!(0, to, 4 * QUERIES);
                load!(1, to.add(ROWS), 4 * QUERIES);
            } else {
                zeros();
            }
            add_steps(left.at(block * steps), right.at(0), steps);
            store!(0, to, QUERIES);
            store!(1, to.add(ROWS), QUERIES);
        }
    }
}

/// to[k, d] += Σ_q weights[k, q] rows[q, d]
///
/// # Safety
/// As [`tile_scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile_gradients<const HD: usize>(s: &HeadGradients) {
    let (mut left, mut right) = (Tiles::<{ MOST_KEYS / ROWS }>::new(), Tiles::<{ MOST_HEAD / ROWS }>::new());
    let blocks = s.to.count.div_ceil(ROWS);
    // SAFETY: guaranteed by the caller; there are at most 128 keys, with room for a multiple of 16; the compiler uses no tiles itself.
    unsafe {
        for i in 0..HD / ROWS {
            *right.at(i) = right_of(&s.rows, 0, i * ROWS);
        }
        let weights = as_rows(s.weights, blocks * ROWS);
        for i in 0..blocks {
            *left.at(i) = left_of::<QUERIES>(&weights, i * ROWS, 0);
        }
        for block in 0..blocks {
            load!(4, left.at(block), 64_usize);
            let count = ROWS.min(s.to.count - block * ROWS);
            for column in (0..HD).step_by(ROWS) {
                let to = s.to.ptr.add(block * ROWS * s.to.rs + column);
                load!(5, right.at(column / ROWS), 64_usize);
                if count == ROWS {
                    load!(0, to, 4 * s.to.rs);
                    multiply!(0, 4, 5);
                    store!(0, to, s.to.rs);
                    continue;
                }
                let mut part = Sums([0.0; ROWS * ROWS]);
                for i in 0..count {
                    std::ptr::copy_nonoverlapping(
                        to.add(i * s.to.rs),
                        part.0.as_mut_ptr().add(i * ROWS),
                        ROWS,
                    );
                }
                let sums = part.0.as_mut_ptr();
                load!(0, sums, 64_usize);
                multiply!(0, 4, 5);
                store!(0, sums, ROWS);
                for i in 0..count {
                    std::ptr::copy_nonoverlapping(sums.add(i * ROWS), to.add(i * s.to.rs), ROWS);
                }
            }
        }
    }
}
