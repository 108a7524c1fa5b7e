//! One row of a parameter table.

use ironhorse_core::{Optimizer, Pool, Shape};

/// One row of the parameter table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name; of GPT-2 without `transformer.`: `h.3.mlp.c_fc.weight`.
    pub name: String,
    /// Weights are (out, in).
    pub shape: Shape,
    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub decay: bool,
    /// How many matrices Muon finds in it, each of which it orthogonalises by itself: 3 where q, k and v are one tensor,
    /// 1 for the other matrices of a block; 0 for what AdamW updates in any case: embeddings, the head, routers, norms and
    /// biases.
    pub matrices: usize,
}

impl TensorSpec {
    pub(crate) fn new<const N: usize>(name: impl Into<String>, dims: [usize; N]) -> Self {
        Self { name: name.into(), shape: Shape::new(dims), decay: N == 2, matrices: 0 }
    }

    /// This many stacked matrices of a block, which Muon may update.
    pub(super) fn matrices(self, matrices: usize) -> Self {
        Self { matrices, ..self }
    }

    /// How many matrices Muon updates in it with this optimizer; 0 if AdamW updates it.
    pub fn muon(&self, optimizer: Optimizer) -> usize {
        if optimizer == Optimizer::Muon { self.matrices } else { 0 }
    }

    /// Whether a pool of the training state has room for it: Muon keeps no second moments.
    pub fn is_in(&self, pool: Pool, optimizer: Optimizer) -> bool {
        pool != Pool::Moment2 || self.muon(optimizer) == 0
    }
}
