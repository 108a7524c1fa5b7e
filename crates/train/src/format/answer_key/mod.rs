//! Answer keys `*.key.safetensors`: what PyTorch computed for one batch, every activation and gradient of it.

mod meta;
mod reader;
mod writer;

pub use meta::{FORMAT, KeyMeta, KeyOptimizer};
pub use reader::AnswerKey;
pub use writer::{AnswerKeySpec, write_answer_key};

use crate::model::{Gpt2Config, TensorSpec};

/// The shape of a parameter in a key: the token table has V rows, without padding.
fn key_shape(config: &Gpt2Config, spec: &TensorSpec) -> Vec<usize> {
    let mut dims = spec.shape.dims().to_vec();
    if spec.name == "wte.weight" {
        dims[0] = config.vocab_size;
    }
    dims
}

#[cfg(test)]
mod tests;
