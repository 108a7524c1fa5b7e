//! Tokenizers: text to ids and back.
//!
//! ```text
//! mod.rs       Tokenizer: any of them            open.rs     by name, file or folder
//! bpe.rs       byte-level BPE                    named.rs    tiktoken's vocabularies
//! split.rs     text to words, by hand            classes.rs  Unicode's categories
//! merges.rs    words to tokens                   cache.rs    words seen lately
//! json.rs      tokenizer.json, vocab.json        ranks.rs    *.tiktoken; tokenizer.bin
//! foreign.rs   all others, by `tokenizers`       export.rs   tokenizer.json and tokenizer.bin out
//! train.rs     new vocabularies                  show.rs     a text token by token
//! spans.rs     where in a text each token is     gguf.rs     metadata of a GGUF file
//! ```

mod alphabet;
pub mod bpe;
mod cache;
mod classes;
mod export;
mod foreign;
mod gguf;
mod json;
mod merges;
mod named;
mod open;
mod ranks;
pub mod show;
mod spans;
mod special;
pub mod split;
pub mod train;

pub use gguf::{GgufTokenizer, Told, gguf_tokenizer};

use std::borrow::Cow;

use ironhorse_train::Error as TrainError;
use ironhorse_train::format::Sink;
use ironhorse_train::format::hf::TextTokens;
use ironhorse_train::format::tokenizer::{NamedFiles, TOKENIZER as BIN_NAME, Tokenizer as BinTokenizer};
use ironhorse_train::generate::codec::Codec;
use serde_json::Value;

use self::bpe::{Bpe, Encoder, Special};
use self::foreign::Foreign;
pub use self::special::SpecialTokens;
use self::split::{Cut, safe_cut};
use crate::{Error, Result};

/// The file of a tokenizer in a Hugging Face folder.
pub const JSON_NAME: &str = "tokenizer.json";
/// The file beside it that says which token is which.
pub const CONFIG_NAME: &str = "tokenizer_config.json";
/// The settings of generation beside it.
const GENERATION_NAME: &str = "generation_config.json";
/// The chat template beside it.
pub const TEMPLATE_NAME: &str = "chat_template.jinja";

/// A tokenizer of any kind.
pub struct Tokenizer {
    name: String,
    kind: Kind,
    eot: Option<u32>,
    /// SHA-256 of what it was read from.
    sha256: String,
    /// The files it was read from, to be kept beside weights.
    files: NamedFiles,
    /// What the `config.json` of the model says that it belongs to.
    model: TextTokens,
    begin: Begin,
}

/// How a text begins that a model continues.
#[derive(Clone, Copy)]
enum Begin {
    /// A text begins with the token between documents, as every document does in data that is prepared here.
    Separator,
    /// A text begins as in transformers, which `tokenizer_config.json` is for: with this token, or with none.
    With(Option<u32>),
}

enum Kind {
    /// 256 tokens, the bytes.
    Bytes,
    Bpe(Box<Bpe>),
    Foreign(Box<Foreign>),
    /// A `tokenizer.bin` that is not byte-level BPE: the longest token at each place.
    Longest(BinTokenizer),
}

impl Kind {
    fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(bpe) => bpe.added().iter().find(|added| added.content == token).map(|added| added.id),
            Self::Foreign(foreign) => foreign.id(token),
            Self::Bytes | Self::Longest(_) => None,
        }
    }
}

impl Tokenizer {
    /// The name or path it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it encodes, in a few words.
    pub fn method(&self) -> &'static str {
        match &self.kind {
            Kind::Bytes => "bytes",
            Kind::Bpe(_) => "byte-level BPE",
            Kind::Foreign(_) => "the tokenizers crate",
            Kind::Longest(_) => {
                "the longest token at each place, because its ids are not the ranks of merges"
            }
        }
    }

    /// What to tell about text that is encoded, if its ids are not certain to be those the model was trained with.
    pub fn warning(&self) -> Option<String> {
        matches!(self.kind, Kind::Longest(_)).then(|| {
            let why = "its ids are not the ranks of merges, so that BPE cannot be done";
            format!("{}: text is cut into the longest tokens from left to right; {why}", self.name)
        })
    }

    /// The number of ids; every id is less.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => 256,
            Kind::Bpe(bpe) => bpe.vocab_size(),
            Kind::Foreign(foreign) => foreign.vocab_size(),
            Kind::Longest(bin) => bin.vocab_size(),
        }
    }

    /// The token between documents.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// The tokenizer of a model, whose `config.json` says this.
    #[must_use]
    pub fn of_model(self, model: TextTokens) -> Self {
        Self { model, ..self }
    }

    /// The tokens at which generation stops: those that `generation_config.json` and `config.json` call ends, the one that
    /// `tokenizer_config.json` does, and the one between documents.
    pub fn ends(&self) -> Vec<u32> {
        let file =
            |name: &str| self.files.iter().find(|(file, _)| file == name).map(|(_, bytes)| bytes.as_slice());
        let json = |name: &str| serde_json::from_slice::<Value>(file(name)?).ok();
        let mut said: Vec<Value> = Vec::new();
        said.extend(json(GENERATION_NAME).and_then(|json| json.get("eos_token_id").cloned()));
        if let TextTokens::Said(config) = &self.model {
            said.extend(config.get("eos_token_id").cloned());
        }
        let ids =
            said.iter().flat_map(|value| value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]));
        let mut ends: Vec<u32> = ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        let named = json(CONFIG_NAME).and_then(|json| {
            let token = json.get("eos_token")?;
            self.id(token.as_str().or_else(|| token.get("content")?.as_str())?)
        });
        ends.extend(named.into_iter().chain(self.eot));
        ends.sort_unstable();
        ends.dedup();
        ends
    }

    /// The id of a special token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.kind.id(token)
    }

    /// The texts of the special tokens.
    pub fn markers(&self) -> Vec<&str> {
        match &self.kind {
            Kind::Bpe(bpe) => {
                bpe.added().iter().filter(|token| token.special).map(|token| token.content.as_str()).collect()
            }
            Kind::Foreign(foreign) => foreign.markers().iter().map(String::as_str).collect(),
            Kind::Bytes | Kind::Longest(_) => Vec::new(),
        }
    }

    /// Makes another token the one between documents.
    pub fn set_eot(&mut self, token: &str) -> Result<()> {
        let id = self
            .kind
            .id(token)
            .or_else(|| token.parse().ok().filter(|&id: &u32| (id as usize) < self.vocab_size()));
        let id = id.ok_or_else(|| {
            Error::tokenizer(&self.name, format!("has no special token `{token}`, expected one, or an id"))
        })?;
        self.eot = Some(id);
        Ok(())
    }

    /// SHA-256 of what it was read from, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Whether bytes that are not UTF-8 are kept as they are; other tokenizers see U+FFFD in their place.
    pub fn keeps_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes | Kind::Longest(_))
    }

    /// One thread's encoder for much text.
    pub fn encoder(&self) -> TextEncoder<'_> {
        TextEncoder(match &self.kind {
            Kind::Bpe(bpe) => EncoderKind::Bpe(Encoder::new(bpe)),
            other => EncoderKind::Other(other),
        })
    }

    /// The ids of a text; markers such as `<|endoftext|>` that are spelled out in it are ordinary text.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        self.encode_as(text, Special::Ordinary)
    }

    /// The ids of a text, with or without markers.
    pub fn encode_as(&self, text: &[u8], special: Special) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        match &self.kind {
            Kind::Bpe(bpe) => Encoder::once(bpe, special).encode(&String::from_utf8_lossy(text), &mut ids),
            Kind::Foreign(foreign) => {
                foreign.encode(&String::from_utf8_lossy(text), special == Special::Tokens, &mut ids)?;
            }
            other => {
                TextEncoder(EncoderKind::Other(other)).encode(text, &mut ids)?;
            }
        }
        Ok(ids)
    }

    /// The bytes that the ids stand for.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        match &self.kind {
            Kind::Bytes => Ok(BinTokenizer::bytes().decode(ids)?),
            Kind::Bpe(bpe) => bpe.decode(ids),
            Kind::Foreign(foreign) => foreign.decode(ids),
            Kind::Longest(bin) => Ok(bin.decode(ids)?),
        }
    }

    /// The last place in `text` at which a document may be cut such that the ids of its parts are those of the whole, if there
    /// is such a place. A tokenizer of which nothing is known has no such places.
    pub fn safe_cut(&self, text: &[u8]) -> Option<usize> {
        match &self.kind {
            Kind::Bytes => Some(text.len()),
            Kind::Bpe(bpe) => safe_cut(text, bpe.cut()),
            Kind::Foreign(_) | Kind::Longest(_) => None,
        }
    }

    /// A place to cut where there is no [`Tokenizer::safe_cut`]: before white space if there is any, else after a whole
    /// character. The ids next to it may differ from those of the whole.
    pub fn forced_cut(text: &[u8]) -> usize {
        safe_cut(text, Cut::BeforeSpace).unwrap_or_else(|| {
            let valid = text.utf8_chunks().last().map_or(0, |last| last.invalid().len());
            if valid < text.len() { text.len() - valid } else { text.len() }
        })
    }

    /// Puts another chat template beside the tokenizer, which replaces that of its settings.
    pub fn set_template(&mut self, source: &str) -> Result<()> {
        let mut files = self.files()?;
        files.retain(|(name, _)| name != TEMPLATE_NAME);
        files.push((TEMPLATE_NAME.to_owned(), source.as_bytes().to_vec()));
        self.files = files;
        Ok(())
    }

    /// The files to keep beside weights, names and contents: those it was read from, or the same vocabulary as
    /// `tokenizer.json` and, where it can be, as llm.c's `tokenizer.bin`.
    pub fn files(&self) -> Result<NamedFiles> {
        if !self.files.is_empty() {
            return Ok(self.files.clone());
        }
        let mut files = Vec::new();
        let bin = match &self.kind {
            Kind::Bytes => Some(Cow::Owned(BinTokenizer::bytes())),
            Kind::Longest(bin) => Some(Cow::Borrowed(bin)),
            Kind::Bpe(bpe) => {
                files.push((JSON_NAME.to_owned(), export::tokenizer_json(bpe).into_bytes()));
                export::tokenizer_bin(bpe, self.eot).map(Cow::Owned)
            }
            Kind::Foreign(_) => None,
        };
        if let Some(bin) = bin {
            let mut bytes = Vec::new();
            bin.write_to(&mut Sink::new(&mut bytes, BIN_NAME.as_ref()))?;
            files.push((BIN_NAME.to_owned(), bytes));
        }
        Ok(files)
    }
}

impl Codec for Tokenizer {
    fn vocab_size(&self) -> usize {
        Tokenizer::vocab_size(self)
    }

    fn eot(&self) -> Option<u32> {
        self.eot
    }

    fn encode(&self, text: &[u8]) -> Result<Vec<u32>, TrainError> {
        Tokenizer::encode(self, text).map_err(Error::into_train)
    }

    fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, TrainError> {
        Tokenizer::decode(self, ids).map_err(Error::into_train)
    }

    fn files(&self) -> Result<NamedFiles, TrainError> {
        Tokenizer::files(self).map_err(Error::into_train)
    }

    fn ends(&self) -> Vec<u32> {
        Tokenizer::ends(self)
    }

    fn prompt(&self, text: &str) -> Result<Vec<u32>, TrainError> {
        let (first, text) = match self.begin {
            Begin::Separator => (self.eot, Codec::encode(self, text.as_bytes())?),
            Begin::With(first) => {
                let ids = self.encode_as(text.as_bytes(), Special::Tokens).map_err(Error::into_train)?;
                let nothing = ids.is_empty(); // there must be something to continue
                (first.filter(|first| ids.first() != Some(first)).or(self.eot.filter(|_| nothing)), ids)
            }
        };
        Ok(first.into_iter().chain(text).collect())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} tokens, {})", self.name, self.vocab_size(), self.method())
    }
}

/// One thread's encoder.
pub struct TextEncoder<'a>(EncoderKind<'a>);

enum EncoderKind<'a> {
    Bpe(Encoder<'a>),
    Other(&'a Kind),
}

impl TextEncoder<'_> {
    /// Appends the ids of a text. Returns how many invalid sequences of UTF-8 were replaced by U+FFFD.
    pub fn encode(&mut self, text: &[u8], out: &mut Vec<u32>) -> Result<u64> {
        match &mut self.0 {
            EncoderKind::Bpe(encoder) => {
                let (text, replaced) = valid(text);
                encoder.encode(&text, out);
                Ok(replaced)
            }
            EncoderKind::Other(Kind::Foreign(foreign)) => {
                let (text, replaced) = valid(text);
                foreign.encode(&text, false, out)?;
                Ok(replaced)
            }
            EncoderKind::Other(Kind::Longest(bin)) => {
                out.extend(bin.encode(text)?);
                Ok(0)
            }
            EncoderKind::Other(_) => {
                out.extend(text.iter().map(|&byte| u32::from(byte)));
                Ok(0)
            }
        }
    }
}

/// The text with U+FFFD in place of what is not UTF-8, and how often.
fn valid(text: &[u8]) -> (Cow<'_, str>, u64) {
    if let Ok(text) = std::str::from_utf8(text) {
        return (text.into(), 0);
    }
    let broken = text.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count();
    (String::from_utf8_lossy(text), broken as u64)
}

#[cfg(test)]
mod tests;
