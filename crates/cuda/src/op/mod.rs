//! The ops on the device, one file per family: which kernels or library calls, with which sizes.

mod attention;
mod attention_cached;
mod collective;
mod elementwise;
mod embedding;
mod flash;
mod flash_wgmma;
mod fp8;
mod fp8_joined;
mod fp8_many;
mod gemv;
mod grouped;
mod grouped_fp8;
mod grouped_lora;
mod grouped_swiglu_bwd;
mod linear;
mod lora;
mod loss;
mod lower;
mod matmul;
mod memory;
mod muon;
mod norm;
mod norm_bwd;
mod norm_hopper;
mod optimizer;
mod preference;
mod qk_norm;
mod rope;
mod router;
mod routing;
pub(crate) mod sample;
mod swiglu;

pub(crate) use lower::{Lower, Partials};

use crate::device::Device;
use crate::gemm::Gemms;
use crate::kernels::{Spec, specs_of};
use crate::nccl::Nccl;
use crate::{Cache, Result};
use ironhorse_core::op::Op;
use std::sync::Arc;

/// The libraries ops call, opened at first use.
pub(crate) struct Libraries {
    pub cache: Cache,
    gemms: Option<Gemms>,
    /// Algorithms handed in, until matrix products are first needed.
    given: Vec<(String, String)>,
    /// cuDNN and its plans.
    pub attention: attention::CudnnLibrary,
    /// Tables of rotary embeddings.
    pub rope: rope::Tables,
    /// The other ranks, where there are any.
    pub nccl: Option<Arc<Nccl>>,
}

impl Libraries {
    pub fn new(cache: Cache) -> Self {
        Self {
            cache,
            gemms: None,
            given: Vec::new(),
            attention: attention::CudnnLibrary::default(),
            rope: rope::Tables::default(),
            nccl: None,
        }
    }

    /// Matrix products.
    pub fn gemms(&mut self, device: &'static Device) -> Result<&mut Gemms> {
        match &mut self.gemms {
            Some(gemms) => Ok(gemms),
            none => Ok(none.insert(Gemms::open(device, &self.cache, &std::mem::take(&mut self.given))?)),
        }
    }

    /// See [`Engine::choices`](ironhorse_core::Engine::choices): the algorithms of matrix products, and whether one fused
    /// product or two kernels were faster. Nothing else is timed or depends on free memory: cuDNN's plans are the first
    /// that its heuristics name for the shape, and our own kernels are chosen by shape and device.
    pub fn choices(&self) -> Vec<(String, String)> {
        self.gemms.as_ref().map_or_else(|| self.given.clone(), Gemms::choices)
    }

    /// See [`Engine::set_choices`](ironhorse_core::Engine::set_choices).
    pub fn set_choices(&mut self, choices: &[(String, String)]) {
        match &mut self.gemms {
            Some(gemms) => gemms.give(choices),
            None => {
                self.given = choices.to_vec();
                self.given.sort();
            }
        }
    }
}

/// Lowers one op.
pub(crate) fn lower(cx: &mut Lower<'_>, op: &Op) -> Result<()> {
    match op {
        Op::EmbeddingFwd(op) => embedding::embedding_fwd(cx, op),
        Op::EmbeddingBwd(op) => embedding::embedding_bwd(cx, op),
        Op::LayerNormFwd(op) => norm::layernorm_fwd(cx, op),
        Op::ResidualLayerNormFwd(_) | Op::ResidualRmsNormFwd(_) => norm::residual_norm_fwd(cx, op),
        Op::LayerNormApply(op) => norm::layernorm_apply(cx, op),
        Op::LayerNormBwd(_) | Op::RmsNormBwd(_) => norm_bwd::norm_bwd(cx, op),
        Op::ActFwd(op) => elementwise::act_fwd(cx, op),
        Op::ActBwd(op) => elementwise::act_bwd(cx, op),
        Op::Add(op) => elementwise::add(cx, op),
        Op::AttentionCached(op) => attention_cached::attention_cached(cx, op),
        Op::CrossEntropy(op) => loss::cross_entropy(cx, op),
        Op::CrossEntropyBwd(op) => loss::cross_entropy_bwd(cx, op),
        Op::Argmax(op) => loss::argmax(cx, op),
        Op::LossMean(op) => loss::loss_mean(cx, op),
        Op::Preference(op) => preference::preference(cx, op),
        Op::GradNorm(op) => optimizer::grad_norm(cx, op),
        Op::AdamW(op) => optimizer::adamw(cx, op),
        Op::MuonMomentum(op) => muon::muon_momentum(cx, op),
        Op::Matmul(op) => matmul::matmul(cx, op),
        Op::MuonUpdate(op) => muon::muon_update(cx, op),
        Op::Amax(op) => fp8::amax(cx, op),
        Op::Quantize(op) => fp8::quantize(cx, op),
        Op::ScaleUpdate(op) => fp8::scale_update(cx, op),
        Op::MatmulFp8(op) => fp8::matmul_fp8(cx, op),
        Op::GroupedFp8(op) => grouped_fp8::grouped_fp8(cx, op),
        Op::GroupedFp8BwdWeight(op) => grouped_fp8::grouped_fp8_bwd_weight(cx, op),
        Op::Fill(op) => memory::fill(cx, op),
        Op::CopySlot(op) => memory::copy(cx, op),
        Op::Exchange(op) => collective::exchange(cx, op),
        Op::TreeSum(op) => collective::tree_sum(cx, op),
        Op::AllGather(op) => collective::all_gather(cx, op),
        Op::LinearFwd(op) => linear::linear_fwd(cx, op),
        Op::LinearBwdInput(op) => linear::linear_bwd_input(cx, op),
        Op::LinearBwdWeight(op) => linear::linear_bwd_weight(cx, op),
        Op::LoraFwd(op) => lora::lora_fwd(cx, op),
        Op::LoraBwdHidden(op) => lora::lora_bwd_hidden(cx, op),
        Op::LoraBwdWeight(op) => lora::lora_bwd_weight(cx, op),
        Op::LoraBwdInput(op) => lora::lora_bwd_input(cx, op),
        Op::AttentionFwd(op) => attention::attention_fwd(cx, op),
        Op::AttentionBwd(op) => attention::attention_bwd(cx, op),
        Op::Dropout(op) => elementwise::dropout(cx, op),
        Op::AttentionDropoutFwd(op) => attention::attention_dropout_fwd(cx, op),
        Op::AttentionDropoutBwd(op) => attention::attention_dropout_bwd(cx, op),
        Op::RmsNormFwd(op) => norm::rmsnorm_fwd(cx, op),
        Op::RmsNormApply(op) => norm::rmsnorm_apply(cx, op),
        Op::SwigluFwd(op) => swiglu::swiglu_fwd(cx, op),
        Op::SwigluBwd(op) => swiglu::swiglu_bwd(cx, op),
        Op::QkNormFwd(op) => qk_norm::qk_norm_fwd(cx, op),
        Op::QkNormBwd(op) => qk_norm::qk_norm_bwd(cx, op),
        Op::Rope(op) => rope::rope(cx, op),
        Op::RouterFwd(op) => router::router_fwd(cx, op),
        Op::RouterBwd(op) => router::router_bwd(cx, op),
        Op::RouterLoad(op) => router::router_load(cx, op),
        Op::RouteSort(op) => routing::route_sort(cx, op),
        Op::Permute(op) => routing::permute(cx, op),
        Op::PermuteBwd(op) => routing::permute_bwd(cx, op),
        Op::Combine(op) => routing::combine(cx, op),
        Op::CombineBwd(op) => routing::combine_bwd(cx, op),
        Op::GroupedLinearFwd(op) => grouped::grouped_linear_fwd(cx, op),
        Op::GroupedLinearBwdInput(op) => grouped::grouped_linear_bwd_input(cx, op),
        Op::GroupedLinearBwdWeight(op) => grouped::grouped_linear_bwd_weight(cx, op),
        Op::GroupedLoraFwd(op) => grouped_lora::grouped_lora_fwd(cx, op),
        Op::GroupedLoraBwdHidden(op) => grouped_lora::grouped_lora_bwd_hidden(cx, op),
        Op::GroupedLoraBwdWeight(op) => grouped_lora::grouped_lora_bwd_weight(cx, op),
        Op::GroupedLoraBwdInput(op) => grouped_lora::grouped_lora_bwd_input(cx, op),
    }
}

/// Every specialisation the launchers ask for.
pub(crate) fn specs() -> Vec<Spec> {
    specs_of!(
        attention_cached collective elementwise embedding flash flash_wgmma fp8 fp8_many gemv grouped grouped_fp8 grouped_lora grouped_swiglu_bwd linear loss memory muon norm optimizer
        preference qk_norm rope router routing sample swiglu
    )
}
