//! Every eager op on a stream of a GPU.

use super::gpu::At;
use super::{
    attention, choose, elementwise, gemm, loss, norm, norm_bwd, optimizer, rope, route, scale_bias_relu,
    scatter, softmax,
};
use crate::Result;
use ironhorse_core::eager::*;

/// An eager op that runs on a GPU.
pub trait Launch {
    /// Puts the op on the stream of `at` and returns without waiting for it.
    ///
    /// # Safety
    /// The arrays are memory of the device of `at`, have the lengths and types the op documents, overlap only as it
    /// documents, and stay valid until the stream has passed the op.
    ///
    /// # Errors
    /// A size the kernels cannot handle, not enough memory, or a launch that failed.
    unsafe fn launch(&self, at: &At<'_>) -> Result<()>;
}

macro_rules! launch {
    ($($op:ty: $o:ident, $at:ident => $body:expr;)*) => { $(
        impl Launch for $op {
            unsafe fn launch(&self, $at: &At<'_>) -> Result<()> {
                let $o = self;
                // SAFETY: guaranteed by the caller of `launch`.
                unsafe { $body }
            }
        }
    )* };
}

launch! {
    Unary: o, at => elementwise::unary(at, o.op, o.x, o.y, o.n);
    UnaryBwd: o, at => elementwise::unary_bwd(at, o.op, [o.d_y, o.x], o.d_x, o.n);
    Binary: o, at => elementwise::binary(at, o.op, [o.a, o.b], o.y, o.n);
    SwigluBwd: o, at => elementwise::swiglu_bwd(at, [o.d_y, o.gate, o.up], [o.d_gate, o.d_up], o.n);
    ScaleBiasRelu: o, at => scale_bias_relu::scale_bias_relu(at, [o.x, o.bias], (o.y, o.gate), o.rows, o.scale);
    ScaleBiasReluBwd: o, at => scale_bias_relu::scale_bias_relu_bwd(
        at, (o.d_y, o.expanded), o.gate, [o.d_x, o.d_bias], o.rows, o.scale);
    Softmax: o, at => softmax::softmax(at, o.x, o.y, o.rows);
    SoftmaxBwd: o, at => softmax::softmax_bwd(at, [o.d_y, o.y], o.d_x, o.rows);
    SoftmaxTopk: o, at => route::softmax_topk(at, o.x, o.weights, o.indices, o.rows, o.k);
    RmsNorm: o, at => norm::rmsnorm(at, [o.x, o.weight], [o.y, o.rstd], o.rows, o.eps);
    ResidualRmsNorm: o, at => norm::rmsnorm_residual(at, [o.x, o.residual, o.weight], [o.y, o.sum], o.rows, o.eps);
    RmsNormBwd: o, at => norm_bwd::rmsnorm_bwd(
        at, [o.d_y, o.x, o.weight, o.rstd], [o.d_x, o.d_weight], o.rows);
    LayerNorm: o, at => norm::layernorm(at, [o.x, o.weight, o.bias], [o.y, o.mean, o.rstd], o.rows, o.eps);
    LayerNormBwd: o, at => norm_bwd::layernorm_bwd(
        at, [o.d_y, o.x, o.weight, o.mean, o.rstd], [o.d_x, o.d_weight, o.d_bias], o.rows);
    CrossEntropy: o, at => loss::cross_entropy(at, o.logits, o.targets, [o.losses, o.lse], o.rows, o.ignore);
    CrossEntropyMean: o, at => loss::cross_entropy_mean(
        at, o.losses, o.targets, [o.loss, o.inv_count], o.rows, o.ignore, o.mean);
    CrossEntropyBwd: o, at => loss::cross_entropy_bwd(
        at, [o.d_loss, o.logits, o.lse, o.inv_count], o.targets, o.d_logits, o.rows, o.ignore, o.per_row);
    LogProbs: o, at => loss::cross_entropy_log_probs(at, o.logits, o.targets, [o.loss, o.log_probs], o.rows);
    LogProbsBwd: o, at => loss::cross_entropy_log_probs_bwd(
        at, o.log_probs, o.targets, o.d_logits, o.rows, o.scale);
    AuxLoss: o, at => {
        let router = route::Router { probs: o.probs, chosen: o.chosen, rows: o.tokens, experts: o.experts, k: o.k };
        route::aux_loss(at, &router, o.loss, [o.fractions, o.means], o.alpha)
    };
    Rope: o, at => rope::rope(at, [o.x, o.cos, o.sin], o.y, &o.shape, o.back);
    RopeAngles: o, at => rope::rope_angles(at, &[(o.x, o.y, o.shape.heads)], o.angles, o.offset, &o.shape);
    RopeFreqs: o, at => rope::rope_freqs(at, o.freqs, o.positions, o.head_dim, o.base);
    Attention: o, at => attention::attention(at, [o.q, o.k, o.v], [o.out, o.lse], &o.shape);
    AttentionBwd: o, at => attention::attention_bwd(
        at, [o.d_out, o.q, o.k, o.v, o.out, o.lse], [o.d_q, o.d_k, o.d_v], &o.shape);
    Gemm: o, at => gemm::gemm(at, [o.a, o.b], o.c, &shape(&o.shape));
    AdamWStep: o, at => {
        let numbers = optimizer::AdamWStep {
            lr: o.lr, beta1: o.beta1, beta2: o.beta2, eps: o.eps, weight_decay: o.weight_decay, step: o.step,
        };
        optimizer::adamw_step(at, [o.param, o.m, o.v], o.grad, o.n, &numbers)
    };
    ZeroGrad: o, at => at.zero(o.grad.cast(), o.n * size_of::<f32>());
    GradClip: o, at => optimizer::grad_clip(at, o.grad, o.total_norm, o.clip, o.n);
    ScatterAdd: o, at => scatter::scatter_add(at, (o.rows, o.indices), o.table, [o.n, o.width], o.table_rows);
    Argmax: o, at => choose::argmax(at, o.logits, o.out, o.rows);
    Sample: o, at => {
        let choice = choose::Choice { temperature: o.temperature, top_k: o.top_k, top_p: o.top_p };
        choose::choose(at, o.logits, o.seeds, o.out, o.rows, &choice)
    };
}

fn shape(s: &GemmShape) -> gemm::Gemm {
    let transposed = [s.transpose_a, s.transpose_b];
    gemm::Gemm { batch: s.batch, m: s.m, n: s.n, k: s.k, alpha: s.alpha, beta: s.beta, transposed }
}

impl Launch for GroupedGemm<'_> {
    unsafe fn launch(&self, at: &At<'_>) -> Result<()> {
        let from =
            |x: Array, elements: usize| Array { at: x.at.wrapping_byte_add(elements * x.float.size()), ..x };
        self.parts.iter().try_for_each(|part| {
            let (a, b, c) = (from(self.a, part.a), from(self.b, part.b), from(self.c, part.c));
            // SAFETY: guaranteed by the caller of `launch`; every part lies within the arrays.
            unsafe { gemm::gemm(at, [a, b], c, &shape(&part.shape)) }
        })
    }
}
