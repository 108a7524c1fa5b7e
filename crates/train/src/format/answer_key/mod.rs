//! Answer keys `*.key.safetensors`: what PyTorch computed for one batch, every activation and gradient of it.

mod meta;
mod reader;
mod writer;

pub use meta::{FORMAT, KeyMeta, KeyOptimizer};
pub use reader::AnswerKey;
pub use writer::{AnswerKeySpec, write_answer_key};

#[cfg(test)]
mod tests;
