//! Packing without special instructions: any strides, panels of `W`.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::kernel::Packing;

/// # Safety
/// `src` is good for `count` vectors of length `k` by its strides, `dst` for `k * W` floats times the panels of
/// `W` in `count`, rounded up.
#[inline(always)]
pub(super) unsafe fn pack<const W: usize>(p: &Packing) {
    let &Packing { src, s_w, s_k, count, k, dst } = p;
    if s_w == 1 && count > W {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack_rows::<W>(p) };
    }
    for panel in 0..count.div_ceil(W) {
        let lanes = W.min(count - panel * W);
        // SAFETY: panel < the panels of `count`; reads stay below `count` and `k`, writes inside panel `panel`.
        unsafe {
            let (src, dst) = (src.add(panel * W * s_w), dst.add(panel * W * k));
            if lanes == W && s_w == 1 {
                for p in 0..k {
                    std::ptr::copy_nonoverlapping(src.add(p * s_k), dst.add(p * W), W);
                }
            } else if lanes == W && s_k == 1 {
                pack_transposed::<W>(src, s_w, k, dst);
            } else {
                pack_edge::<W>(&Packing { src, count: lanes, dst, ..*p });
            }
        }
    }
}

/// How many steps ahead rows are fetched: they may be too far apart for the hardware prefetcher.
const AHEAD: usize = 8;

/// Several panels of adjacent vectors: each step is read once, as one row.
///
/// # Safety
/// As [`pack`], with stride 1 from one vector to the next.
#[inline(always)]
unsafe fn pack_rows<const W: usize>(p: &Packing) {
    let &Packing { src, s_k, count, k, dst, .. } = p;
    let whole = count / W;
    for p in 0..k {
        let row = src.wrapping_add(p * s_k);
        for line in (0..count).step_by(16) {
            fetch(row.wrapping_add(AHEAD * s_k + line));
        }
        for panel in 0..whole {
            // SAFETY: the panel is full: its W vectors are below `count`, step p is below k.
            unsafe { std::ptr::copy_nonoverlapping(row.add(panel * W), dst.add((panel * k + p) * W), W) };
        }
    }
    if whole * W < count {
        // SAFETY: the last panel, which is not full.
        unsafe {
            let (src, dst) = (src.add(whole * W), dst.add(whole * W * k));
            pack_edge::<W>(&Packing { src, count: count - whole * W, dst, ..*p });
        }
    }
}

/// Asks for a cache line.
#[inline(always)]
fn fetch(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; any address is allowed, and every x86-64 has the instruction.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// One panel of at most W vectors with any strides.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn pack_edge<const W: usize>(p: &Packing) {
    let &Packing { src, s_w, s_k, count, k, dst } = p;
    for p in 0..k {
        for w in 0..W {
            // SAFETY: w < count where read, p < k.
            unsafe { *dst.add(p * W + w) = if w < count { *src.add(w * s_w + p * s_k) } else { 0.0 } };
        }
    }
}

/// One full panel from vectors that are contiguous, in blocks of four steps so that reads use whole cache lines.
///
/// # Safety
/// As [`pack`], with a full panel and step 1 along k.
#[inline(always)]
unsafe fn pack_transposed<const W: usize>(src: *const f32, s_w: usize, k: usize, dst: *mut f32) {
    const STEP: usize = 4;
    let whole = k - k % STEP;
    for p in (0..whole).step_by(STEP) {
        // SAFETY: p + STEP <= k and w < W, both inside the panel.
        unsafe {
            let mut block = [[0.0_f32; STEP]; W];
            for (w, row) in block.iter_mut().enumerate() {
                *row = src.add(w * s_w + p).cast::<[f32; STEP]>().read_unaligned();
            }
            for q in 0..STEP {
                for (w, row) in block.iter().enumerate() {
                    *dst.add((p + q) * W + w) = row[q];
                }
            }
        }
    }
    // SAFETY: the rest of the same panel.
    unsafe {
        let (src, dst) = (src.add(whole), dst.add(whole * W));
        pack_edge::<W>(&Packing { src, s_w, s_k: 1, count: W, k: k - whole, dst });
    }
}
