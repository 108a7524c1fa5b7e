//! Global gradient norm and AdamW.

use super::{Pools, Step};
use ironhorse_core::op::{AdamW, GradNorm, Op};
use ironhorse_core::{DType, Error, Pool, Result, Slot, bf16_to_f32, f32_to_bf16, join_master, split_master};
use std::ops::Range;

/// What PyTorch's `clip_grad_norm_` adds to the norm before it divides by it.
const CLIP_EPS: f64 = 1e-6;

pub(super) fn grad_norm(pools: &mut Pools, op: &GradNorm) -> Result<()> {
    let sum: f64 = pools.read(op.grads)?.iter().map(|g| g * g).sum();
    // the norm and the loss are f32: outside its range they are infinite
    let norm = if (sum.sqrt() as f32).is_infinite() { f64::INFINITY } else { sum.sqrt() };
    let halted = pools.read(op.halt)?[0] != 0.0;
    let bad = !norm.is_finite() || !pools.read(op.loss)?[0].is_finite();
    pools.write(op.norm, &[norm])?;
    pools.write(op.halt, &[f64::from(u8::from(halted || bad))])
}

/// A step of AdamW. Only elements of the parameter table change; alignment gaps do not.
pub(super) fn adamw(pools: &mut Pools, op: &AdamW, step: Step) -> Result<()> {
    let s = step.scalars;
    let [lr, eps, weight_decay, grad_clip] = [s.lr, s.eps, s.weight_decay, s.grad_clip].map(f64::from);
    let (beta1, beta2) = (s.beta1, s.beta2);
    let Some(clip) = clip(pools, [op.norm, op.halt], grad_clip)? else { return Ok(()) };
    let correction1 = 1.0 - beta1.powi(s.step as i32);
    let correction2 = 1.0 - beta2.powi(s.step as i32);
    let (mut w, grads) = (read_weights(pools, op.params, op.master)?, pools.read(op.grads)?);
    let (mut m, mut v) = (pools.read(op.moment1)?, pools.read(op.moment2)?);
    for param in step.params {
        let decay = if param.decay { weight_decay } else { 0.0 };
        if op.first == 0 && op.moment1.offset == 0 && param.elements().end > w.len() {
            return Err(Error::Program(format!("adamw does not cover the parameter {}", param.name)));
        }
        // empty if another optimizer has the parameter
        let second = param.in_pool(Pool::Moment2);
        // those of a slice begin with its first element
        let skipped = if op.first == 0 {
            second.offset / second.dtype.size()
        } else {
            param.elements().start - op.first
        };
        for (j, i) in (skipped..skipped + second.numel()).zip(param.elements()) {
            let i = i - op.first;
            let g = grads[i] * clip;
            m[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v[j] = beta2 * v[j] + (1.0 - beta2) * g * g;
            let update = (m[i] / correction1) / ((v[j] / correction2).sqrt() + eps);
            w[i] = w[i] - lr * decay * w[i] - lr * update;
        }
    }
    let changed = Op::from(*op).updates(step.params);
    write_weights(pools, op.params, op.master, (&w, &changed))?;
    pools.write(op.moment1, &m)?;
    pools.write(op.moment2, &v)
}

/// The factor of the gradients; `None` if the step must be skipped.
pub(super) fn clip(pools: &Pools, [norm, halt]: [Slot; 2], grad_clip: f64) -> Result<Option<f64>> {
    let norm = pools.read(norm)?[0];
    if !norm.is_finite() || pools.read(halt)?[0] != 0.0 {
        return Ok(None);
    }
    Ok(Some(if grad_clip > 0.0 { (grad_clip / (norm + CLIP_EPS)).min(1.0) } else { 1.0 }))
}

/// The master weights: those kept as such, or what parameters and residuals make, or the parameters.
pub(super) fn read_weights(pools: &Pools, params: Slot, master: Option<Slot>) -> Result<Vec<f64>> {
    let held = pools.read(master.unwrap_or(params))?;
    if !master.is_some_and(|master| master.dtype == DType::I16) {
        return Ok(held);
    }
    let weights = pools.read(params)?;
    let join = |(&w, &r): (&f64, &f64)| join_master(f32_to_bf16(w as f32), r as i16).into();
    Ok(weights.iter().zip(&held).map(join).collect())
}

/// Stores master weights, and those parameters that have changed. A weight and its residual are only meaningful together and
/// rounded: this is the only place where the oracle rounds.
pub(super) fn write_weights(
    pools: &mut Pools,
    params: Slot,
    master: Option<Slot>,
    (w, changed): (&[f64], &[Range<usize>]),
) -> Result<()> {
    let Some(master) = master else { return pools.write(params, w) };
    if master.dtype != DType::I16 {
        let mut weights = pools.read(params)?;
        changed.iter().for_each(|range| weights[range.clone()].copy_from_slice(&w[range.clone()]));
        pools.write(params, &weights)?;
        return pools.write(master, w);
    }
    let split = |&w: &f64| {
        let (weight, residual) = split_master(w as f32);
        (f64::from(bf16_to_f32(weight)), f64::from(residual))
    };
    let (weights, residuals): (Vec<f64>, Vec<f64>) = w.iter().map(split).unzip();
    pools.write(params, &weights)?;
    pools.write(master, &residuals)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use crate::case::flat_pools;
    use ironhorse_core::op::GradNorm;

    #[test]
    fn grad_norm_by_hand() {
        let mut kit = Kit::new("norm");
        let (norm, grads) = (kit.slot([1]), kit.f32s([3], &[3.0, 0.0, -4.0]));
        let (halt, loss) = (kit.f32s([1], &[0.0]), kit.f32s([1], &[2.0]));
        let case = kit.finish(GradNorm { norm, halt, grads, loss, slices: None });
        case.expect_f64(norm, &[5.0]);
        case.expect_f64(halt, &[0.0]);
    }

    #[test]
    fn halt_by_hand() {
        let huge = f32::MAX;
        for (before, loss, grad, after) in [
            (0.0, 2.0, 3.0, 0.0),
            (1.0, 2.0, 3.0, 1.0),
            (0.0, f32::NAN, 3.0, 1.0),
            (0.0, f32::NEG_INFINITY, 3.0, 1.0),
            (0.0, 2.0, f32::NAN, 1.0),
            (0.0, 2.0, f32::INFINITY, 1.0),
            (0.0, huge, huge, 1.0), // √2 times the largest f32 overflows
        ] {
            let mut kit = Kit::new("halt");
            let (norm, grads) = (kit.slot([1]), kit.f32s([2], &[grad, grad]));
            let (halt, loss) = (kit.f32s([1], &[before]), kit.f32s([1], &[loss]));
            kit.finish(GradNorm { norm, halt, grads, loss, slices: None }).expect_f64(halt, &[after]);
        }
    }

    /// Two parameters of one element, 16 elements apart; only the first decays. All numbers are powers of two.
    ///
    /// Clipping: norm 8 to 4 halves the gradients (up to the 1e-6): g = (4, 2). m = 1/2·m + 1/2·g = (2, 1 + 4);
    /// v = 3/4·v + 1/4·g² = (4, 1 + 3). Step 1 divides m by 1/2 and v by 1/4: (4, 10) / (√16, √16).
    /// w = 16 - 1/2·1/4·16 - 1/2·4/4 = 13.5 and 16 - 1/2·10/4 = 14.75.
    #[test]
    fn adamw_by_hand() {
        let mut kit = Kit::new("adamw");
        let s = &mut kit.scalars;
        (s.step, s.lr, s.beta1, s.beta2, s.eps) = (1, 0.5, 0.5, 0.75, 0.0);
        (s.weight_decay, s.grad_clip) = (0.25, 4.0);
        let op = flat_pools(&mut kit, &[(&[1], true), (&[1], false)]);
        let sparse = |a: f32, b: f32| {
            let mut all = vec![0.0; 32];
            (all[0], all[16]) = (a, b);
            all
        };
        kit.set(op.params, sparse(16.0, 16.0));
        kit.set(op.grads, sparse(8.0, 4.0));
        kit.set(op.moment1, sparse(0.0, 8.0));
        kit.set(op.moment2, sparse(0.0, 4.0));
        kit.set(op.norm, vec![8.0]);
        kit.set(op.halt, vec![0.0]);
        let wide = |a, b| sparse(a, b).into_iter().map(f64::from).collect::<Vec<_>>();
        let case = kit.finish(op);
        case.expect_within(op.params, &wide(13.5, 14.75), 1e-6);
        case.expect_within(op.moment1, &wide(2.0, 5.0), 1e-6);
        case.expect_within(op.moment2, &wide(4.0, 4.0), 1e-6);
    }
}
