//! SwiGLU.

use super::Pools;
use ironhorse_core::Result;
use ironhorse_core::op::{SwigluBwd, SwigluFwd};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn fwd(pools: &mut Pools, op: &SwigluFwd) -> Result<()> {
    let width = op.out.shape.cols();
    let inp = pools.read(op.inp)?;
    let mut out = vec![0.0; op.out.numel()];
    for r in 0..op.out.shape.rows() {
        for c in 0..width {
            let (gate, up) = (inp[2 * r * width + c], inp[(2 * r + 1) * width + c]);
            out[r * width + c] = gate * sigmoid(gate) * up;
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &SwigluBwd) -> Result<()> {
    let width = op.d_out.shape.cols();
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    if let Some(act) = op.act {
        fwd(pools, &SwigluFwd { out: act, inp: op.inp })?;
    }
    let mut d_inp = vec![0.0; op.d_inp.numel()];
    for r in 0..op.d_out.shape.rows() {
        for c in 0..width {
            let (g, u) = (2 * r * width + c, (2 * r + 1) * width + c);
            let (gate, up, d) = (inp[g], inp[u], d_out[r * width + c]);
            let s = sigmoid(gate);
            d_inp[g] = d * up * (s + gate * s * (1.0 - s));
            d_inp[u] = d * gate * s;
        }
    }
    pools.write(op.d_inp, &d_inp)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{SwigluBwd, SwigluFwd};

    const LN3: f32 = 1.098_612_3;

    /// The gate ln 3 has a sigmoid of 3/4, the gate 0 one of 1/2.
    #[test]
    fn by_hand() {
        let inp = [0.0, LN3, 10.0, 4.0];
        let mut kit = Kit::new("swiglu");
        let op = SwigluFwd { out: kit.slot([1, 2]), inp: kit.f32s([1, 4], &inp) };
        let ln3 = 3_f64.ln();
        kit.finish(op).expect_within(op.out, &[0.0, 3.0 * ln3], 1e-6);
        for in_place in [false, true] {
            let mut kit = Kit::new("swiglu");
            let inp = kit.f32s([1, 4], &inp);
            let d_inp = if in_place { inp } else { kit.slot([1, 4]) };
            let d_out = kit.f32s([1, 2], &[2.0, 1.0]);
            let want = [10.0, 4.0 * (0.75 + ln3 * 3.0 / 16.0), 0.0, 0.75 * ln3];
            kit.finish(SwigluBwd { d_inp, act: None, d_out, inp }).expect_within(d_inp, &want, 1e-6);
        }
    }
}
