//! The kernels of `heads` for AVX-512.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::heads::{FloatRows, HeadGradients, HeadKernels, HeadScores, HeadSums, QUERIES, ROWS};
use super::kernel::Simd;
use super::x86::{Zmm, rows_of, transpose};
use crate::element::{LANES, tree};
use std::arch::x86_64::*;

/// Vectors of a row of scores.
const WIDE: usize = QUERIES / Zmm::LANES;
/// Rows of a tile of [`WIDE`] vectors.
const TALL: usize = 8;
const _: () = assert!(ROWS.is_multiple_of(TALL));

/// The kernels of attention for small heads.
pub(super) static HEADS: [HeadKernels; 2] = [heads_of::<16, 16, 1>(), heads_of::<32, 8, 2>()];

/// With tiles of `R` keys by `V` vectors of their gradients.
const fn heads_of<const HD: usize, const R: usize, const V: usize>() -> HeadKernels {
    HeadKernels {
        head_dim: HD,
        scores: head_scores::<HD>,
        sums: head_sums::<HD>,
        gradients: head_gradients::<HD, R, V>,
        dots: head_dots::<HD>,
        to_columns: to_columns::<HD>,
        from_columns: from_columns::<HD>,
        enter: None,
        leave: None,
    }
}

/// out[k, q] = Σ_d keys[k, d] queries[d, q]
///
/// # Safety
/// The machine has the instructions; the pointers are good for what they are said to be.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn head_scores<const HD: usize>(s: &HeadScores) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for first in (0..s.keys.count).step_by(TALL) {
            // Where fewer are left, the last is computed again: there is room for its scores.
            let left = s.keys.count - first - 1;
            let mut keys = [s.keys.ptr.cast_const(); TALL];
            for i in 0..TALL {
                keys[i] = s.keys.ptr.add((first + i.min(left)) * s.keys.rs);
            }
            let mut acc = [[Zmm::splat(0.0); WIDE]; TALL];
            let mut queries = s.queries;
            for d in 0..HD {
                let row = [Zmm::load(queries), Zmm::load(queries.add(Zmm::LANES))];
                for i in 0..TALL {
                    let x = Zmm::splat(*keys[i].add(d));
                    for j in 0..WIDE {
                        acc[i][j] = x.mul_add(row[j], acc[i][j]);
                    }
                }
                queries = queries.wrapping_add(QUERIES);
            }
            let out = s.out.add(first * QUERIES);
            for i in 0..TALL {
                for j in 0..WIDE {
                    acc[i][j].store(out.add(i * QUERIES + j * Zmm::LANES));
                }
            }
        }
    }
}

/// sums[d, q] = or += Σ_k rows[k, d] weights[k, q]
///
/// # Safety
/// As [`head_scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn head_sums<const HD: usize>(s: &HeadSums<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for first in (0..HD).step_by(TALL) {
            let mut acc = [[Zmm::splat(0.0); WIDE]; TALL];
            let (mut rows, mut weights) = (s.rows.ptr.add(first), s.weights);
            for _ in 0..s.rows.count {
                let row = [Zmm::load(weights), Zmm::load(weights.add(Zmm::LANES))];
                for i in 0..TALL {
                    let x = Zmm::splat(*rows.add(i));
                    for j in 0..WIDE {
                        acc[i][j] = x.mul_add(row[j], acc[i][j]);
                    }
                }
                rows = rows.wrapping_add(s.rows.rs);
                weights = weights.wrapping_add(QUERIES);
            }
            let sums = s.sums.add(first * QUERIES);
            for j in 0..WIDE {
                let keeps = s.keeps.map(|keeps| Zmm::load(keeps.as_ptr().add(j * Zmm::LANES)));
                for i in 0..TALL {
                    let to = sums.add(i * QUERIES + j * Zmm::LANES);
                    let sum = match keeps {
                        Some(keeps) => Zmm::load(to).mul(keeps).add(acc[i][j]),
                        None => acc[i][j],
                    };
                    sum.store(to);
                }
            }
        }
    }
}

/// to[k, d] += Σ_q weights[k, q] rows[q, d], `R` keys by `V` vectors at a time
///
/// # Safety
/// As [`head_scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn head_gradients<const HD: usize, const R: usize, const V: usize>(s: &HeadGradients) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for first in (0..s.to.count).step_by(R) {
            for column in (0..HD).step_by(V * Zmm::LANES) {
                let mut acc = [[Zmm::splat(0.0); V]; R];
                let (mut rows, mut weights) = (s.rows.ptr.add(column), s.weights.add(first * QUERIES));
                for _ in 0..s.rows.count {
                    let mut row = [Zmm::splat(0.0); V];
                    for j in 0..V {
                        row[j] = Zmm::load(rows.add(j * Zmm::LANES));
                    }
                    for i in 0..R {
                        let x = Zmm::splat(*weights.add(i * QUERIES));
                        for j in 0..V {
                            acc[i][j] = x.mul_add(row[j], acc[i][j]);
                        }
                    }
                    rows = rows.wrapping_add(s.rows.rs);
                    weights = weights.wrapping_add(1);
                }
                let to = s.to.ptr.add(first * s.to.rs + column);
                for i in 0..R {
                    // Every index is known to the compiler: the sums stay in registers.
                    if first + i < s.to.count {
                        for j in 0..V {
                            let to = to.add(i * s.to.rs + j * Zmm::LANES);
                            Zmm::load(to).add(acc[i][j]).store(to);
                        }
                    }
                }
            }
        }
    }
}

/// `out[q]` = Σ_d `a[d, q] b[d, q]` as [`dot`](crate::element::dot) adds: element d goes to lane d mod 32, and a tree joins the lanes.
///
/// # Safety
/// As [`head_scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn head_dots<const HD: usize>([a, b]: [*const f32; 2], out: &mut [f32; QUERIES]) {
    for first in (0..QUERIES).step_by(Zmm::LANES) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut lanes = [Zmm::splat(0.0); LANES];
            for d in 0..HD {
                let at = d * QUERIES + first;
                lanes[d % LANES] = Zmm::load(a.add(at)).mul_add(Zmm::load(b.add(at)), lanes[d % LANES]);
            }
            tree(lanes, |a, b| a.add(b)).store(out.as_mut_ptr().add(first));
        }
    }
}

/// to[d, q] = row q's element d
///
/// # Safety
/// As [`head_scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn to_columns<const HD: usize>(rows: &FloatRows, to: *mut f32) {
    for (first, d) in squares(HD) {
        let count = rows.count.saturating_sub(first).min(16);
        // SAFETY: guaranteed by the caller; where `count` is 0 the address is only kept.
        unsafe {
            let from = rows.ptr.wrapping_add(first * rows.rs + d);
            let block =
                if count == 16 { square_of(from, rows.rs) } else { rows_of(from, rows.rs, count, 16) };
            let columns = transpose(block);
            for i in 0..16 {
                _mm512_storeu_ps(to.add((d + i) * QUERIES + first), columns[i]);
            }
        }
    }
}

/// row q's element d = `from[d, q] by[q]`
///
/// # Safety
/// As [`head_scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn from_columns<const HD: usize>(from: *const f32, by: &[f32; QUERIES], rows: &FloatRows) {
    for (first, d) in squares(HD) {
        let count = rows.count.saturating_sub(first).min(16);
        // SAFETY: guaranteed by the caller: `count` rows from `first` on are there.
        unsafe {
            let by = _mm512_loadu_ps(by.as_ptr().add(first));
            let mut block = square_of(from.add(d * QUERIES + first), QUERIES);
            // Loops over numbers: a closure is compiled without these instructions, and its vectors go through memory.
            for i in 0..16 {
                block[i] = _mm512_mul_ps(block[i], by);
            }
            let block = transpose(block);
            for i in 0..16 {
                if i < count {
                    _mm512_storeu_ps(rows.ptr.add((first + i) * rows.rs + d), block[i]);
                }
            }
        }
    }
}

/// 16 rows of 16 floats, `stride` apart.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn square_of(src: *const f32, stride: usize) -> [__m512; 16] {
    let mut r = [_mm512_setzero_ps(); 16];
    for i in 0..16 {
        // SAFETY: guaranteed by the caller.
        r[i] = unsafe { _mm512_loadu_ps(src.add(i * stride)) };
    }
    r
}

/// The first query and the first element of each square of 16.
#[inline]
fn squares(head_dim: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..QUERIES).step_by(16).flat_map(move |first| (0..head_dim).step_by(16).map(move |d| (first, d)))
}
