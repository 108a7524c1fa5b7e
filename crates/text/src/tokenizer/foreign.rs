//! Tokenizers that are not byte-level BPE: what the crate `tokenizers` does with their `tokenizer.json`.

use tokenizers::Tokenizer as Inner;

use super::spans::Spanned;
use crate::contained::contained;
use crate::{Error, Result};

const DAMAGED: &str = "its tokenizer.json is damaged";

/// Any `tokenizer.json`.
#[derive(Clone)]
pub struct Foreign {
    /// Encodes markers in the text as ordinary text.
    ordinary: Inner,
    /// Finds them.
    marked: Inner,
    name: String,
    vocab_size: usize,
    markers: Vec<String>,
}

impl Foreign {
    /// Reads a `tokenizer.json`; `name` is for errors.
    pub fn read(json: &[u8], name: &str) -> Result<Self> {
        let refuse =
            |why: &str| Error::tokenizer(name, format!("cannot be read: {why}; expected a tokenizer.json"));
        let read = contained(|| Inner::from_bytes(json)).ok_or_else(|| refuse("it is damaged"))?;
        let marked = read.map_err(|error| refuse(&error.to_string()))?;
        let mut ordinary = marked.clone();
        ordinary.set_encode_special_tokens(true);
        let vocab_size = marked.get_vocab(true).into_values().max().map_or(0, |most| most as usize + 1);
        let added = marked.get_added_tokens_decoder().into_values();
        let markers = added.filter(|token| token.special).map(|token| token.content).collect();
        Ok(Self { ordinary, marked, name: name.to_owned(), vocab_size, markers })
    }

    /// The number of ids.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.marked.token_to_id(token)
    }

    /// Appends the ids of a text, without markers before and after it.
    pub fn encode(&self, text: &str, marked: bool, out: &mut Vec<u32>) -> Result<()> {
        let inner = if marked { &self.marked } else { &self.ordinary };
        let refuse = |why: &str| Error::tokenizer(&self.name, format!("cannot encode: {why}"));
        let encoded = contained(|| inner.encode_fast(text, false)).ok_or_else(|| refuse(DAMAGED))?;
        let encoded = encoded.map_err(|error| refuse(&error.to_string()))?;
        out.extend_from_slice(encoded.get_ids());
        Ok(())
    }

    /// The texts of the special tokens.
    pub fn markers(&self) -> &[String] {
        &self.markers
    }

    /// The ids of a text with its markers, and where each is.
    pub fn encode_spans(&self, text: &str) -> Result<Vec<Spanned>> {
        let refuse = |why: &str| Error::tokenizer(&self.name, format!("cannot encode: {why}"));
        let encoded = contained(|| self.marked.encode(text, false)).ok_or_else(|| refuse(DAMAGED))?;
        let encoded = encoded.map_err(|error| refuse(&error.to_string()))?;
        let spans = encoded.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoded.get_ids().iter().copied().zip(spans).collect())
    }

    /// The text that the ids stand for, markers included.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let refuse = |why: &str| Error::tokenizer(&self.name, format!("cannot decode: {why}"));
        let text = contained(|| self.marked.decode(ids, false)).ok_or_else(|| refuse(DAMAGED))?;
        text.map(String::into_bytes).map_err(|error| refuse(&error.to_string()))
    }
}
