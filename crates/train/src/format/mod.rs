//! File formats. Readers work on any `Read + Seek`, validate a header before they allocate, and stream: reading a model
//! needs only the memory of its largest tensor. Writers are atomic.

pub mod answer_key;
pub mod atomic;
pub mod black_box;
pub mod checkpoint;
pub mod debug_state;
pub mod disk;
mod elem;
pub mod gguf;
mod header;
pub mod hf;
mod json;
pub mod llmc_model;
pub mod multiple_choice;
pub mod peft;
pub mod safetensors;
pub mod shards;
mod sink;
mod sniff;
mod source;
mod span;
mod stacked;
pub mod tokenizer;
mod weights;

pub use elem::Elem;
pub use header::BinHeader;
pub use json::parse_json;
pub use sink::Sink;
pub use sniff::{Kind, sniff};
pub use source::Source;
pub use span::Span;
pub use weights::{AdaptedFrom, ModelChoice, WeightSource, open_weights};

#[cfg(test)]
mod tests;
