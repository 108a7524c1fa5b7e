//! The softmax of `softmax` for AVX-512, to the bit.
//!
//! An exponential is a chain of 9 operations, and a processor looks ahead over a few vectors only. So the vectors of four rows take each
//! operation together: none waits for the one before.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::softmax::ROWS;
use crate::element::LANES;
use crate::math::{EXP2_FIT, EXP2_LEAST};
use std::arch::x86_64::*;

/// Floats of a vector, and vectors of a part of a row.
const VECTOR: usize = 16;
const WIDE: usize = LANES / VECTOR;
const _: () = assert!(LANES.is_multiple_of(VECTOR));

/// Vectors of some rows.
type Rows<const R: usize> = [[__m512; WIDE]; R];

/// Calls `$do` for every vector of rows: loops over numbers, as closures are not compiled for these instructions.
macro_rules! each {
    ($i:ident, $j:ident => $do:expr) => {
        for $i in 0..R {
            for $j in 0..WIDE {
                $do;
            }
        }
    };
}

/// [`exp2_flush`](crate::math::exp2_flush) of each.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_flush<const R: usize>(x: &Rows<R>) -> Rows<R> {
    let least = _mm512_set1_ps(EXP2_LEAST);
    let mut rest = *x;
    // What the nearest whole number leaves; 0 of infinities.
    each!(i, j => rest[i][j] = _mm512_reduce_ps::<_MM_FROUND_TO_NEAREST_INT>(x[i][j]));
    let mut fit = [[_mm512_set1_ps(EXP2_FIT[0]); WIDE]; R];
    for term in 1..EXP2_FIT.len() {
        let term = _mm512_set1_ps(EXP2_FIT[term]);
        each!(i, j => fit[i][j] = _mm512_fmadd_ps(rest[i][j], fit[i][j], term));
    }
    each!(i, j => {
        // NaN is kept: it is not less.
        let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x[i][j], least);
        let whole = _mm512_sub_ps(x[i][j], rest[i][j]);
        fit[i][j] = _mm512_maskz_scalef_ps(kept, fit[i][j], whole);
    });
    fit
}

/// # Safety
/// `R` rows of vectors are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn load<const R: usize>(from: *const f32, stride: usize) -> Rows<R> {
    let mut rows = [[_mm512_setzero_ps(); WIDE]; R];
    // SAFETY: guaranteed by the caller.
    each!(i, j => rows[i][j] = unsafe { _mm512_loadu_ps(from.add(i * stride + j * VECTOR)) });
    rows
}

/// # Safety
/// They are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn store<const R: usize>(to: *mut f32, stride: usize, rows: &Rows<R>) {
    // SAFETY: guaranteed by the caller.
    each!(i, j => unsafe { _mm512_storeu_ps(to.add(i * stride + j * VECTOR), rows[i][j]) });
}

/// What is added up of each column, and what the additions lost so far.
struct Sums {
    sum: [__m512; WIDE],
    lost: [__m512; WIDE],
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add(&mut self, more: [__m512; WIDE]) {
        for j in 0..WIDE {
            let add = _mm512_sub_ps(more[j], self.lost[j]);
            let total = _mm512_add_ps(self.sum[j], add);
            self.lost[j] = _mm512_sub_ps(_mm512_sub_ps(total, self.sum[j]), add);
            self.sum[j] = total;
        }
    }
}

/// As [`softmax_columns`](super::softmax::softmax_columns), of which `shrink` is the result.
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn softmax_columns(s: &mut [f32], stride: usize, scale: f32, [max, sum, shrink]: [&mut [f32]; 3]) {
    assert!([&*max, sum, shrink].iter().all(|x| x.len() >= stride), "columns of more than a tile");
    assert!(stride > 0 && stride.is_multiple_of(LANES) && s.len() >= stride, "rows that are not whole parts");
    let (rows, factor) = (s.len() / stride, _mm512_set1_ps(scale));
    for first in (0..stride).step_by(LANES) {
        let column = s[first..].as_mut_ptr();
        // SAFETY: rows of `stride` floats, a multiple of `LANES`, so that each has a whole part from `first` on; so have the columns of a tile.
        unsafe {
            let mut greatest = [[_mm512_set1_ps(f32::NEG_INFINITY); WIDE]; ROWS];
            for row in 0..rows {
                let [x] = load::<1>(column.add(row * stride), stride);
                for j in 0..WIDE {
                    greatest[row % ROWS][j] = _mm512_max_ps(x[j], greatest[row % ROWS][j]);
                }
            }
            let ([old], [before]) =
                (load::<1>(max.as_ptr().add(first), 0), load::<1>(sum.as_ptr().add(first), 0));
            let mut new = greatest[0];
            for row in 1..ROWS {
                for j in 0..WIDE {
                    new[j] = _mm512_max_ps(greatest[row][j], new[j]);
                }
            }
            let (mut fall, mut sums) = (old, Sums { sum: before, lost: [_mm512_setzero_ps(); WIDE] });
            for j in 0..WIDE {
                new[j] = _mm512_max_ps(_mm512_mul_ps(new[j], factor), old[j]);
                fall[j] = _mm512_sub_ps(old[j], new[j]);
            }
            let fall = exp2_flush(&[fall]);
            for j in 0..WIDE {
                sums.sum[j] = _mm512_mul_ps(sums.sum[j], fall[0][j]);
            }
            store(max.as_mut_ptr().add(first), 0, &[new]);
            store(shrink.as_mut_ptr().add(first), 0, &fall);
            let mut row = 0;
            while row + ROWS <= rows {
                let at = column.add(row * stride);
                let p = probabilities::<ROWS>(at, stride, factor, &new);
                let mut of_all = [_mm512_setzero_ps(); WIDE];
                for pair in (0..ROWS).step_by(2) {
                    for j in 0..WIDE {
                        of_all[j] = _mm512_add_ps(of_all[j], _mm512_add_ps(p[pair][j], p[pair + 1][j]));
                    }
                }
                sums.add(of_all);
                row += ROWS;
            }
            for row in row..rows {
                let [p] = probabilities::<1>(column.add(row * stride), stride, factor, &new);
                sums.add(p);
            }
            store(sum.as_mut_ptr().add(first), 0, &[sums.sum]);
        }
    }
}

/// s = 2^(s·factor - less) of `R` rows, which it returns.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn probabilities<const R: usize>(
    at: *mut f32,
    stride: usize,
    factor: __m512,
    less: &[__m512; WIDE],
) -> Rows<R> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut p = load::<R>(at, stride);
        each!(i, j => p[i][j] = _mm512_fmsub_ps(p[i][j], factor, less[j]));
        let p = exp2_flush(&p);
        store(at, stride, &p);
        p
    }
}

/// As [`softmax_bwd_columns`](super::softmax::softmax_bwd_columns).
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn softmax_bwd_columns(
    [p, dp]: [&mut [f32]; 2],
    stride: usize,
    factors: [f32; 2],
    [lse, delta]: [&[f32]; 2],
) {
    assert_eq!(p.len(), dp.len(), "scores and their gradients");
    assert!(lse.len().min(delta.len()) >= stride, "columns of more than a tile");
    assert!(stride > 0 && stride.is_multiple_of(LANES) && p.len() >= stride, "rows that are not whole parts");
    let rows = p.len() / stride;
    let (factor, scale) = (_mm512_set1_ps(factors[0]), _mm512_set1_ps(factors[1]));
    for first in (0..stride).step_by(LANES) {
        let columns = [p[first..].as_mut_ptr(), dp[first..].as_mut_ptr()];
        // SAFETY: as in `softmax_columns`.
        unsafe {
            let ([lse], [mut delta]) =
                (load::<1>(lse.as_ptr().add(first), 0), load::<1>(delta.as_ptr().add(first), 0));
            for j in 0..WIDE {
                delta[j] = _mm512_mul_ps(delta[j], scale);
            }
            let mut row = 0;
            while row + ROWS <= rows {
                let at = [columns[0].add(row * stride), columns[1].add(row * stride)];
                gradients::<ROWS>(at, stride, [factor, scale], [&lse, &delta]);
                row += ROWS;
            }
            for row in row..rows {
                let at = [columns[0].add(row * stride), columns[1].add(row * stride)];
                gradients::<1>(at, stride, [factor, scale], [&lse, &delta]);
            }
        }
    }
}

/// p = 2^(p·factor - lse), dp = p·(dp·scale - delta) of `R` rows.
///
/// # Safety
/// They are there.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn gradients<const R: usize>(
    [p, dp]: [*mut f32; 2],
    stride: usize,
    [factor, scale]: [__m512; 2],
    [lse, delta]: [&[__m512; WIDE]; 2],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let p = probabilities::<R>(p, stride, factor, lse);
        let mut ds = load::<R>(dp, stride);
        each!(i, j => ds[i][j] = _mm512_fmsub_ps(ds[i][j], scale, delta[j]));
        each!(i, j => ds[i][j] = _mm512_mul_ps(p[i][j], ds[i][j]));
        store(dp, stride, &ds);
    }
}
