//! Losses.

use super::{Array, Rows, Targets};

/// `losses = lse - logits[target]` of each row, `lse = log Σ exp(logits)`. Rows whose target is `ignore` have loss 0; a
/// target that is out of range gives NaN.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// rows · cols
    pub logits: Array,
    /// rows
    pub targets: Targets,
    /// rows, of type [`Float::acc`](super::Float::acc)
    pub losses: Array,
    /// rows, of type [`Float::acc`](super::Float::acc)
    pub lse: Array,
    /// The sizes.
    pub rows: Rows,
    /// The target of rows to ignore.
    pub ignore: i64,
}

/// The mean or the sum of the losses of all rows whose target is not `ignore`, and the factor of the sum.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyMean {
    /// rows
    pub losses: Array,
    /// rows
    pub targets: Targets,
    /// 1
    pub loss: Array,
    /// 1, optional
    pub inv_count: Array,
    /// The number of rows.
    pub rows: usize,
    /// The target of rows to ignore.
    pub ignore: i64,
    /// Whether to compute the mean instead of the sum.
    pub mean: bool,
}

/// The gradient of [`CrossEntropy`] and, without `per_row`, of [`CrossEntropyMean`] after it.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyBwd {
    /// rows with `per_row`, else 1
    pub d_loss: Array,
    /// rows · cols
    pub logits: Array,
    /// rows
    pub lse: Array,
    /// 1, not read with `per_row`
    pub inv_count: Array,
    /// rows
    pub targets: Targets,
    /// rows · cols
    pub d_logits: Array,
    /// The sizes.
    pub rows: Rows,
    /// The target of rows to ignore.
    pub ignore: i64,
    /// Whether `d_loss` has one element per row.
    pub per_row: bool,
}

/// `log_probs = log softmax(logits)` of each row, and the mean over rows of `-log_probs[target]`. `log_probs` may be
/// `logits`.
#[derive(Clone, Copy, Debug)]
pub struct LogProbs {
    /// rows · cols
    pub logits: Array,
    /// rows, each in 0..cols; others give NaN on a GPU
    pub targets: *const i32,
    /// 1
    pub loss: Array,
    /// rows · cols
    pub log_probs: Array,
    /// The sizes.
    pub rows: Rows,
}

/// `d_logits = (softmax - onehot(target)) · scale`, from the result of [`LogProbs`]. `d_logits` may be `log_probs`.
#[derive(Clone, Copy, Debug)]
pub struct LogProbsBwd {
    /// rows · cols
    pub log_probs: Array,
    /// rows
    pub targets: *const i32,
    /// rows · cols
    pub d_logits: Array,
    /// The sizes.
    pub rows: Rows,
    /// Factor of the gradient; 1 / rows for the mean.
    pub scale: f64,
}

/// The load-balancing loss of a router: `alpha · experts · Σ fraction · mean probability`. f32.
#[derive(Clone, Copy, Debug)]
pub struct AuxLoss {
    /// tokens · experts
    pub probs: Array,
    /// tokens · k
    pub chosen: *const i32,
    /// 1
    pub loss: Array,
    /// experts: the fraction of the tokens sent to each
    pub fractions: Array,
    /// experts: the mean probability of each
    pub means: Array,
    /// The number of tokens.
    pub tokens: usize,
    /// The number of experts.
    pub experts: usize,
    /// Experts chosen by each token.
    pub k: usize,
    /// Weight of the loss.
    pub alpha: f64,
}
