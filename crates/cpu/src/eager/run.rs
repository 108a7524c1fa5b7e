//! Every eager op on host memory.

use super::{attention, bias, elementwise, loss, norm, rope, softmax};
use crate::flat::{self, Span};
use crate::team::TaskPanic;
use ironhorse_core::eager::*;
use std::fmt;

/// Why an op on host memory failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// A task panicked, which is a bug in this crate.
    Panic(TaskPanic),
    /// The op does not exist in this form on the host.
    Unsupported(&'static str),
    /// A row of the logits has no distribution to sample from.
    Row {
        /// The index of the row.
        row: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl From<TaskPanic> for Failed {
    fn from(panic: TaskPanic) -> Self {
        Self::Panic(panic)
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panic(panic) => panic.fmt(f),
            Self::Unsupported(what) => f.write_str(what),
            Self::Row { row, why } => write!(f, "row {row} of `logits`: {why}"),
        }
    }
}

impl std::error::Error for Failed {}

/// An eager op that runs on host memory.
pub trait Run {
    /// Runs the op on all cores where it is large enough to gain from them, and returns when it is done. The bits of the
    /// result do not depend on the number of threads.
    ///
    /// # Safety
    /// The arrays have the lengths and types the op documents, are aligned to their elements, and overlap only as it
    /// documents; no other thread writes them, or reads what is written, during the call.
    ///
    /// # Errors
    /// See [`Failed`].
    unsafe fn run(&self) -> Result<(), Failed>;
}

/// # Safety
/// `array` holds `n` f32.
unsafe fn span(array: Array, n: usize) -> Span<f32> {
    // SAFETY: guaranteed by the caller.
    unsafe { Span::from_raw(array.at.cast(), n) }
}

macro_rules! run {
    ($($op:ty: $this:ident => $body:expr;)*) => { $(
        impl Run for $op {
            unsafe fn run(&self) -> Result<(), Failed> {
                let $this = self;
                // SAFETY: guaranteed by the caller of `run`.
                Ok(unsafe { $body }?)
            }
        }
    )* };
}

run! {
    Unary: o => elementwise::unary(o.op, o.x, o.y, o.n);
    UnaryBwd: o => elementwise::unary_bwd(o.op, [o.d_y, o.x], o.d_x, o.n);
    Binary: o => elementwise::binary(o.op, [o.a, o.b], o.y, o.n);
    SwigluBwd: o => elementwise::swiglu_bwd([o.d_y, o.gate, o.up], [o.d_gate, o.d_up], o.n);
    ScaleBiasRelu: o => bias::scale_bias_relu([o.x, o.bias], o.y, o.rows, o.scale);
    Softmax: o => softmax::softmax(o.x, o.y, o.rows);
    SoftmaxBwd: o => softmax::softmax_bwd([o.d_y, o.y], o.d_x, o.rows);
    RmsNorm: o => norm::rmsnorm([o.x, o.weight], [o.y, o.rstd], o.rows, o.eps);
    RmsNormBwd: o => norm::rmsnorm_bwd([o.d_y, o.x, o.weight, o.rstd], [o.d_x, o.d_weight], o.rows);
    LayerNorm: o => norm::layernorm([o.x, o.weight, o.bias], [o.y, o.mean, o.rstd], o.rows, o.eps);
    LayerNormBwd: o => norm::layernorm_bwd(
        [o.d_y, o.x, o.weight, o.mean, o.rstd], [o.d_x, o.d_weight, o.d_bias], o.rows);
    CrossEntropy: o => loss::cross_entropy(o.logits, o.targets, [o.losses, o.lse], o.rows, o.ignore);
    CrossEntropyMean: o => loss::cross_entropy_mean(
        o.losses, o.targets, [o.loss, o.inv_count], o.rows, o.ignore, o.mean);
    CrossEntropyBwd: o => loss::cross_entropy_bwd(
        [o.d_loss, o.logits, o.lse, o.inv_count], o.targets, o.d_logits, o.rows, o.ignore, o.per_row);
    Rope: o => rope::rope([o.x, o.cos, o.sin], o.y, &o.shape, o.back);
    Attention: o => attention::attention([o.q, o.k, o.v], [o.out, o.lse], &o.shape);
    AttentionBwd: o => super::attention_bwd::attention_bwd(
        [o.d_out, o.q, o.k, o.v, o.out, o.lse], [o.d_q, o.d_k, o.d_v], &o.shape);
    ResidualRmsNorm: o => {
        let n = o.rows.elements();
        let inputs = [span(o.x, n), span(o.residual, n), span(o.weight, o.rows.cols)];
        flat::rmsnorm_residual(inputs, span(o.y, n), span(o.sum, n), o.eps as f32)
    };
    SoftmaxTopk: o => {
        let (n, out) = (o.rows.elements(), o.rows.rows * o.k);
        flat::softmax_topk(span(o.x, n), span(o.weights, out), Span::from_raw(o.indices, out), o.rows.rows, o.k)
    };
    LogProbs: o => {
        let (n, rows) = (o.rows.elements(), o.rows.rows);
        let targets = Span::from_raw(o.targets.cast_mut(), rows);
        flat::cross_entropy_forward(span(o.logits, n), targets, span(o.loss, rows.min(1)), span(o.log_probs, n))
    };
    LogProbsBwd: o => {
        let (n, rows) = (o.rows.elements(), o.rows.rows);
        let targets = Span::from_raw(o.targets.cast_mut(), rows);
        flat::cross_entropy_backward(span(o.log_probs, n), targets, span(o.d_logits, n), o.scale as f32)
    };
    AuxLoss: o => {
        let chosen = Span::from_raw(o.chosen.cast_mut(), o.tokens * o.k);
        let router = flat::Router { probs: span(o.probs, o.tokens * o.experts), chosen, rows: o.tokens };
        let means = [span(o.fractions, o.experts), span(o.means, o.experts)];
        flat::aux_loss_forward(&router, span(o.loss, 1), means, o.alpha as f32)
    };
    RopeAngles: o => {
        let RopeShape { batch, seq, heads, head_dim, pairs } = o.shape;
        let n = batch * seq * heads * head_dim;
        let angles = Span::from_raw(o.angles.cast_mut(), (o.offset + seq) * head_dim / 2);
        let sizes = flat::Rope { batch, seq, heads, head_dim, offset: o.offset, pairs };
        flat::rope_forward(span(o.x, n), angles, span(o.y, n), &sizes)
    };
    RopeFreqs: o => flat::rope_freqs(
        Span::from_raw(o.freqs, o.positions * o.head_dim / 2), o.head_dim, o.base);
    Gemm: o => {
        let s = &o.shape;
        let [a, b, c] = [s.m * s.k, s.k * s.n, s.m * s.n].map(|n| s.batch * n);
        flat::gemm_batched(span(o.a, a), span(o.b, b), span(o.c, c), s.batch, &product(s))
    };
    AdamWStep: o => {
        let numbers = flat::AdamWStep {
            lr: o.lr, beta1: o.beta1, beta2: o.beta2, eps: o.eps, weight_decay: o.weight_decay, step: o.step,
        };
        let [param, m, v] = [o.param, o.m, o.v].map(|x| Span::from_raw(x, o.n));
        flat::adamw_step(param, Span::from_raw(o.grad.cast_mut(), o.n), m, v, &numbers)
    };
    ZeroGrad: o => flat::zero_grad(Span::from_raw(o.grad, o.n));
    GradClip: o => flat::grad_clip(Span::from_raw(o.grad, o.n), Span::from_raw(o.total_norm, 1), o.clip);
    Argmax: o => flat::argmax(span(o.logits, o.rows.elements()), Span::from_raw(o.out, o.rows.rows));
}

fn product(s: &GemmShape) -> flat::Product {
    let transposed = [s.transpose_a, s.transpose_b];
    flat::Product { m: s.m, n: s.n, k: s.k, alpha: s.alpha, beta: s.beta, transposed }
}

impl Run for GroupedGemm<'_> {
    unsafe fn run(&self) -> Result<(), Failed> {
        let end = |from: usize, len: usize| from + len;
        let mut ends = [0; 3];
        for part in self.parts {
            let s = &part.shape;
            let part = [end(part.a, s.m * s.k), end(part.b, s.k * s.n), end(part.c, s.m * s.n)];
            ends = std::array::from_fn(|i| part[i].max(ends[i]));
        }
        let part = |p: &GemmPart| flat::Part { product: product(&p.shape), from: [p.a, p.b, p.c] };
        let parts: Vec<_> = self.parts.iter().map(part).collect();
        // SAFETY: guaranteed by the caller of `run`; every part lies within the arrays.
        unsafe {
            let [a, b, c] =
                [(self.a, ends[0]), (self.b, ends[1]), (self.c, ends[2])].map(|(x, n)| span(x, n));
            Ok(flat::gemm_parts(a, b, c, &parts)?)
        }
    }
}

impl Run for ScaleBiasReluBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        match self.gate {
            Gate::Result(y) if !self.expanded => {
                // SAFETY: guaranteed by the caller of `run`.
                Ok(unsafe {
                    bias::scale_bias_relu_bwd([self.d_y, y], [self.d_x, self.d_bias], self.rows, self.scale)
                }?)
            }
            _ => Err(Failed::Unsupported(
                "fused_scale_bias_relu_bwd: on the host `d_y` must have every element, and the gate must be the result",
            )),
        }
    }
}

impl Run for ScatterAdd {
    unsafe fn run(&self) -> Result<(), Failed> {
        // SAFETY: guaranteed by the caller of `run`; every index is a row of the table.
        unsafe {
            let indices = Span::from_raw(self.indices.cast_mut(), self.n);
            let rows = indices.all().iter().max().map_or(0, |&i| i as usize + 1);
            let table = Span::from_raw(self.table, rows * self.width);
            let from = Span::from_raw(self.rows.cast_mut(), self.n * self.width);
            Ok(flat::scatter_add(from, indices, table, self.width)?)
        }
    }
}

impl Run for Sample {
    unsafe fn run(&self) -> Result<(), Failed> {
        let choice = flat::Choice { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p };
        // SAFETY: guaranteed by the caller of `run`.
        let refused = unsafe {
            let out = Span::from_raw(self.out, self.rows.rows);
            let seeds = Span::from_raw(self.seeds.cast_mut(), self.rows.rows);
            flat::choose(span(self.logits, self.rows.elements()), out, seeds, &choice)?
        };
        match refused {
            None => Ok(()),
            Some(flat::Refused { row, why }) => Err(Failed::Row { row, why }),
        }
    }
}
