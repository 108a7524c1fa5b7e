//! The softmax of scores that stand with a row for each key and a column for each query, forward and backward: many
//! queries at once.

use super::TILE;
use crate::math::{LANES, exp_flush, fma};
use crate::multiversion;

/// Floats from one row of scores to the next: whole vectors, so that no row has a rest to go through one by one.
pub(super) fn row_stride(queries: usize) -> usize {
    queries.next_multiple_of(LANES)
}

/// A number for each query of a tile.
pub(super) type Column = [f32; TILE];

/// Some columns of a row.
#[inline(always)]
fn part(row: &[f32], first: usize) -> &[f32; LANES] {
    match row[first..].first_chunk() {
        Some(part) => part,
        None => unreachable!("rows are whole vectors"),
    }
}

/// The same, to write.
#[inline(always)]
fn part_mut(row: &mut [f32], first: usize) -> &mut [f32; LANES] {
    match row[first..].first_chunk_mut() {
        Some(part) => part,
        None => unreachable!("rows are whole vectors"),
    }
}

multiversion! {
    /// s = exp(s·scale - max) with the running maximum of each column. Returns what sums so far shrink by.
    pub(super) fn softmax_columns<const FMA: bool>(
        s: &mut [f32],
        stride: usize,
        scale: f32,
        max: &mut Column,
        sum: &mut Column,
    ) -> Column {
        let mut shrink = [0.0; TILE];
        for first in (0..stride).step_by(LANES) {
            let mut greatest = [f32::NEG_INFINITY; LANES];
            for row in s.chunks_exact(stride) {
                for (greatest, s) in greatest.iter_mut().zip(part(row, first)) {
                    *greatest = if *s > *greatest { *s } else { *greatest };
                }
            }
            let (max, sum, shrink) =
                (part_mut(max, first), part_mut(sum, first), part_mut(&mut shrink, first));
            for i in 0..LANES {
                let new = max[i].max(greatest[i] * scale);
                shrink[i] = exp_flush::<FMA>(max[i] - new);
                max[i] = new;
                sum[i] *= shrink[i];
            }
            // What each addition loses is kept and added later: a sum that is off shows in the gradient of the keys' bias,
            // which is zero but for rounding, and which AdamW makes steps of.
            let mut lost = [0.0; LANES];
            for row in s.chunks_exact_mut(stride) {
                let row = part_mut(row, first);
                for i in 0..LANES {
                    row[i] = exp_flush::<FMA>(fma::<FMA>(row[i], scale, -max[i]));
                    let add = row[i] - lost[i];
                    let total = sum[i] + add;
                    lost[i] = (total - sum[i]) - add;
                    sum[i] = total;
                }
            }
        }
        shrink
    }

    /// p = exp(p·scale - lse), dp = p·(dp - delta)·scale
    pub(super) fn softmax_bwd_columns<const FMA: bool>(
        p: &mut [f32],
        dp: &mut [f32],
        stride: usize,
        scale: f32,
        lse: &Column,
        delta: &Column,
    ) {
        for first in (0..stride).step_by(LANES) {
            let (lse, delta) = (part(lse, first), part(delta, first));
            for (p, dp) in p.chunks_exact_mut(stride).zip(dp.chunks_exact_mut(stride)) {
                let (p, dp) = (part_mut(p, first), part_mut(dp, first));
                for i in 0..LANES {
                    p[i] = exp_flush::<FMA>(fma::<FMA>(p[i], scale, -lse[i]));
                    dp[i] = p[i] * (dp[i] - delta[i]) * scale;
                }
            }
        }
    }
}
