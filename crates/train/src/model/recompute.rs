//! Activation checkpointing: what a training step recomputes.

use ironhorse_core::{DropRate, Place, Shard};
use serde::{Deserialize, Serialize};

/// What the backward computes again instead of keeping it from the forward. The bits of results do not change, on
/// engines that compute activations from the stored (rounded) product. Each level includes the ones before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keep everything.
    #[default]
    None,
    /// Recompute the activation of the MLP: saves 4C per token and layer of GPT-2, F per token and expert of a mixture.
    Gelu,
    /// Recompute both norms and, of a mixture, the rows permuted to the experts: saves 2C more, or C per token and expert.
    Full,
    /// Recompute everything inside the experts: saves 2F + C more per token and expert, for a third of their forward
    /// and backward. Of a model without experts the same as `Full`.
    Experts,
}

/// How a training step is made, besides what its model says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepOptions {
    /// What the backward computes again.
    pub recompute: Recompute,
    /// How often embeddings, attention probabilities and the results of attention and MLP are dropped; of GPT-2 only.
    pub dropout: DropRate,
    /// Whether sequences hold several documents, whose positions the input `positions` (B,T) gives: attention reaches
    /// nothing before a document's first token, and its positions count from 0.
    pub packed: bool,
    /// The β of direct preference optimisation, where the loss is that of pairs of documents: the inputs `pairs` (P,3) and
    /// `reference` (B,T) say which, and how likely they were before. See [`Preference`](ironhorse_core::op::Preference).
    pub preference: Option<f32>,
    /// How the gradients of micro-steps are added up; `None` adds them in place, one after the other, in one process.
    pub sums: Option<Sums>,
    /// Into how many parts the tokens are cut for the output head and the loss, forward and backward, so that the logits of one part
    /// only need memory; 0 and 1 are all tokens at once.
    pub head_chunks: usize,
}

/// How the gradients of micro-steps are added up: in the order of [`SumTree`](ironhorse_core::SumTree), whoever computes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Which of how many ranks the program is for.
    pub place: Place,
    /// What a rank keeps; everything if there is one.
    pub shard: Shard,
    /// Micro-steps of a step of all ranks, at most.
    pub accumulate: u32,
    /// Ranks of a machine, whose links are faster than those between machines; 0 or 1 where that is not known.
    pub machine: usize,
    /// Pieces ([`PIECE_ELEMENTS`](ironhorse_core::ranks::PIECE_ELEMENTS)) that are exchanged at a time; 0 for the usual number.
    pub bucket: usize,
}

/// What runs after a micro-step: ops of [`Section::Sum`](ironhorse_core::Section::Sum) by their origins, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct After {
    /// Beside the backward: what ranks exchange of gradients.
    pub beside: Vec<String>,
    /// Behind it.
    pub then: Vec<String>,
}

impl Sums {
    /// Whether there is anything to add up.
    pub fn is_needed(&self) -> bool {
        self.accumulate > 1 || !self.place.is_alone()
    }

    /// Whether a rank has a part of moments and master weights only.
    pub fn shards_state(&self) -> bool {
        !self.place.is_alone() && self.shard != Shard::None
    }
}

impl From<Recompute> for StepOptions {
    fn from(recompute: Recompute) -> Self {
        Self { recompute, ..Self::default() }
    }
}

impl Recompute {
    /// Whether norms are recomputed.
    pub(super) fn norms(self) -> bool {
        matches!(self, Self::Full | Self::Experts)
    }
}
