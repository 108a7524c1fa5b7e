//! Kernels for x86-64: AVX-512 with tiles of 8 x 48, AVX2 with tiles of 4 x 24.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::kernel::{Kernels, Simd, Tile, micro, table};
use super::pack;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
struct Zmm(__m512);

// Every function below needs AVX-512 F: it is inlined into functions compiled for it, which are called only through
// an `Isa` of that kind.
impl Simd for Zmm {
    const LANES: usize = 16;
    const MR: usize = 8;
    const NV: usize = 3;
    type Mask = __mmask16;

    #[inline(always)]
    unsafe fn mask(lanes: usize) -> __mmask16 {
        (0xffff_u32 >> (16 - lanes.min(16))) as __mmask16
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: AVX-512, see above.
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: AVX-512, see above; the caller gives 16 readable floats.
        Self(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_masked(p: *const f32, mask: __mmask16) -> Self {
        // SAFETY: AVX-512, see above; the lanes of the mask are readable.
        Self(unsafe { _mm512_maskz_loadu_ps(mask, p) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: AVX-512, see above; the caller gives 16 writable floats.
        unsafe { _mm512_storeu_ps(p, self.0) };
    }

    #[inline(always)]
    unsafe fn store_masked(self, p: *mut f32, mask: __mmask16) {
        // SAFETY: AVX-512, see above; the lanes of the mask are writable.
        unsafe { _mm512_mask_storeu_ps(p, mask, self.0) };
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: AVX-512, see above.
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: AVX-512, see above.
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn prefetch_write(p: *const f32) {
        // SAFETY: a hint; any address is allowed.
        unsafe { std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn tile_512<const M: usize, const V: usize, const PACKED: bool>(t: &Tile) {
    // SAFETY: compiled for AVX-512; the rest is the caller's contract.
    unsafe { micro::<Zmm, M, V, PACKED>(t) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_a_512(src: *const f32, s_w: usize, s_k: usize, count: usize, k: usize, dst: *mut f32) {
    if s_k != 1 || s_w == 1 {
        // SAFETY: the caller's contract.
        return unsafe { pack::pack::<8>(src, s_w, s_k, count, k, dst) };
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
unsafe fn pack_b_512(src: *const f32, s_w: usize, s_k: usize, count: usize, k: usize, dst: *mut f32) {
    if s_k != 1 || s_w == 1 {
        // SAFETY: the caller's contract.
        return unsafe { pack::pack::<48>(src, s_w, s_k, count, k, dst) };
    }
    for group in 0..count.div_ceil(48) * 3 {
        let lanes = 16.min(count.saturating_sub(group * 16));
        let (panel, column) = (group / 3, group % 3 * 16);
        // SAFETY: the group is inside a panel of `count`; an empty group reads nothing, so its address is only kept.
        let (src, dst) = unsafe { (src.wrapping_add(group * 16 * s_w), dst.add(panel * 48 * k + column)) };
        for p in (0..k).step_by(16) {
            // SAFETY: `lanes` rows of min(16, k - p) floats are inside the source, as many steps inside the panel.
            unsafe { transpose_16(src.wrapping_add(p), s_w, lanes, (k - p).min(16), dst.add(p * 48)) };
        }
    }
}

/// How far ahead packing fetches, in floats.
const AHEAD: usize = 64;

/// `lanes` rows of `steps` floats each become `steps` rows of 8, stride 8; missing lanes are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_8(src: *const f32, stride: usize, lanes: usize, steps: usize, dst: *mut f32) {
    let mask = (0xffff_u32 >> (16 - steps)) as __mmask16;
    let mut r = [_mm512_setzero_ps(); 8];
    for (i, r) in r.iter_mut().enumerate() {
        if i < lanes {
            // SAFETY: row i < lanes, masked to `steps` floats.
            *r = unsafe { _mm512_maskz_loadu_ps(mask, src.add(i * stride)) };
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(i * stride + AHEAD).cast());
        }
    }
    // In each 128-bit lane L, quads[h][t] holds steps 4L + t of rows 4h .. 4h + 4.
    let quad = |r: &[__m512]| {
        let (a, b) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
        let (c, d) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
        [join_lo(a, c), join_hi(a, c), join_lo(b, d), join_hi(b, d)]
    };
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

/// `lanes` rows of `steps` floats each become `steps` rows of 16, stride 48; missing lanes are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn transpose_16(src: *const f32, stride: usize, lanes: usize, steps: usize, dst: *mut f32) {
    let mask = (0xffff_u32 >> (16 - steps)) as __mmask16;
    let mut r = [_mm512_setzero_ps(); 16];
    for (i, r) in r.iter_mut().enumerate() {
        if i < lanes {
            // SAFETY: row i < lanes, masked to `steps` floats.
            *r = unsafe { _mm512_maskz_loadu_ps(mask, src.add(i * stride)) };
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(i * stride + AHEAD).cast());
        }
    }
    // In each 128-bit lane L, quads[h][t] holds steps 4L + t of rows 4h .. 4h + 4.
    let mut quads = [[_mm512_setzero_ps(); 4]; 4];
    for (h, quad) in quads.iter_mut().enumerate() {
        let r = &r[4 * h..4 * h + 4];
        let (a, b) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
        let (c, d) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
        *quad = [join_lo(a, c), join_hi(a, c), join_lo(b, d), join_hi(b, d)];
    }
    for t in 0..4 {
        let [q0, q1, q2, q3] = [quads[0][t], quads[1][t], quads[2][t], quads[3][t]];
        // Lanes (0, 2) and (1, 3) of two vectors each, then the same once more: lane L of all four together.
        let (a, b) = (_mm512_shuffle_f32x4::<0x88>(q0, q1), _mm512_shuffle_f32x4::<0xdd>(q0, q1));
        let (c, d) = (_mm512_shuffle_f32x4::<0x88>(q2, q3), _mm512_shuffle_f32x4::<0xdd>(q2, q3));
        let rows = [
            _mm512_shuffle_f32x4::<0x88>(a, c),
            _mm512_shuffle_f32x4::<0x88>(b, d),
            _mm512_shuffle_f32x4::<0xdd>(a, c),
            _mm512_shuffle_f32x4::<0xdd>(b, d),
        ];
        for (lane, row) in rows.into_iter().enumerate() {
            if 4 * lane + t < steps {
                // SAFETY: this step is inside the panel.
                unsafe { _mm512_storeu_ps(dst.add((4 * lane + t) * 48), row) };
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

pub(super) static AVX512: Kernels = Kernels {
    mr: 8,
    nr: 48,
    lanes: 16,
    packed: table!(tile_512, true, 8, 3),
    strided: table!(tile_512, false, 8, 3),
    pack_a: pack_a_512,
    pack_b: pack_b_512,
};

#[derive(Clone, Copy)]
struct Ymm(__m256);

// Every function below needs AVX2 and FMA: it is inlined into functions compiled for them, which are called only
// through an `Isa` of that kind.
impl Simd for Ymm {
    const LANES: usize = 8;
    const MR: usize = 4;
    const NV: usize = 3;
    type Mask = __m256i;

    #[inline(always)]
    unsafe fn mask(lanes: usize) -> __m256i {
        // SAFETY: AVX2, see above.
        unsafe {
            let order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), order)
        }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: AVX2, see above.
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: AVX2, see above; the caller gives eight readable floats.
        Self(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_masked(p: *const f32, mask: __m256i) -> Self {
        // SAFETY: AVX2, see above; the lanes of the mask are readable.
        Self(unsafe { _mm256_maskload_ps(p, mask) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: AVX2, see above; the caller gives eight writable floats.
        unsafe { _mm256_storeu_ps(p, self.0) };
    }

    #[inline(always)]
    unsafe fn store_masked(self, p: *mut f32, mask: __m256i) {
        // SAFETY: AVX2, see above; the lanes of the mask are writable.
        unsafe { _mm256_maskstore_ps(p, mask, self.0) };
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: FMA, see above.
        Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: AVX2, see above.
        Self(unsafe { _mm256_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) };
    }

    #[inline(always)]
    unsafe fn prefetch_write(p: *const f32) {
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) };
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_256<const M: usize, const V: usize, const PACKED: bool>(t: &Tile) {
    // SAFETY: compiled for AVX2 and FMA; the rest is the caller's contract.
    unsafe { micro::<Ymm, M, V, PACKED>(t) };
}

#[target_feature(enable = "avx2,fma")]
unsafe fn pack_a_256(src: *const f32, s_w: usize, s_k: usize, count: usize, k: usize, dst: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe { pack::pack::<4>(src, s_w, s_k, count, k, dst) };
}

#[target_feature(enable = "avx2,fma")]
unsafe fn pack_b_256(src: *const f32, s_w: usize, s_k: usize, count: usize, k: usize, dst: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe { pack::pack::<24>(src, s_w, s_k, count, k, dst) };
}

pub(super) static AVX2: Kernels = Kernels {
    mr: 4,
    nr: 24,
    lanes: 8,
    packed: table!(tile_256, true, 4, 3),
    strided: table!(tile_256, false, 4, 3),
    pack_a: pack_a_256,
    pack_b: pack_b_256,
};
