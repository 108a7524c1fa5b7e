//! The ops on the device, one file per family: which kernels or library calls, with which sizes.

mod attention_cached;
mod elementwise;
mod embedding;
mod layernorm;
mod loss;
mod memory;
mod optimizer;
mod sample;

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
        Op::EmbeddingFwd(op) => embedding::embedding_fwd(cx, op),
        Op::EmbeddingBwd(op) => embedding::embedding_bwd(cx, op),
        Op::LayerNormFwd(op) => layernorm::layernorm_fwd(cx, op),
        Op::ResidualLayerNormFwd(op) => layernorm::residual_layernorm_fwd(cx, op),
        Op::LayerNormApply(op) => layernorm::layernorm_apply(cx, op),
        Op::LayerNormBwd(op) => layernorm::layernorm_bwd(cx, op),
        Op::GeluFwd(op) => elementwise::gelu_fwd(cx, op),
        Op::GeluBwd(op) => elementwise::gelu_bwd(cx, op),
        Op::Add(op) => elementwise::add(cx, op),
        Op::AttentionCached(op) => attention_cached::attention_cached(cx, op),
        Op::CrossEntropy(op) => loss::cross_entropy(cx, op),
        Op::LossMean(op) => loss::loss_mean(cx, op),
        Op::GradNorm(op) => optimizer::grad_norm(cx, op),
        Op::AdamW(op) => optimizer::adamw(cx, op),
        Op::Fill(op) => memory::fill(cx, op),
        Op::CopySlot(op) => memory::copy(cx, op),
        op => Err(Error::Unsupported(format!("{} is not on this engine yet", op.name()))),
    }
}

/// Every specialisation the launchers ask for.
pub(crate) fn all_specs() -> Vec<Spec> {
    [
        attention_cached::specs(),
        elementwise::specs(),
        embedding::specs(),
        layernorm::specs(),
        loss::specs(),
        memory::specs(),
        optimizer::specs(),
        sample::specs(),
    ]
    .concat()
}
