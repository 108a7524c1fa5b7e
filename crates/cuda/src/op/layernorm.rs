//! Layer normalisation.

use super::lower::Lower;
use super::norm_rows::{Backward, Names};
use crate::Result;
use crate::kernels::Spec;
use ironhorse_core::op::{LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd};

const NAMES: Names = Names {
    fwd_file: "norm/layernorm.cu",
    bwd_file: "norm/layernorm_bwd.cu",
    bwd: "layernorm_bwd",
    bwd_rows: "layernorm_bwd_rows",
    bwd_columns: "layernorm_bwd_columns",
    bwd_sums: "layernorm_bwd_sums",
};

pub(crate) fn layernorm_fwd(cx: &mut Lower<'_>, op: &LayerNormFwd) -> Result<()> {
    let slots = [op.out, op.mean, op.rstd, op.inp, op.weight, op.bias];
    NAMES.forward(cx, "layernorm_fwd", &slots, (op.inp, op.weight), Some(op.eps))
}

pub(crate) fn residual_layernorm_fwd(cx: &mut Lower<'_>, op: &ResidualLayerNormFwd) -> Result<()> {
    let slots = [op.residual, op.out, op.mean, op.rstd, op.a, op.b, op.weight, op.bias];
    NAMES.forward(cx, "residual_layernorm_fwd", &slots, (op.a, op.weight), Some(op.eps))
}

pub(crate) fn layernorm_apply(cx: &mut Lower<'_>, op: &LayerNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.mean, op.rstd, op.weight, op.bias];
    NAMES.forward(cx, "layernorm_apply", &slots, (op.inp, op.weight), None)
}

pub(crate) fn layernorm_bwd(cx: &mut Lower<'_>, op: &LayerNormBwd) -> Result<()> {
    Backward {
        names: &NAMES,
        d_inp: op.d_inp,
        d_out: op.d_out,
        inp: op.inp,
        statistics: &[op.mean, op.rstd],
        weight: op.weight,
        sums: &[op.d_weight, op.d_bias],
        accum_inp: op.accum_inp,
        accum: op.accum,
    }
    .launch(cx)
}

pub(super) fn specs() -> Vec<Spec> {
    NAMES.specs()
}
