//! safetensors files: eight bytes of header length, a JSON header, then the tensors without gaps.
//!
//! This is not the `safetensors` crate, because that needs the whole file in memory (or mapped, which is unsafe). This
//! reader streams, and it keeps the bytes of the header, so that a copy is byte-identical.

mod header;
mod json;
mod reader;
mod writer;

pub use header::{Dtype, Entry, Header, TensorInfo};
pub use reader::SafeTensors;
pub use writer::Writer;
