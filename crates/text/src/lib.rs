//! Text in, token shards out.
//!
//! ```text
//! tokenizer/   vocabularies by name and from files, byte-level BPE of our own, training of new ones
//! ```
#![forbid(unsafe_code)]

mod error;
pub mod tokenizer;

pub use error::{Error, Result};
