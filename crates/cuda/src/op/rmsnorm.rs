//! Normalisation by the root mean square.

use super::lower::Lower;
use super::norm_rows::{Backward, Names};
use crate::Result;
use crate::kernels::Spec;
use ironhorse_core::op::{ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};

const NAMES: Names = Names {
    fwd_file: "norm/rmsnorm.cu",
    bwd_file: "norm/rmsnorm_bwd.cu",
    bwd: "rmsnorm_bwd",
    bwd_rows: "rmsnorm_bwd_rows",
    bwd_columns: "rmsnorm_bwd_columns",
    bwd_sums: "rmsnorm_bwd_sums",
};

pub(crate) fn rmsnorm_fwd(cx: &mut Lower<'_>, op: &RmsNormFwd) -> Result<()> {
    let slots = [op.out, op.rstd, op.inp, op.weight];
    NAMES.forward(cx, "rmsnorm_fwd", &slots, (op.inp, op.weight), Some(op.eps))
}

pub(crate) fn residual_rmsnorm_fwd(cx: &mut Lower<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let slots = [op.residual, op.out, op.rstd, op.a, op.b, op.weight];
    NAMES.forward(cx, "residual_rmsnorm_fwd", &slots, (op.a, op.weight), Some(op.eps))
}

pub(crate) fn rmsnorm_apply(cx: &mut Lower<'_>, op: &RmsNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.rstd, op.weight];
    NAMES.forward(cx, "rmsnorm_apply", &slots, (op.inp, op.weight), None)
}

pub(crate) fn rmsnorm_bwd(cx: &mut Lower<'_>, op: &RmsNormBwd) -> Result<()> {
    Backward {
        names: &NAMES,
        d_inp: op.d_inp,
        d_out: op.d_out,
        inp: op.inp,
        statistics: &[op.rstd],
        weight: op.weight,
        sums: &[op.d_weight],
        accum_inp: op.accum_inp,
        accum: op.accum,
    }
    .launch(cx)
}

pub(super) fn specs() -> Vec<Spec> {
    NAMES.specs()
}
