//! Documents out of files: readers cut inputs into numbered units in order, which any thread can turn into documents.
//!
//! ```text
//! mod.rs      settings, units          inputs.rs   names, folders and patterns to files
//! raw.rs      bytes of a file, unpacked and hashed
//! text.rs     .txt, .md                lines.rs    .jsonl
//! rows.rs     .parquet                 units.rs    the units of all inputs, one after the other
//! ```

mod inputs;
mod lines;
mod raw;
mod rows;
mod text;
mod units;

pub use inputs::{Format, Input, Packing, is_data_name, resolve};
pub(crate) use lines::{Line, numbered, parse as parse_line};
pub(crate) use rows::{Rows, hash_file};
pub use units::{Units, documents};

use sha2::{Digest, Sha256};

/// How inputs are read.
#[derive(Clone, Debug)]
pub struct ReadSettings {
    /// The field of JSON lines or the column of parquet files that has the text; `a.b` is the field b of the field a.
    pub field: String,
    /// Leave out invalid records, and files that are not text, instead of failing; they are counted.
    pub skip_bad: bool,
    /// What stands between the documents of a text file; without it a file is one document.
    pub delimiter: Option<String>,
    /// The part at the end of every text file that is for validation; the rest is for training.
    pub val_tail: Option<f64>,
    /// The least bytes of a unit, and the most bytes of a part of a document if it can be cut.
    pub unit_bytes: usize,
    /// A text file of more bytes is read twice, once for its hash, and encoded in parts.
    pub large_bytes: usize,
}

impl Default for ReadSettings {
    fn default() -> Self {
        Self {
            field: "text".into(),
            skip_bad: false,
            delimiter: None,
            val_tail: None,
            unit_bytes: 1 << 20,
            large_bytes: 8 << 20,
        }
    }
}

/// The identity of a document: the first 128 bits of the SHA-256 of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DocumentHash(pub u128);

impl DocumentHash {
    /// The hash of a document.
    pub fn of(bytes: &[u8]) -> Self {
        Self::finish(Sha256::new_with_prefix(bytes))
    }

    pub(crate) fn finish(hash: Sha256) -> Self {
        let digest = hash.finalize();
        Self(digest.first_chunk().map_or(0, |bytes| u128::from_be_bytes(*bytes)))
    }

    /// A number in [0, 1) that decides about training or validation.
    pub fn fraction(self) -> f64 {
        ((self.0 >> 75) as f64) / (1u64 << 53) as f64
    }
}

/// What a document is for, if that is not left to its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// Training.
    Train,
    /// Validation.
    Val,
}

/// A whole document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Its bytes, as they are in the file.
    pub bytes: Vec<u8>,
    /// What it is for, if that is not left to its hash.
    pub purpose: Option<Use>,
}

/// A part of a document that is too large for one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentPart {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether it is the first part.
    pub first: bool,
    /// The hash of the whole document.
    pub hash: DocumentHash,
    /// What the document is for, if that is not left to its hash.
    pub purpose: Option<Use>,
    /// Whether it was cut where the ids may differ from those of the whole, for want of a better place.
    pub forced: bool,
}

/// What a unit holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Whole lines of JSON.
    Lines {
        /// The number of the first, from 1.
        first: u64,
        /// The lines.
        bytes: Vec<u8>,
    },
    /// Whole documents.
    Documents(Vec<Document>),
    /// A part of one.
    Part(DocumentPart),
    /// A file that is left out, because it is not text.
    NotText,
}

/// A piece of work. Where units begin and end depends on the inputs and the settings only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Which input.
    pub input: usize,
    /// Which unit of that input, from 0.
    pub number: u64,
    /// What it holds.
    pub content: Content,
    /// CRC-32 of all contents of this input up to here, to see that an input is the same when a run goes on.
    pub crc: u32,
    /// Bytes of the file that were read up to here.
    pub read: u64,
    /// Rows without text: null in a parquet file.
    pub missing: u64,
    /// The file's size and SHA-256, with its last unit.
    pub end: Option<InputEnd>,
}

/// What is known once an input was read to its end.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InputEnd {
    /// Its bytes, as they are in the file.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: String,
}

#[cfg(test)]
mod tests;
