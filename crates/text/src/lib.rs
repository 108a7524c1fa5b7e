//! Text in, token shards out.
//!
//! ```text
//! tokenizer/   vocabularies by name and from files, byte-level BPE of our own, training of new ones
//! read/        documents out of .txt .md .jsonl .parquet, plain, .gz or .zst, standard input, folders, patterns
//! chat/        conversations through chat templates to samples
//! prepare/     documents to shards: in order, on all cores, resumable, with a manifest
//! ```
#![forbid(unsafe_code)]

pub mod chat;
mod contained;
mod error;
#[doc(hidden)]
pub mod exercise;
pub mod prepare;
pub mod read;
pub mod tokenizer;

pub use error::{Error, Result};
