//! Linear layers, each as three nested loops.

use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{LinearBwdInput, LinearBwdWeight, LinearFwd};

pub(super) fn fwd(pools: &mut Pools, op: &LinearFwd) -> Result<()> {
    let (rows, ic, oc) = (op.inp.shape.rows(), op.inp.shape.cols(), op.weight.shape.rows());
    let (inp, weight) = (pools.read(op.inp)?, pools.read(op.weight)?);
    let bias = match op.bias {
        Some(bias) => pools.read(bias)?,
        None => vec![0.0; oc],
    };
    let mut out = vec![0.0; rows * oc];
    for r in 0..rows {
        for o in 0..oc {
            let dot: f64 = (0..ic).map(|i| inp[r * ic + i] * weight[o * ic + i]).sum();
            out[r * oc + o] = dot + bias[o];
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd_input(pools: &mut Pools, op: &LinearBwdInput) -> Result<()> {
    let (rows, ic, oc) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.weight.shape.rows());
    let (d_out, weight) = (pools.read(op.d_out)?, pools.read(op.weight)?);
    let mut d_inp = vec![0.0; rows * ic];
    for r in 0..rows {
        for o in 0..oc {
            for i in 0..ic {
                d_inp[r * ic + i] += d_out[r * oc + o] * weight[o * ic + i];
            }
        }
    }
    pools.write(op.d_inp, &d_inp)
}

pub(super) fn bwd_weight(pools: &mut Pools, op: &LinearBwdWeight, step: Step) -> Result<()> {
    let (rows, ic, oc) = (op.inp.shape.rows(), op.inp.shape.cols(), op.d_weight.shape.rows());
    let (d_out, inp) = (pools.read(op.d_out)?, pools.read(op.inp)?);
    let mut d_weight = vec![0.0; oc * ic];
    let mut d_bias = vec![0.0; oc];
    for r in 0..rows {
        for o in 0..oc {
            d_bias[o] += d_out[r * oc + o];
            for i in 0..ic {
                d_weight[o * ic + i] += d_out[r * oc + o] * inp[r * ic + i];
            }
        }
    }
    let adds = op.accum.adds(step.scalars.added());
    pools.store(op.d_weight, &d_weight, adds)?;
    match op.d_bias {
        Some(slot) => pools.store(slot, &d_bias, adds),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Act, LinearBwdInput, LinearBwdWeight, LinearFwd, PreAct};

    const INP: [f32; 4] = [1.0, 2.0, 3.0, 4.0]; // (2,2)
    const WEIGHT: [f32; 6] = [1.0, 0.0, 0.0, 1.0, 1.0, -1.0]; // (3,2)

    /// (1,2)·Wᵀ = (1, 2, -1), (3,4)·Wᵀ = (3, 4, -1), plus the bias.
    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("linear");
        let (out, inp, weight) = (kit.slot([2, 3]), kit.f32s([2, 2], &INP), kit.f32s([3, 2], &WEIGHT));
        let bias = Some(kit.f32s([3], &[10.0, 20.0, 30.0]));
        let case = kit.finish(LinearFwd { out, pre: None, inp, weight, bias });
        case.expect_f64(out, &[11.0, 22.0, 29.0, 13.0, 24.0, 29.0]);
    }

    #[test]
    fn fwd_with_gelu_by_hand() {
        let mut kit = Kit::new("linear");
        let (out, pre) = (kit.slot([1, 2]), kit.slot([1, 2]));
        let (inp, weight) = (kit.f32s([1, 1], &[0.5]), kit.f32s([2, 1], &[2.0, -2.0]));
        let case = kit.finish(LinearFwd {
            out,
            pre: Some(PreAct { act: Act::Gelu, slot: pre }),
            inp,
            weight,
            bias: None,
        });
        case.expect_f64(pre, &[1.0, -1.0]);
        case.expect_within(out, &[0.841192, -0.158808], 1e-6);
    }

    /// (1,2,3)·W = (1 + 3, 2 - 3).
    #[test]
    fn bwd_input_by_hand() {
        let mut kit = Kit::new("linear");
        let (d_inp, d_out) = (kit.slot([1, 2]), kit.f32s([1, 3], &[1.0, 2.0, 3.0]));
        let weight = kit.f32s([3, 2], &WEIGHT);
        let case = kit.finish(LinearBwdInput { d_inp, d_out, weight, pre: None });
        case.expect_f64(d_inp, &[4.0, -1.0]);
        let mut kit = Kit::new("linear");
        let (d_inp, d_out) = (kit.slot([1, 2]), kit.f32s([1, 3], &[1.0, 2.0, 3.0]));
        let (weight, pre) = (kit.f32s([3, 2], &WEIGHT), kit.f32s([1, 2], &[0.0, 1.0]));
        let case = kit.finish(LinearBwdInput {
            d_inp,
            d_out,
            weight,
            pre: Some(PreAct { act: Act::Gelu, slot: pre }),
        });
        case.expect_within(d_inp, &[2.0, -1.0829641], 1e-6);
    }

    /// d_outᵀ·inp with d_out = (1, 2)ᵀ: 1·(1,2) + 2·(3,4) = (7, 10); d_bias = 3.
    #[test]
    fn bwd_weight_by_hand() {
        for (accum, micro_step, old) in [
            (Accum::Write, 1, 0.0),
            (Accum::Add, 0, 100.0),
            (Accum::FirstWrites, 0, 0.0),
            (Accum::FirstWrites, 1, 100.0),
        ] {
            let mut kit = Kit::new("linear");
            kit.scalars.micro_step = micro_step;
            let (d_weight, d_bias) = (kit.f32s([1, 2], &[100.0; 2]), kit.f32s([1], &[100.0]));
            let (d_out, inp) = (kit.f32s([2, 1], &[1.0, 2.0]), kit.f32s([2, 2], &INP));
            let case = kit.finish(LinearBwdWeight { d_weight, d_bias: Some(d_bias), d_out, inp, accum });
            case.expect_f64(d_weight, &[old + 7.0, old + 10.0]);
            case.expect_f64(d_bias, &[old + 3.0]);
        }
    }
}
