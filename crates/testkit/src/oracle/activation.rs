//! Activations.

use super::Pools;
use ironhorse_core::Result;
use ironhorse_core::op::{Act, ActBwd, ActFwd};
use std::f64::consts::PI;

const CUBIC: f64 = 0.044715;

/// An activation in f64.
pub fn activation(act: Act, x: f64) -> f64 {
    match act {
        Act::Gelu => gelu(x),
        Act::Relu2 => x.max(0.0).powi(2),
    }
}

/// The derivative.
pub(super) fn slope(act: Act, x: f64) -> f64 {
    match act {
        Act::Gelu => gelu_grad(x),
        Act::Relu2 => 2.0 * x.max(0.0),
    }
}

/// `0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
fn gelu(x: f64) -> f64 {
    let u = (2.0 / PI).sqrt() * (x + CUBIC * x.powi(3));
    0.5 * x * (1.0 + u.tanh())
}

/// The derivative of [`gelu`], by the product and chain rules: `tanh' = 1 - tanh²`.
fn gelu_grad(x: f64) -> f64 {
    let u = (2.0 / PI).sqrt() * (x + CUBIC * x.powi(3));
    let du = (2.0 / PI).sqrt() * (1.0 + 3.0 * CUBIC * x.powi(2));
    0.5 * (1.0 + u.tanh()) + 0.5 * x * (1.0 - u.tanh().powi(2)) * du
}

pub(super) fn fwd(pools: &mut Pools, op: &ActFwd) -> Result<()> {
    let inp = pools.read(op.inp)?;
    let out: Vec<f64> = inp.iter().map(|&x| activation(op.act, x)).collect();
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &ActBwd) -> Result<()> {
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    let d_inp: Vec<f64> = d_out.iter().zip(&inp).map(|(d, &x)| d * slope(op.act, x)).collect();
    pools.write(op.d_inp, &d_inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Act, ActBwd, ActFwd};

    /// gelu(1): u = 0.7978845608·1.044715 = 0.8335618, tanh u = 0.6823839, so 0.8411920; gelu(-1) = gelu(1) - 1.
    #[test]
    fn gelu_fwd_by_hand() {
        let mut kit = Kit::new("gelu");
        let (out, inp) = (kit.slot([4]), kit.f32s([4], &[0.0, 1.0, -1.0, 30.0]));
        kit.finish(ActFwd { out, inp, act: Act::Gelu }).expect_within(
            out,
            &[0.0, 0.841192, -0.158808, 30.0],
            1e-6,
        );
    }

    /// gelu'(0) = 1/2; gelu'(1) = 0.5·1.6823839 + 0.5·(1 - 0.6823839²)·0.7978846·1.134145 = 1.0829641;
    /// gelu'(-x) = 1 - gelu'(x).
    #[test]
    fn gelu_bwd_by_hand() {
        let mut kit = Kit::new("gelu");
        let (d_inp, inp) = (kit.slot([4]), kit.f32s([4], &[0.0, 1.0, -1.0, 30.0]));
        let d_out = kit.f32s([4], &[2.0, 1.0, 10.0, 3.0]);
        let case = kit.finish(ActBwd { d_inp, d_out, inp, act: Act::Gelu });
        case.expect_within(d_inp, &[1.0, 1.0829641, -0.829641, 3.0], 1e-6);
    }
}
