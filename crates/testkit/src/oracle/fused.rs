//! Fused ops expressed as smaller ones.

use ironhorse_core::op::{
    ActBwd, ActFwd, Add, LayerNormFwd, LinearBwdInput, LinearFwd, Op, PreAct, RmsNormFwd,
};

/// The ops that a fused op consists of, in order; an op that is not fused returns itself.
pub(crate) fn parts(op: &Op) -> Vec<Op> {
    match *op {
        Op::ResidualLayerNormFwd(op) => vec![
            Add { out: op.residual, a: op.a, b: op.b }.into(),
            LayerNormFwd {
                out: op.out,
                mean: op.mean,
                rstd: op.rstd,
                inp: op.residual,
                weight: op.weight,
                bias: op.bias,
                eps: op.eps,
            }
            .into(),
        ],
        Op::ResidualRmsNormFwd(op) => vec![
            Add { out: op.residual, a: op.a, b: op.b }.into(),
            RmsNormFwd {
                out: op.out,
                rstd: op.rstd,
                inp: op.residual,
                weight: op.weight,
                eps: op.eps,
                gain: op.gain,
            }
            .into(),
        ],
        Op::LinearFwd(op @ LinearFwd { pre: Some(PreAct { act, slot }), .. }) => vec![
            LinearFwd { out: slot, pre: None, ..op }.into(),
            ActFwd { out: op.out, inp: slot, act }.into(),
        ],
        Op::LinearBwdInput(op @ LinearBwdInput { pre: Some(PreAct { act, slot: inp }), .. }) => vec![
            LinearBwdInput { pre: None, ..op }.into(),
            ActBwd { d_inp: op.d_inp, d_out: op.d_inp, inp, act }.into(),
        ],
        op => vec![op],
    }
}
