//! File formats. Readers work over any `Read + Seek`, check everything a header says before they allocate, and stream:
//! reading a model needs the memory of its largest tensor. Writers are atomic.

pub mod atomic;
pub mod debug_state;
mod elem;
mod header;
pub mod llmc_model;
pub mod safetensors;
pub mod shards;
mod sink;
mod source;
mod stacked;
pub mod tokenizer;

pub use elem::Elem;
pub use header::BinHeader;
pub use sink::Sink;
pub use source::Source;
