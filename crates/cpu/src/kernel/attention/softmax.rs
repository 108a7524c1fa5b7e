//! The softmax of scores that have a row for each key and a column for each query, forward and backward: many queries at
//! once.
//!
//! order  the exponentials of a column are added in fours, two and two, and these in order; the last up to three one by one.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::TILE;
#[cfg(target_arch = "x86_64")]
use super::softmax_x86;
use crate::element::{LANES, Real};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::IsaKind;
use crate::multiversion;

/// Rows whose exponentials are added up before they are added to a sum.
pub(super) const ROWS: usize = 4;

/// Elements from one row of scores to the next: whole vectors, so that no row has a remainder.
pub(super) fn row_stride(queries: usize) -> usize {
    queries.next_multiple_of(LANES)
}

/// Some columns of a row.
#[inline(always)]
fn part<A>(row: &[A], first: usize) -> &[A; LANES] {
    match row[first..].first_chunk() {
        Some(part) => part,
        None => unreachable!("rows are whole vectors"),
    }
}

/// Some columns of a row, to write.
#[inline(always)]
fn part_mut<A>(row: &mut [A], first: usize) -> &mut [A; LANES] {
    match row[first..].first_chunk_mut() {
        Some(part) => part,
        None => unreachable!("rows are whole vectors"),
    }
}

/// An exponent of 2 as one of e.
pub(super) fn natural<A: Real>(exponent: A) -> A {
    exponent * A::of(std::f64::consts::LN_2)
}

/// An exponent of e as one of 2.
pub(super) fn binary<A: Real>(exponent: A) -> A {
    exponent * A::of(std::f64::consts::LOG2_E)
}

/// s = exp(s·scale) / 2^max with the running maximum of each column, an exponent of 2. Returns what sums so far shrink by.
pub(super) fn softmax_columns<A: Real>(
    isa: Isa,
    s: &mut [A],
    stride: usize,
    scale: A,
    max: &mut [A; TILE],
    sum: &mut [A; TILE],
) -> [A; TILE] {
    let scale = binary(scale);
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == IsaKind::Avx512 {
        let mut shrink = [A::ZERO; TILE];
        let all = (A::floats_mut(s), A::floats_mut(max), A::floats_mut(sum), A::floats_mut(&mut shrink));
        if let (Some(s), Some(max), Some(sum), Some(to)) = all {
            // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
            unsafe { softmax_x86::softmax_columns(s, stride, scale.wide() as f32, [max, sum, to]) };
            return shrink;
        }
    }
    columns(isa, s, stride, scale, max, sum)
}

/// p = exp(p·factor) / 2^lse, dp = p·(dp - delta)·scale
pub(super) fn softmax_bwd_columns<A: Real>(
    isa: Isa,
    p: &mut [A],
    dp: &mut [A],
    stride: usize,
    [factor, scale]: [A; 2],
    lse: &[A; TILE],
    delta: &[A; TILE],
) {
    let factors = [binary(factor), scale];
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == IsaKind::Avx512 {
        let all = (A::floats_mut(p), A::floats_mut(dp), A::floats(lse), A::floats(delta));
        if let (Some(p), Some(dp), Some(lse), Some(delta)) = all {
            let factors = factors.map(|x| x.wide() as f32);
            // SAFETY: as in `softmax_columns`.
            return unsafe { softmax_x86::softmax_bwd_columns([p, dp], stride, factors, [lse, delta]) };
        }
    }
    bwd_columns(isa, p, dp, stride, factors, lse, delta);
}

multiversion! {
    /// As [`softmax_columns`], for a scale of exponents of 2.
    fn columns<const FMA: bool, A: Real>(
        s: &mut [A],
        stride: usize,
        scale: A,
        max: &mut [A; TILE],
        sum: &mut [A; TILE],
    ) -> [A; TILE] {
        let mut shrink = [A::ZERO; TILE];
        for first in (0..stride).step_by(LANES) {
            let mut greatest = [A::NEG_INFINITY; LANES];
            for row in s.chunks_exact(stride) {
                let row = part(row, first);
                for i in 0..LANES {
                    greatest[i] = if row[i] > greatest[i] { row[i] } else { greatest[i] };
                }
            }
            let (max, sum, shrink) =
                (part_mut(max, first), part_mut(sum, first), part_mut(&mut shrink, first));
            for i in 0..LANES {
                let new = greatest[i] * scale;
                let new = if new > max[i] { new } else { max[i] };
                shrink[i] = (max[i] - new).exp2_flush::<FMA>();
                max[i] = new;
                sum[i] = sum[i] * shrink[i];
            }
            // What each addition loses is kept and added later: a sum that is off shows in the gradient of the keys' bias,
            // which is zero but for rounding, and which AdamW makes steps of.
            let mut lost = [A::ZERO; LANES];
            let mut add = |sum: &mut [A; LANES], more: &[A; LANES]| {
                for i in 0..LANES {
                    let add = more[i] - lost[i];
                    let total = sum[i] + add;
                    lost[i] = (total - sum[i]) - add;
                    sum[i] = total;
                }
            };
            let (fours, rest) = s.split_at_mut(s.len() / (ROWS * stride) * (ROWS * stride));
            for four in fours.chunks_exact_mut(ROWS * stride) {
                let mut of_four = [A::ZERO; LANES];
                for pair in four.chunks_exact_mut(2 * stride) {
                    let (even, odd) = pair.split_at_mut(stride);
                    let (even, odd) = (part_mut(even, first), part_mut(odd, first));
                    for i in 0..LANES {
                        even[i] = A::fma::<FMA>(even[i], scale, -max[i]).exp2_flush::<FMA>();
                        odd[i] = A::fma::<FMA>(odd[i], scale, -max[i]).exp2_flush::<FMA>();
                        of_four[i] += even[i] + odd[i];
                    }
                }
                add(sum, &of_four);
            }
            for row in rest.chunks_exact_mut(stride) {
                let row = part_mut(row, first);
                for i in 0..LANES {
                    row[i] = A::fma::<FMA>(row[i], scale, -max[i]).exp2_flush::<FMA>();
                }
                add(sum, row);
            }
        }
        shrink
    }

    /// As [`softmax_bwd_columns`], likewise.
    fn bwd_columns<const FMA: bool, A: Real>(
        p: &mut [A],
        dp: &mut [A],
        stride: usize,
        factors: [A; 2],
        lse: &[A; TILE],
        delta: &[A; TILE],
    ) {
        let [factor, scale] = factors;
        for first in (0..stride).step_by(LANES) {
            let (lse, mut delta) = (part(lse, first), *part(delta, first));
            delta.iter_mut().for_each(|delta| *delta = *delta * scale);
            for (p, dp) in p.chunks_exact_mut(stride).zip(dp.chunks_exact_mut(stride)) {
                let (p, dp) = (part_mut(p, first), part_mut(dp, first));
                for i in 0..LANES {
                    p[i] = A::fma::<FMA>(p[i], factor, -lse[i]).exp2_flush::<FMA>();
                    dp[i] = p[i] * A::fma::<FMA>(dp[i], scale, -delta[i]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// The vectors of AVX-512 and what all other instructions compute: the same bits, whatever the scores are.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vectors_of_rows_change_no_bit() {
        let Some(isa) = Isa::of_kind(IsaKind::Avx512) else {
            // Written past the capture of the test harness: a pass that tested nothing must not look like any other.
            let _ = writeln!(
                std::io::stderr(),
                "vectors_of_rows_change_no_bit: NOT TESTED, this machine has no AVX-512"
            );
            return;
        };
        let odd = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -0.0, 1e30, -1e30];
        let value = |i: usize| match i * 7919 % 1009 {
            special @ 0..6 => odd[special],
            near @ 6..40 => -86.0 - near as f32 / 20.0,
            other => other as f32 / 40.0 - 20.0,
        };
        let bits =
            |x: &[f32]| x.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>();
        for (stride, rows) in
            [32, 64].into_iter().flat_map(|stride| (1..=131).map(move |rows| (stride, rows)))
        {
            let scores = |salt: usize| (0..rows * stride).map(|i| value(i + salt)).collect::<Vec<_>>();
            let mut all_hidden = scores(rows);
            all_hidden.iter_mut().step_by(stride).for_each(|x| *x = f32::NEG_INFINITY);
            let run = |vectors: bool| {
                let (mut s, mut max, mut sum) = (all_hidden.clone(), [f32::NEG_INFINITY; TILE], [0.0; TILE]);
                let mut out = Vec::new();
                for factor in [0.5, 0.25] {
                    out.extend(bits(&if vectors {
                        softmax_columns(isa, &mut s, stride, factor, &mut max, &mut sum)
                    } else {
                        columns(isa, &mut s, stride, binary(factor), &mut max, &mut sum)
                    }));
                    [&s[..], &max, &sum].iter().for_each(|x| out.extend(bits(x)));
                    s = scores(rows + 1);
                }
                let (mut p, mut dp) = (scores(3), scores(4));
                let [lse, delta] = [5, 6].map(|salt| std::array::from_fn(|i| value(i + salt)));
                if vectors {
                    softmax_bwd_columns(isa, &mut p, &mut dp, stride, [0.5, 0.25], &lse, &delta);
                } else {
                    bwd_columns(isa, &mut p, &mut dp, stride, [binary(0.5), 0.25], &lse, &delta);
                }
                [p, dp].iter().for_each(|x| out.extend(bits(x)));
                out
            };
            assert!(run(true) == run(false), "{rows} rows of {stride}");
        }
    }
}
