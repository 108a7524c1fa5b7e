//! SwiGLU and GeGLU.

use super::Pools;
use super::activation::{activation, slope};
use ironhorse_core::Result;
use ironhorse_core::op::{Act, Gate, SwigluBwd, SwigluFwd};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The value and the slope of a gate.
fn gated(gate: Gate, x: f64) -> [f64; 2] {
    match gate {
        Gate::Silu => [x * sigmoid(x), sigmoid(x) + x * sigmoid(x) * (1.0 - sigmoid(x))],
        Gate::Gelu => [activation(Act::Gelu, x), slope(Act::Gelu, x)],
    }
}

pub(super) fn fwd(pools: &mut Pools, op: &SwigluFwd) -> Result<()> {
    let width = op.out.shape.cols();
    let inp = pools.read(op.inp)?;
    let mut out = vec![0.0; op.out.numel()];
    for r in 0..op.out.shape.rows() {
        for c in 0..width {
            let (gate, up) = (inp[2 * r * width + c], inp[(2 * r + 1) * width + c]);
            out[r * width + c] = gated(op.gate, gate)[0] * up;
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &SwigluBwd) -> Result<()> {
    let width = op.d_out.shape.cols();
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    if let Some(act) = op.act {
        fwd(pools, &SwigluFwd { out: act, inp: op.inp, gate: op.gate })?;
    }
    let mut d_inp = vec![0.0; op.d_inp.numel()];
    for r in 0..op.d_out.shape.rows() {
        for c in 0..width {
            let (g, u) = (2 * r * width + c, (2 * r + 1) * width + c);
            let (gate, up, d) = (inp[g], inp[u], d_out[r * width + c]);
            let [value, slope] = gated(op.gate, gate);
            d_inp[g] = d * up * slope;
            d_inp[u] = d * value;
        }
    }
    pools.write(op.d_inp, &d_inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Gate, SwigluBwd, SwigluFwd};

    const LN3: f32 = 1.098_612_3;

    /// The gate ln 3 has a sigmoid of 3/4, the gate 0 one of 1/2.
    #[test]
    fn by_hand() {
        let inp = [0.0, LN3, 10.0, 4.0];
        let mut kit = Kit::new("swiglu");
        let op = SwigluFwd { out: kit.slot([1, 2]), inp: kit.f32s([1, 4], &inp), gate: Gate::Silu };
        let ln3 = 3_f64.ln();
        kit.finish(op).expect_within(op.out, &[0.0, 3.0 * ln3], 1e-6);
        for in_place in [false, true] {
            let mut kit = Kit::new("swiglu");
            let inp = kit.f32s([1, 4], &inp);
            let d_inp = if in_place { inp } else { kit.slot([1, 4]) };
            let d_out = kit.f32s([1, 2], &[2.0, 1.0]);
            let want = [10.0, 4.0 * (0.75 + ln3 * 3.0 / 16.0), 0.0, 0.75 * ln3];
            let op = SwigluBwd { d_inp, act: None, d_out, inp, gate: Gate::Silu };
            kit.finish(op).expect_within(d_inp, &want, 1e-6);
        }
    }

    /// GELU of 0 is 0 with the slope 1/2; far from 0 it is its input or 0.
    #[test]
    fn geglu_by_hand() {
        let mut kit = Kit::new("swiglu");
        let inp = kit.f32s([1, 6], &[0.0, 20.0, -20.0, 10.0, 4.0, 3.0]);
        let op = SwigluFwd { out: kit.slot([1, 3]), inp, gate: Gate::Gelu };
        kit.finish(op).expect_within(op.out, &[0.0, 80.0, 0.0], 1e-12);
        let mut kit = Kit::new("swiglu");
        let (d_inp, d_out) = (kit.slot([1, 6]), kit.f32s([1, 3], &[2.0, 1.0, 1.0]));
        let inp = kit.f32s([1, 6], &[0.0, 20.0, -20.0, 10.0, 4.0, 3.0]);
        let op = SwigluBwd { d_inp, act: None, d_out, inp, gate: Gate::Gelu };
        kit.finish(op).expect_within(d_inp, &[10.0, 4.0, 0.0, 0.0, 20.0, 0.0], 1e-12);
    }
}
