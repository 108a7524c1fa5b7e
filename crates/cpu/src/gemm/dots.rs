//! Blocks of dot products: some rows of a times some columns of b, both contiguous along k, nothing packed.
//!
//! order  16 lanes over k, each a chain of multiply-adds, then joined by halves as [`tree`](crate::element::tree).

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::kernel::Simd;

/// Lanes of a sum.
pub(super) const LANES: usize = 16;
/// Sums that are joined together.
pub(super) const JOINED: usize = 16;
/// The most columns of a block: from one row of its sums to the next.
pub(super) const COLUMNS: usize = 8;
/// The most rows of a block.
pub(super) const ROWS: usize = 6;

/// The sums of a block.
pub(super) type Sums = [[f32; COLUMNS]; ROWS];

/// One block of sums.
pub(super) struct DotTile {
    /// Row i of a is at `a + i * a_rs`, column j of b at `b + j * b_cs`: `k` floats each.
    pub k: usize,
    pub a: *const f32,
    pub a_rs: usize,
    pub b: *const f32,
    pub b_cs: usize,
    /// Where the first row of sums begins; rows are [`COLUMNS`] apart.
    pub sums: *mut f32,
}

/// Computes a block of fixed size.
pub(super) type Dots = unsafe fn(&DotTile);

/// The kernels for some rows: for so many columns at a time, and for a single one.
pub(super) struct DotKernels {
    pub columns: usize,
    pub many: Dots,
    pub one: Dots,
}

/// The sums of `R` rows and `C` columns; `V` vectors make the lanes.
///
/// # Safety
/// The machine has the instructions of `S`; the rows and columns of `t` are readable, and its sums writable.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, const R: usize, const C: usize, const V: usize>(t: &DotTile) {
    const { assert!(R <= ROWS && C <= COLUMNS && R * C <= 2 * JOINED && V * S::LANES == LANES) };
    // SAFETY: guaranteed by the caller; all reads are below `t.k` or masked.
    unsafe {
        let mut sums = [[[S::splat(0.0); V]; C]; R];
        let (mut a, mut b) = ([t.a; R], [t.b; C]);
        (0..R).for_each(|i| a[i] = t.a.wrapping_add(i * t.a_rs));
        (0..C).for_each(|j| b[j] = t.b.wrapping_add(j * t.b_cs));
        let whole = t.k - t.k % LANES;
        let mut step = 0;
        while step < whole {
            for v in 0..V {
                let at = step + v * S::LANES;
                let mut columns = [S::splat(0.0); C];
                (0..C).for_each(|j| columns[j] = S::load(b[j].add(at)));
                for i in 0..R {
                    let x = S::load(a[i].add(at));
                    (0..C).for_each(|j| sums[i][j][v] = x.mul_add(columns[j], sums[i][j][v]));
                }
            }
            step += LANES;
        }
        for v in 0..V {
            let at = whole + v * S::LANES;
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
        let mut joined = [[S::splat(0.0); JOINED]; 2];
        for i in 0..R {
            for j in 0..C {
                let mut lanes = sums[i][j];
                let mut width = V / 2;
                while width > 0 {
                    (0..width).for_each(|v| lanes[v] = lanes[v].add(lanes[v + width]));
                    width /= 2;
                }
                let number = i * C + j;
                joined[number / JOINED][number % JOINED] = lanes[0];
            }
        }
        let mut out = [[0.0; JOINED]; 2];
        S::join(joined[0], (R * C).min(JOINED), &mut out[0]);
        if R * C > JOINED {
            S::join(joined[1], R * C - JOINED, &mut out[1]);
        }
        for i in 0..R {
            std::ptr::copy_nonoverlapping(out.as_ptr().cast::<f32>().add(i * C), t.sums.add(i * COLUMNS), C);
        }
    }
}
