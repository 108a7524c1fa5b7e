//! The ops on the device, one file per family: which kernels or library calls, with which sizes.

mod elementwise;
mod layernorm;
mod memory;

use crate::kernels::Spec;
use crate::lower::Lower;
use crate::{Cache, Error, Result};
use ironhorse_core::op::Op;

/// The libraries ops call, opened at first use.
pub(crate) struct Libraries {
    #[allow(dead_code, reason = "the GEMM launcher keeps its algorithms there")]
    pub cache: Cache,
}

impl Libraries {
    pub fn new(cache: Cache) -> Self {
        Self { cache }
    }
}

/// Lowers one op.
pub(crate) fn lower(cx: &mut Lower<'_>, op: &Op) -> Result<()> {
    match op {
        Op::LayerNormFwd(op) => layernorm::layernorm_fwd(cx, op),
        Op::ResidualLayerNormFwd(op) => layernorm::residual_layernorm_fwd(cx, op),
        Op::LayerNormApply(op) => layernorm::layernorm_apply(cx, op),
        Op::LayerNormBwd(op) => layernorm::layernorm_bwd(cx, op),
        Op::GeluFwd(op) => elementwise::gelu_fwd(cx, op),
        Op::GeluBwd(op) => elementwise::gelu_bwd(cx, op),
        Op::Add(op) => elementwise::add(cx, op),
        Op::Fill(op) => memory::fill(cx, op),
        Op::CopySlot(op) => memory::copy(cx, op),
        op => Err(Error::Unsupported(format!("{} is not on this engine yet", op.name()))),
    }
}

/// Every specialisation the launchers ask for.
pub(crate) fn all_specs() -> Vec<Spec> {
    [elementwise::specs(), layernorm::specs(), memory::specs()].concat()
}
