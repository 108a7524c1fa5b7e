//! The router: softmax, the K largest, and the auxiliary loss.

use super::{Pools, Step};
use ironhorse_core::op::{RouterBwd, RouterFwd, RouterLoad};
use ironhorse_core::{Error, Result};

pub(super) fn fwd(pools: &mut Pools, op: &RouterFwd) -> Result<()> {
    let (all, k) = (op.probs.shape.cols(), op.experts.shape.cols());
    let logits = pools.read(op.logits)?;
    let (mut probs, mut weights, mut experts) = (Vec::new(), Vec::new(), Vec::new());
    for (token, row) in logits.chunks_exact(all).enumerate() {
        if let Some(logit) = row.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::Input(format!("router: a logit of token {token} is {logit}")));
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        let p: Vec<f64> = row.iter().map(|x| (x - max).exp() / sum).collect();
        let mut chosen: Vec<usize> = (0..all).collect();
        chosen.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).expect("finite").then(a.cmp(&b)));
        chosen.truncate(k);
        let total: f64 = chosen.iter().map(|&e| p[e]).sum();
        weights.extend(chosen.iter().map(|&e| p[e] / total));
        experts.extend(chosen.iter().map(|&e| e as f64));
        probs.extend(p);
    }
    pools.write(op.probs, &probs)?;
    pools.write(op.weights, &weights)?;
    pools.write(op.experts, &experts)
}

/// The backward by the chain rule, step by step: weights to probabilities, the auxiliary loss to probabilities, softmax to logits.
pub(super) fn bwd(pools: &mut Pools, op: &RouterBwd, step: Step) -> Result<()> {
    let (all, k) = (op.probs.shape.cols(), op.experts.shape.cols());
    let (probs, weights, d_weights) =
        (pools.read(op.probs)?, pools.read(op.weights)?, pools.read(op.d_weights)?);
    let (experts, load) = (pools.read(op.experts)?, pools.read(op.load)?);
    let aux = row_scale(step) * f64::from(op.alpha) * all as f64;
    let mut d_logits = vec![0.0; probs.len()];
    for n in 0..op.probs.shape.rows() {
        let p = &probs[n * all..(n + 1) * all];
        let chosen: Vec<usize> =
            experts[n * k..(n + 1) * k].iter().map(|&e| expert(e, all)).collect::<Result<_>>()?;
        let (w, d_w) = (&weights[n * k..(n + 1) * k], &d_weights[n * k..(n + 1) * k]);
        let mut d_p: Vec<f64> = load.iter().map(|load| aux * load).collect();
        // w_j = p_j/total, so ∂w_i/∂p_j = (δ_ij - w_i)/total.
        let total: f64 = chosen.iter().map(|&e| p[e]).sum();
        let mean: f64 = w.iter().zip(d_w).map(|(w, d)| w * d).sum();
        for j in 0..k {
            d_p[chosen[j]] += (d_w[j] - mean) / total;
        }
        let mean: f64 = p.iter().zip(&d_p).map(|(p, d)| p * d).sum();
        for e in 0..all {
            d_logits[n * all + e] = p[e] * (d_p[e] - mean);
        }
    }
    pools.write(op.d_logits, &d_logits)
}

pub(super) fn load(pools: &mut Pools, op: &RouterLoad, step: Step) -> Result<()> {
    let (rows, all) = (op.probs.shape.rows(), op.probs.shape.cols());
    let (probs, offsets) = (pools.read(op.probs)?, pools.read(op.offsets)?);
    let scale = row_scale(step);
    let adds = op.accum.adds(step.scalars.added());
    let load: Vec<f64> = offsets.windows(2).map(|pair| (pair[1] - pair[0]) / rows.max(1) as f64).collect();
    let mut sum = 0.0;
    for row in probs.chunks_exact(all) {
        sum += row.iter().zip(&load).map(|(p, load)| p * load).sum::<f64>();
    }
    pools.write(op.load, &load)?;
    // row_scale · N · alpha · E · Σ_e load_e · (Σ_n probs_ne / N)
    pools.store(op.aux, &[scale * f64::from(op.alpha) * all as f64 * sum], adds)?;
    let Some(entropy) = op.entropy else { return Ok(()) };
    let sum: f64 = probs.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum();
    pools.store(entropy, &[scale * sum], adds)
}

/// The factor of a mean over all rows of the step.
fn row_scale(step: Step) -> f64 {
    f64::from(step.scalars.loss_scale) * f64::from(step.scalars.counted)
}

/// An expert as an index, or an input error.
pub(super) fn expert(value: f64, all: usize) -> Result<usize> {
    if value >= 0.0 && value < all as f64 {
        return Ok(value as usize);
    }
    Err(Error::Input(format!("expert index {value} is out of range 0..{all}")))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, RouterBwd, RouterFwd, RouterLoad};

    const LN2: f32 = std::f32::consts::LN_2;

    /// Row 0: probabilities 1/8, 1/2, 1/8, 1/4. Row 1: all equal, so the lowest indices are chosen.
    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("router");
        let op = RouterFwd {
            probs: kit.slot([2, 4]),
            weights: kit.slot([2, 3]),
            experts: kit.ints([2, 3]),
            logits: kit.f32s([2, 4], &[0.0, 2.0 * LN2, 0.0, LN2, 5.0, 5.0, 5.0, 5.0]),
        };
        let case = kit.finish(op);
        case.expect_within(op.probs, &[0.125, 0.5, 0.125, 0.25, 0.25, 0.25, 0.25, 0.25], 1e-7);
        case.expect_f64(op.experts, &[1.0, 3.0, 0.0, 0.0, 1.0, 2.0]);
        let third = 1.0 / 3.0;
        case.expect_within(op.weights, &[4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, third, third, third], 1e-7);
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused_with_the_token() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut kit = Kit::new("router");
            let op = RouterFwd {
                probs: kit.slot([2, 2]),
                weights: kit.slot([2, 1]),
                experts: kit.ints([2, 1]),
                logits: kit.f32s([2, 2], &[0.0, 1.0, bad, 1.0]),
            };
            let error = kit.finish(op).oracle().unwrap_err().to_string();
            assert_eq!(error, format!("router: a logit of token 1 is {bad}"));
        }
    }

    /// Probabilities 1/2, 1/4, 1/4; the first two are chosen with weights 2/3, 1/3. `d_weights` (3, 0): D = 2, so the
    /// weights' part is (2/3, -2/3, 0). The auxiliary part: 1/2·2·3 = 3 times p·(load - 3/4) with load (1, 1, 0).
    #[test]
    fn bwd_by_hand() {
        let mut kit = Kit::new("router");
        (kit.scalars.loss_scale, kit.scalars.counted) = (2.0, 0.25);
        let op = RouterBwd {
            d_logits: kit.slot([1, 3]),
            d_weights: kit.f32s([1, 2], &[3.0, 0.0]),
            probs: kit.f32s([1, 3], &[0.5, 0.25, 0.25]),
            weights: kit.f32s([1, 2], &[2.0 / 3.0, 1.0 / 3.0]),
            experts: kit.i32s([1, 2], &[0, 1]),
            load: kit.f32s([3], &[1.0, 1.0, 0.0]),
            alpha: 2.0,
        };
        let two = 2.0 / 3.0;
        let want = [two + 0.375, 0.1875 - two, -0.5625];
        kit.finish(op).expect_within(op.d_logits, &want, 1e-6);
    }

    /// Two tokens on expert 0, one on 1, none on 2: load (1, 1/2, 0) of two tokens.
    #[test]
    fn load_by_hand() {
        for (accum, aux, entropy) in [(Accum::Write, 2.25, 0.75), (Accum::Add, 12.25, 20.75)] {
            let mut kit = Kit::new("router");
            (kit.scalars.loss_scale, kit.scalars.counted) = (2.0, 0.25);
            let op = RouterLoad {
                load: kit.slot([3]),
                aux: kit.f32s([1], &[10.0]),
                entropy: Some(kit.f32s([1], &[20.0])),
                probs: kit.f32s([2, 3], &[0.5, 0.25, 0.25, 1.0, 0.0, 0.0]),
                offsets: kit.i32s([4], &[0, 2, 3, 3]),
                alpha: 12.0 / 13.0,
                accum,
            };
            let case = kit.finish(op);
            case.expect_f64(op.load, &[1.0, 0.5, 0.0]);
            // 1/2 · 12/13 · 3 · (5/8 + 1)
            case.expect_within(op.aux, &[aux], 1e-6);
            // 1/2 · (3/2 ln 2 + 0)
            let ln2 = std::f64::consts::LN_2;
            case.expect_within(op.entropy.unwrap(), &[entropy - 0.75 + 0.75 * ln2], 1e-12);
        }
    }
}
