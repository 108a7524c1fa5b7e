//! Kernels without special instructions: arrays of eight floats, which the compiler turns into SSE2 or NEON.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::dots::{DotKernels, DotTile, JOINED, LANES, dots};
use super::kernel::{Kernels, LOW, Packing, Simd, Tile, kernels, micro};
use super::pack::pack;
use super::panels::{self, PanelTile};
use super::queries::{self, Scores, Weighted};
use crate::element::tree;
use crate::isa::PORTABLE_FMA;
use crate::math::fma;

#[derive(Clone, Copy)]
struct Eight([f32; 8]);

impl Simd for Eight {
    const LANES: usize = 8;
    const MR: usize = 4;
    const NV: usize = NV;
    type Mask = usize;

    #[inline(always)]
    unsafe fn mask(lanes: usize) -> usize {
        lanes
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller gives eight readable floats.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_masked(p: *const f32, mask: usize) -> Self {
        if mask == 8 {
            // SAFETY: the caller gives `mask` readable floats.
            return unsafe { Self::load(p) };
        }
        let mut out = [0.0; 8];
        // SAFETY: `mask` readable floats, at most eight.
        unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr(), mask) };
        Self(out)
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller gives eight writable floats.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn store_masked(self, p: *mut f32, mask: usize) {
        if mask == 8 {
            // SAFETY: the caller gives `mask` writable floats.
            unsafe { self.store(p) };
        } else {
            // SAFETY: `mask` writable floats, at most eight.
            unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), p, mask) };
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        let mut out = c.0;
        for i in 0..8 {
            out[i] = fma::<PORTABLE_FMA>(self.0[i], b.0[i], out[i]);
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        let mut out = b.0;
        for i in 0..8 {
            out[i] *= self.0[i];
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        let mut out = b.0;
        for i in 0..8 {
            out[i] += self.0[i];
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn join(sums: [Self; JOINED], count: usize, out: &mut [f32; JOINED]) {
        for (out, sum) in out.iter_mut().zip(sums).take(count) {
            *out = tree(sum.0, |a, b| a + b);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}

    #[inline(always)]
    unsafe fn prefetch_write(_: *const f32) {}
}

/// Vectors across a tile: NEON has registers for 4 x 16, SSE2 for 4 x 8.
const NV: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

kernels! { KERNELS: Eight, [1 2 3 4 4 4 4 4], dots [1 x 2, 2 x 1] }
