//! Blocks of dot products: some rows of a times some columns of b, both contiguous along k, nothing packed.
//!
//! order  32 lanes over k, each a chain of multiply-adds, then joined by halves as [`tree`](crate::element::tree).

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::kernel::{LINE, Simd};
use crate::element::LANES;

/// The most sums of a block.
pub(super) const MOST_SUMS: usize = 16;

/// One block of sums.
pub(super) struct DotTile {
    /// Row i of a is at `a + i * a_rs`, column j of b at `b + j * b_cs`: `k` floats each.
    pub k: usize,
    pub a: *const f32,
    pub a_rs: usize,
    pub b: *const f32,
    pub b_cs: usize,
    /// Cache lines from here on to bring into the cache meanwhile.
    pub fetch: *const f32,
    pub lines: usize,
}

/// Gives the sums of a block of fixed size, row by row.
pub(super) type Dots = unsafe fn(&DotTile, &mut [f32; MOST_SUMS]);

/// The kernels for some rows: for so many columns at a time, and for a single one.
pub(super) struct DotKernels {
    pub columns: usize,
    pub many: Dots,
    pub one: Dots,
}

/// The sums of `R` rows and `C` columns; `V` vectors make the 32 lanes.
///
/// # Safety
/// The machine has the instructions of `S`; the rows and columns of `t` are readable.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, const R: usize, const C: usize, const V: usize>(
    t: &DotTile,
    out: &mut [f32; MOST_SUMS],
) {
    const { assert!(R * C <= MOST_SUMS && V * S::LANES == LANES) };
    // SAFETY: guaranteed by the caller; all reads are below `t.k` or masked.
    unsafe {
        let mut sums = [[[S::splat(0.0); V]; C]; R];
        let (mut a, mut b) = ([t.a; R], [t.b; C]);
        (0..R).for_each(|i| a[i] = t.a.wrapping_add(i * t.a_rs));
        (0..C).for_each(|j| b[j] = t.b.wrapping_add(j * t.b_cs));
        let steps = t.k / LANES;
        let (mut fetch, mut left, each) = (t.fetch, t.lines, t.lines.div_ceil(steps.max(1)));
        for step in 0..steps {
            let now = each.min(left);
            left -= now;
            for _ in 0..now {
                S::prefetch(fetch);
                fetch = fetch.wrapping_add(LINE);
            }
            for v in 0..V {
                let at = step * LANES + v * S::LANES;
                let mut columns = [S::splat(0.0); C];
                (0..C).for_each(|j| columns[j] = S::load(b[j].add(at)));
                for i in 0..R {
                    let x = S::load(a[i].add(at));
                    (0..C).for_each(|j| sums[i][j][v] = x.mul_add(columns[j], sums[i][j][v]));
                }
            }
        }
        for v in 0..V {
            let at = steps * LANES + v * S::LANES;
            if at < t.k {
                let mask = S::mask((t.k - at).min(S::LANES));
                for i in 0..R {
                    let x = S::load_masked(a[i].add(at), mask);
                    for j in 0..C {
                        sums[i][j][v] = x.mul_add(S::load_masked(b[j].add(at), mask), sums[i][j][v]);
                    }
                }
            }
        }
        let mut joined = [S::splat(0.0); MOST_SUMS];
        for i in 0..R {
            for j in 0..C {
                let mut lanes = sums[i][j];
                let mut width = V / 2;
                while width > 0 {
                    (0..width).for_each(|v| lanes[v] = lanes[v].add(lanes[v + width]));
                    width /= 2;
                }
                joined[i * C + j] = lanes[0];
            }
        }
        S::join(joined, R * C, out);
    }
}
