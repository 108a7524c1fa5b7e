//! GGUF, version 3: the one file that llama.cpp loads, with sizes, tokenizer and chat template beside the weights. Written, not
//! read.
//!
//! ```text
//! header.rs    metadata, the table of tensors, alignment      numbers.rs   f32, f16, bf16 and blocks of q8_0
//! sizes.rs     a model's sizes as metadata                    tensors.rs   which parameters make up a tensor
//! writer.rs    a file, one parameter at a time
//! ```

mod header;
mod numbers;
mod sizes;
mod tensors;
mod writer;

pub(super) use header::MAGIC;
pub use header::Value;
pub use numbers::GgufType;
pub use sizes::note;
pub use writer::{GgufOptions, write_gguf};

#[cfg(test)]
mod tests;
