//! Answer keys `*.key.safetensors`: every activation and gradient that PyTorch computed for one batch.

mod meta;
mod reader;
mod writer;

pub use meta::{FORMAT, KeyMeta, KeyOptimizer};
pub use reader::AnswerKey;
pub use writer::{AnswerKeySpec, write_answer_key};

#[cfg(test)]
mod tests;
