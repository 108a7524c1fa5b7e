//! One row of a parameter table.

use ironhorse_core::Shape;

/// One row of the parameter table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name; of GPT-2 without `transformer.`: `h.3.mlp.c_fc.weight`.
    pub name: String,
    /// Weights are (out, in).
    pub shape: Shape,
    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub decay: bool,
}

impl TensorSpec {
    pub(super) fn new<const N: usize>(name: impl Into<String>, dims: [usize; N]) -> Self {
        Self { name: name.into(), shape: Shape::new(dims), decay: N == 2 }
    }
}
