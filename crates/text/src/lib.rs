//! Text in, token shards out.
//!
//! ```text
//! tokenizer/   vocabularies by name and from files, byte-level BPE of our own, training of new ones
//! read/        documents out of .txt .md .jsonl .parquet, plain, .gz or .zst, standard input, folders, patterns
//! prepare/     documents to shards: in order, on all cores, resumable, with a manifest
//! ```
#![forbid(unsafe_code)]

mod contained;
mod error;
#[doc(hidden)]
pub mod exercise;
pub mod prepare;
pub mod read;
pub mod tokenizer;

pub use error::{Error, Result};
