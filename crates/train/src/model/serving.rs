//! What one step of serving computes.

/// The shape of a program that continues several sequences at once. Programs of one cache have the same `sequences`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingStep {
    /// New tokens, of any sequences and at any positions; those at position -1 are not used.
    pub tokens: usize,
    /// Sequences that the cache has room for.
    pub sequences: usize,
    /// Positions of the cache [default: the model's context].
    pub context: Option<usize>,
    /// Logits of so many of the tokens only; of all without it.
    pub picks: Option<usize>,
}
