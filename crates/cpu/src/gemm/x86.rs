//! Kernels for x86-64: AVX-512 with tiles of 8 x 48, AVX2 with tiles of 4 x 24.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::dots::{DotKernels, DotTile, JOINED, LANES, dots};
use super::kernel::{Kernels, LOW, Packing, Simd, Tile, kernels, micro};
use super::pack::pack;
use super::panels::{self, PanelTile};
use super::queries::{self, Scores, Weighted};
use super::{Gemm, MatMut, MatRef};
use std::arch::x86_64::*;

/// A vector type over a register, from the intrinsics of one set of instructions. Every function needs that set: it is inlined
/// into functions compiled for it, which are called only through an `Isa` of that kind.
macro_rules! simd {
    (
        $name:ident($register:ty), LANES $lanes:literal, MR $mr:literal;
        mask($count:ident) -> $mask:ty $make:block
        load_masked($from:ident, $read:ident) $load_masked:block
        prefetch_write($line:ident) $prefetch_write:block
        splat $splat:ident, load $load:ident, store $store:ident, store_masked $store_masked:ident;
        mul_add $mul_add:ident, mul $mul:ident, add $add:ident;
        join($sums:ident, $sum_count:ident, $out:ident) $join:block
    ) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name($register);

        impl Simd for $name {
            const LANES: usize = $lanes;
            const MR: usize = $mr;
            const NV: usize = 3;
            type Mask = $mask;

            #[inline(always)]
            #[allow(unused_unsafe)]
            unsafe fn mask($count: usize) -> $mask {
                // SAFETY: the machine has the instructions, see above.
                unsafe { $make }
            }

            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the machine has the instructions, see above.
                Self(unsafe { $splat(x) })
            }

            #[inline(always)]
            unsafe fn load(p: *const f32) -> Self {
                // SAFETY: as in `splat`; the caller gives a vector of readable floats.
                Self(unsafe { $load(p) })
            }

            #[inline(always)]
            unsafe fn load_masked($from: *const f32, $read: $mask) -> Self {
                // SAFETY: as in `splat`; the lanes of the mask are readable.
                Self(unsafe { $load_masked })
            }

            #[inline(always)]
            unsafe fn store(self, p: *mut f32) {
                // SAFETY: as in `splat`; the caller gives a vector of writable floats.
                unsafe { $store(p, self.0) };
            }

            #[inline(always)]
            unsafe fn store_masked(self, p: *mut f32, mask: $mask) {
                // SAFETY: as in `splat`; the lanes of the mask are writable.
                unsafe { $store_masked(p, mask, self.0) };
            }

            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: the machine has the instructions, see above.
                Self(unsafe { $mul_add(self.0, b.0, c.0) })
            }

            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: the machine has the instructions, see above.
                Self(unsafe { $mul(self.0, b.0) })
            }

            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                // SAFETY: the machine has the instructions, see above.
                Self(unsafe { $add(self.0, b.0) })
            }

            #[inline(always)]
            unsafe fn join($sums: [Self; JOINED], $sum_count: usize, $out: &mut [f32; JOINED]) {
                // SAFETY: the machine has the instructions, see above.
                unsafe { $join };
            }

            #[inline(always)]
            unsafe fn prefetch(p: *const f32) {
                // SAFETY: a hint; any address is allowed.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
            }

            #[inline(always)]
            unsafe fn prefetch_write($line: *const f32) {
                // SAFETY: a hint; any address is allowed.
                unsafe { $prefetch_write };
            }
        }
    };
}

simd! {
    Zmm(__m512), LANES 16, MR 8;
    mask(lanes) -> __mmask16 { (0xffff_u32 >> (16 - lanes.min(16))) as __mmask16 }
    load_masked(p, mask) { _mm512_maskz_loadu_ps(mask, p) }
    prefetch_write(p) { std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    splat _mm512_set1_ps, load _mm512_loadu_ps, store _mm512_storeu_ps, store_masked _mm512_mask_storeu_ps;
    mul_add _mm512_fmadd_ps, mul _mm512_mul_ps, add _mm512_add_ps;
    join(sums, _count, out) { _mm512_storeu_ps(out.as_mut_ptr(), join_16(sums)) }
}

simd! {
    Ymm(__m256), LANES 8, MR 4;
    mask(lanes) -> __m256i {
        _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
    }
    load_masked(p, mask) { _mm256_maskload_ps(p, mask) }
    prefetch_write(p) { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    splat _mm256_set1_ps, load _mm256_loadu_ps, store _mm256_storeu_ps, store_masked _mm256_maskstore_ps;
    mul_add _mm256_fmadd_ps, mul _mm256_mul_ps, add _mm256_add_ps;
    join(sums, count, out) {
        for (out, sum) in out.iter_mut().zip(sums).take(count) {
            let four = _mm_add_ps(_mm256_castps256_ps128(sum.0), _mm256_extractf128_ps::<1>(sum.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            *out = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
        }
    }
}

kernels! {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    AVX512: Zmm, [1 2 3 4 5 6 7 8], low [1 2 3 4 5 6], dots [1 x 8, 2 x 8, 3 x 8, 4 x 4, 5 x 4, 6 x 4],
    pack_a_512, pack_b_512::<48>, pack_b_512::<64>
}

kernels! {
    #[target_feature(enable = "avx2,fma")]
    AVX2: Ymm, [1 2 3 4 4 4 4 4], dots [1 x 4, 2 x 2, 3 x 2]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_a_512(p: &Packing) {
    let &Packing { src, s_w, s_k, count, k, dst } = p;
    if s_k != 1 || s_w == 1 {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack::<8>(p) };
    }
    for panel in 0..count.div_ceil(8) {
        let lanes = 8.min(count - panel * 8);
        // SAFETY: panel < the panels of `count`.
        let (src, dst) = unsafe { (src.add(panel * 8 * s_w), dst.add(panel * 8 * k)) };
        for p in (0..k).step_by(16) {
            // SAFETY: `lanes` rows of min(16, k - p) floats are inside the source, as many steps inside the panel.
            unsafe { transpose_8(src.add(p), s_w, lanes, (k - p).min(16), dst.add(p * 8)) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_b_512<const W: usize>(p: &Packing) {
    let &Packing { src, s_w, s_k, count, k, dst } = p;
    if s_k != 1 || s_w == 1 {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack::<W>(p) };
    }
    for group in 0..count.div_ceil(W) * (W / 16) {
        let lanes = 16.min(count.saturating_sub(group * 16));
        let (panel, column) = (group / (W / 16), group % (W / 16) * 16);
        // SAFETY: the group is inside a panel of `count`; an empty group reads nothing, so its address is only kept.
        let (src, dst) = unsafe { (src.wrapping_add(group * 16 * s_w), dst.add(panel * W * k + column)) };
        for p in (0..k).step_by(16) {
            // SAFETY: `lanes` rows of min(16, k - p) floats are inside the source, as many steps inside the panel.
            unsafe { transpose_16::<W>(src.wrapping_add(p), s_w, lanes, (k - p).min(16), dst.add(p * W)) };
        }
    }
}

/// How far ahead packing fetches, in floats.
const AHEAD: usize = 64;

/// The first `lanes` of N rows of `steps` floats each; the others are zero.
///
/// # Safety
/// These rows are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn rows_of<const N: usize>(
    src: *const f32,
    stride: usize,
    lanes: usize,
    steps: usize,
) -> [__m512; N] {
    let mask = (0xffff_u32 >> (16 - steps)) as __mmask16;
    let mut r = [_mm512_setzero_ps(); N];
    for (i, r) in r.iter_mut().enumerate() {
        if i < lanes {
            // SAFETY: row i < lanes, masked to `steps` floats.
            *r = unsafe { _mm512_maskz_loadu_ps(mask, src.add(i * stride)) };
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(i * stride + AHEAD).cast());
        }
    }
    r
}

/// Four rows transposed by fours: in each 128-bit lane L, element t of the result holds steps 4L + t of the rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn quad(r: &[__m512]) -> [__m512; 4] {
    let (a, b) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
    let (c, d) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
    [join_lo(a, c), join_hi(a, c), join_lo(b, d), join_hi(b, d)]
}

/// `lanes` rows of `steps` floats each become `steps` rows of 8, stride 8; missing lanes are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_8(src: *const f32, stride: usize, lanes: usize, steps: usize, dst: *mut f32) {
    // SAFETY: guaranteed by the caller.
    let r = unsafe { rows_of::<8>(src, stride, lanes, steps) };
    let (top, bottom) = (quad(&r[..4]), quad(&r[4..]));
    // Picks lanes (0, 8, 1, 9) and (2, 10, 3, 11) of 128 bits out of two vectors, as pairs of f64.
    let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for t in 0..4 {
        let (x, y) = (_mm512_castps_pd(top[t]), _mm512_castps_pd(bottom[t]));
        let pairs = [_mm512_permutex2var_pd(x, first, y), _mm512_permutex2var_pd(x, second, y)];
        for (h, pair) in pairs.into_iter().enumerate() {
            let (low, high) = (8 * h + t, 8 * h + 4 + t);
            if low < steps {
                // SAFETY: step `low` is inside the panel.
                unsafe { _mm256_storeu_pd(dst.add(low * 8).cast(), _mm512_castpd512_pd256(pair)) };
            }
            if high < steps {
                // SAFETY: step `high` is inside the panel.
                unsafe { _mm256_storeu_pd(dst.add(high * 8).cast(), _mm512_extractf64x4_pd::<1>(pair)) };
            }
        }
    }
}

/// `lanes` rows of `steps` floats each become `steps` rows of 16, stride W; missing lanes are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_16<const W: usize>(
    src: *const f32,
    stride: usize,
    lanes: usize,
    steps: usize,
    dst: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    let r = unsafe { rows_of::<16>(src, stride, lanes, steps) };
    for (step, row) in transpose(r).into_iter().enumerate().take(steps) {
        // SAFETY: this step is inside the panel.
        unsafe { _mm512_storeu_ps(dst.add(step * W), row) };
    }
}

/// Rows and columns exchanged.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let quads = [quad(&r[..4]), quad(&r[4..8]), quad(&r[8..12]), quad(&r[12..])];
    let mut out = r;
    for t in 0..4 {
        let [q0, q1, q2, q3] = [quads[0][t], quads[1][t], quads[2][t], quads[3][t]];
        // Lanes (0, 2) and (1, 3) of two vectors each, then the same once more: lane L of all four together.
        let (a, b) = (_mm512_shuffle_f32x4::<0x88>(q0, q1), _mm512_shuffle_f32x4::<0xdd>(q0, q1));
        let (c, d) = (_mm512_shuffle_f32x4::<0x88>(q2, q3), _mm512_shuffle_f32x4::<0xdd>(q2, q3));
        out[t] = _mm512_shuffle_f32x4::<0x88>(a, c);
        out[4 + t] = _mm512_shuffle_f32x4::<0x88>(b, d);
        out[8 + t] = _mm512_shuffle_f32x4::<0xdd>(a, c);
        out[12 + t] = _mm512_shuffle_f32x4::<0xdd>(b, d);
    }
    out
}

/// c = or += alpha sums, where `sums` has a row of m for each of at most 16 columns of c.
///
/// # Safety
/// The machine has the instructions; c is writable.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn add_transposed(sums: &[f32], g: &Gemm<'_>, accumulate: bool) {
    let (alpha, mask) = (_mm512_set1_ps(g.alpha), (0xffff_u32 >> (16 - g.n)) as __mmask16);
    for first in (0..g.m).step_by(16) {
        let rows = 16.min(g.m - first);
        // SAFETY: n rows of `rows` floats are inside the sums, as many rows of n inside c.
        unsafe {
            let block = transpose(rows_of::<16>(sums.as_ptr().add(first), g.m, g.n, rows));
            for (i, sum) in block.into_iter().enumerate().take(rows) {
                let c = g.c.ptr.add((first + i) * g.c.rs);
                let new = if accumulate {
                    _mm512_fmadd_ps(sum, alpha, _mm512_maskz_loadu_ps(mask, c))
                } else {
                    _mm512_mul_ps(sum, alpha)
                };
                _mm512_mask_storeu_ps(c, mask, new);
            }
        }
    }
}

/// to[column, row] = from[row, column]
///
/// # Safety
/// The machine has the instructions; `from` has so many rows and columns of floats side by side, and `to` is writable.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn turn(from: MatRef, [rows, columns]: [usize; 2], to: MatMut) {
    for row in (0..rows).step_by(16) {
        let count = 16.min(rows - row);
        let mask = (0xffff_u32 >> (16 - count)) as __mmask16;
        for column in (0..columns).step_by(16) {
            let steps = 16.min(columns - column);
            // SAFETY: guaranteed by the caller: this square, as far as it is inside both.
            unsafe {
                let square =
                    transpose(rows_of::<16>(from.ptr.add(row * from.rs + column), from.rs, count, steps));
                for (i, line) in square.into_iter().enumerate().take(steps) {
                    _mm512_mask_storeu_ps(to.ptr.add((column + i) * to.rs + row), mask, line);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn join_lo(a: __m512, b: __m512) -> __m512 {
    _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn join_hi(a: __m512, b: __m512) -> __m512 {
    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
}

/// The lanes of each of 16 vectors joined by halves: element i is the sum of vector i. Two vectors become one at every step, and the last
/// two steps leave sum 4j + L at 4L + j, so the vectors are taken in that order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn join_16(sums: [Zmm; JOINED]) -> __m512 {
    let mut fours = [_mm512_setzero_ps(); 4];
    for j in 0..4 {
        let (a, b) = (halves(sums[j].0, sums[4 + j].0), halves(sums[8 + j].0, sums[12 + j].0));
        fours[j] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    }
    let (a, b) = (pairs(fours[0], fours[1]), pairs(fours[2], fours[3]));
    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn halves(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(join_lo(a, b), join_hi(a, b))
}
