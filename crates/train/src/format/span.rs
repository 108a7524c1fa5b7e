//! Where tensors are in their files, for callers that map files into memory instead of reading tensors.

use std::path::PathBuf;

use super::safetensors::Dtype;

/// A tensor's bytes in a file: little-endian, row-major, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The tensor's name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; rows that pad the vocabulary of a `.bin` file are left out.
    pub shape: Vec<usize>,
    /// The file.
    pub file: PathBuf,
    /// The first byte, counted from the start of the file.
    pub offset: u64,
}
