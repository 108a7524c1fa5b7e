//! safetensors files: eight bytes of header length, a JSON header, then the tensors without gaps.
//!
//! Our own reader and writer rather than the crate of the name: it streams where the crate wants the file in memory
//! (or mapped, which is unsafe), and it keeps the header's bytes, so that a copy is byte-identical.

mod header;
mod parse;
mod reader;
mod writer;

pub use header::{Dtype, Entry, Header, TensorInfo};
pub use reader::SafeTensors;
pub use writer::Writer;
