//! Packing without special instructions: any strides, panels of `W`.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

/// # Safety
/// `src` is good for `count` vectors of length `k` by its strides, `dst` for `k * W` floats times the panels of
/// `W` in `count`, rounded up.
#[inline(always)]
pub(super) unsafe fn pack<const W: usize>(
    src: *const f32,
    s_w: usize,
    s_k: usize,
    count: usize,
    k: usize,
    dst: *mut f32,
) {
    if s_w == 1 && count > W {
        // SAFETY: the caller's contract.
        return unsafe { pack_rows::<W>(src, s_k, count, k, dst) };
    }
    for panel in 0..count.div_ceil(W) {
        let lanes = W.min(count - panel * W);
        // SAFETY: panel < the panels of `count`; reads stay below `count` and `k`, writes inside panel `panel`.
        unsafe {
            let src = src.add(panel * W * s_w);
            let dst = dst.add(panel * W * k);
            if lanes < W {
                pack_edge::<W>(src, s_w, s_k, lanes, k, dst);
            } else if s_w == 1 {
                for p in 0..k {
                    std::ptr::copy_nonoverlapping(src.add(p * s_k), dst.add(p * W), W);
                }
            } else if s_k == 1 {
                pack_transposed::<W>(src, s_w, k, dst);
            } else {
                pack_edge::<W>(src, s_w, s_k, lanes, k, dst);
            }
        }
    }
}

/// How many steps ahead rows are fetched: they may lie too far apart for the machine to see it coming.
const AHEAD: usize = 8;

/// Several panels of vectors that lie side by side: each step is read once, as one row.
///
/// # Safety
/// As [`pack`], with stride 1 from one vector to the next.
#[inline(always)]
unsafe fn pack_rows<const W: usize>(src: *const f32, s_k: usize, count: usize, k: usize, dst: *mut f32) {
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
        unsafe { pack_edge::<W>(src.add(whole * W), 1, s_k, count - whole * W, k, dst.add(whole * W * k)) };
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

/// One panel of `lanes` ≤ W vectors with any strides.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
pub(super) unsafe fn pack_edge<const W: usize>(
    src: *const f32,
    s_w: usize,
    s_k: usize,
    lanes: usize,
    k: usize,
    dst: *mut f32,
) {
    for p in 0..k {
        for w in 0..W {
            // SAFETY: w < lanes where read, p < k.
            unsafe { *dst.add(p * W + w) = if w < lanes { *src.add(w * s_w + p * s_k) } else { 0.0 } };
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
    unsafe { pack_edge::<W>(src.add(whole), s_w, 1, W, k - whole, dst.add(whole * W)) };
}
