//! RMS normalisation of the heads of queries and keys.

use super::rmsnorm::{factors, rstd};
use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{QkHeads, QkNormBwd, QkNormFwd};

/// Calls `f(first element, statistic's index, whether of keys)` for each normalised head.
fn each_head(parts: &QkHeads, mut f: impl FnMut(usize, usize, bool)) {
    for token in 0..parts.tokens() {
        for head in 0..parts.normed_heads() {
            let first = (token * parts.all_heads() + head) * parts.dim();
            f(first, token * parts.normed_heads() + head, head >= parts.heads);
        }
    }
}

pub(super) fn fwd(pools: &mut Pools, op: &QkNormFwd) -> Result<()> {
    let (parts, inp) = (op.parts(), pools.read(op.inp)?);
    let weights = [factors(pools, op.q_weight, op.gain)?, factors(pools, op.k_weight, op.gain)?];
    let scales = [f64::from(op.q_scale), 1.0];
    let (mut out, mut stats) = (inp.clone(), vec![0.0; op.rstd.numel()]);
    each_head(&parts, |first, stat, is_key| {
        stats[stat] = rstd(&inp[first..first + parts.dim()], f64::from(op.eps));
        for c in 0..parts.dim() {
            let which = usize::from(is_key);
            out[first + c] = inp[first + c] * stats[stat] * weights[which][c] * scales[which];
        }
    });
    pools.write(op.rstd, &stats)?;
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &QkNormBwd, step: Step) -> Result<()> {
    let (parts, dim) = (op.parts(), op.parts().dim());
    let (inp, stats) = (pools.read(op.inp)?, pools.read(op.rstd)?);
    let weights = [factors(pools, op.q_weight, op.gain)?, factors(pools, op.k_weight, op.gain)?];
    let scales = [f64::from(op.q_scale), 1.0];
    let d_out = pools.read(op.d_qkv)?;
    let (mut d_inp, mut d_weights) = (d_out.clone(), [vec![0.0; dim], vec![0.0; dim]]);
    each_head(&parts, |first, stat, is_key| {
        let (rstd, which) = (stats[stat], usize::from(is_key));
        let x_hat: Vec<f64> = inp[first..first + dim].iter().map(|x| x * rstd).collect();
        let d: Vec<f64> = d_out[first..first + dim].iter().map(|d| d * scales[which]).collect();
        let g: Vec<f64> = d.iter().zip(&weights[which]).map(|(d, w)| d * w).collect();
        let mean_gx = g.iter().zip(&x_hat).map(|(g, x)| g * x).sum::<f64>() / dim as f64;
        for c in 0..dim {
            d_inp[first + c] = rstd * (g[c] - x_hat[c] * mean_gx);
            d_weights[which][c] += d[c] * x_hat[c];
        }
    });
    pools.write(op.d_qkv, &d_inp)?;
    let adds = op.accum.adds(step.scalars.added());
    pools.store(op.d_q_weight, &d_weights[0], adds)?;
    pools.store(op.d_k_weight, &d_weights[1], adds)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Gain, QkNormBwd, QkNormFwd};

    /// One query, key and value head of two: the query (1, 3) has the mean square 5, the key (5, 5) has 25; with eps 11
    /// their statistics are 1/4 and 1/6.
    #[test]
    fn by_hand() {
        let mut kit = Kit::new("qk_norm");
        let op = QkNormFwd {
            out: kit.slot([1, 1, 6]),
            rstd: kit.slot([1, 1, 2]),
            inp: kit.f32s([1, 1, 6], &[1.0, 3.0, 5.0, 5.0, 7.0, 8.0]),
            q_weight: kit.f32s([2], &[2.0, 4.0]),
            k_weight: kit.f32s([2], &[6.0, 12.0]),
            heads: 1,
            kv_heads: 1,
            eps: 11.0,
            gain: Gain::Weight,
            q_scale: 1.0,
        };
        let case = kit.finish(op);
        case.expect_within(op.rstd, &[0.25, 1.0 / 6.0], 1e-15);
        case.expect_within(op.out, &[0.5, 3.0, 5.0, 10.0, 7.0, 8.0], 1e-15);
    }

    /// The heads of [`by_hand`] times 1 + weight, and the query twice as large.
    #[test]
    fn one_plus_weight_by_hand() {
        let mut kit = Kit::new("qk_norm");
        let op = QkNormFwd {
            out: kit.slot([1, 1, 6]),
            rstd: kit.slot([1, 1, 2]),
            inp: kit.f32s([1, 1, 6], &[1.0, 3.0, 5.0, 5.0, 7.0, 8.0]),
            q_weight: kit.f32s([2], &[1.0, 3.0]),
            k_weight: kit.f32s([2], &[5.0, 11.0]),
            heads: 1,
            kv_heads: 1,
            eps: 11.0,
            gain: Gain::OnePlusWeight,
            q_scale: 2.0,
        };
        kit.finish(op).expect_within(op.out, &[1.0, 6.0, 5.0, 10.0, 7.0, 8.0], 1e-15);
    }

    /// The queries are those of `rmsnorm_bwd`: x̂ = (1/4, 3/4), g = (2, 4), mean(g·x̂) = 7/4.
    #[test]
    fn bwd_by_hand() {
        let mut kit = Kit::new("qk_norm");
        let op = QkNormBwd {
            d_qkv: kit.f32s([1, 1, 6], &[1.0, 1.0, 1.0, 0.0, 7.0, 8.0]),
            d_q_weight: kit.f32s([2], &[10.0, 20.0]),
            d_k_weight: kit.f32s([2], &[30.0, 40.0]),
            inp: kit.f32s([1, 1, 6], &[1.0, 3.0, 2.0, 0.0, 1.0, 1.0]),
            rstd: kit.f32s([1, 1, 2], &[0.25, 0.5]),
            q_weight: kit.f32s([2], &[2.0, 4.0]),
            k_weight: kit.f32s([2], &[8.0, 1.0]),
            heads: 1,
            kv_heads: 1,
            accum: Accum::Add,
            gain: Gain::Weight,
            q_scale: 1.0,
        };
        let case = kit.finish(op);
        // the key: x̂ = (1, 0), g = (8, 0), mean(g·x̂) = 4
        case.expect_f64(op.d_qkv, &[0.390625, 0.671875, 2.0, 0.0, 7.0, 8.0]);
        case.expect_f64(op.d_q_weight, &[10.25, 20.75]);
        case.expect_f64(op.d_k_weight, &[31.0, 40.0]);
    }
}
