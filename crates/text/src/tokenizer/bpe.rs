//! Byte-level BPE: text is split into words, the bytes of a word are merged into tokens.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::cache::{Cache, LONGEST};
use super::merges::{Merges, merge};
use super::split::{Cut, Pattern};
use crate::{Error, Result};

/// A token that is not made by merges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    /// Its text.
    pub content: String,
    /// Its id.
    pub id: u32,
    /// Whether it is a marker, which ordinary text does not contain. Other added tokens are found in any text.
    pub special: bool,
}

/// A byte-level BPE vocabulary with the merges and the split pattern.
#[derive(Clone, Debug)]
pub struct Bpe {
    /// The bytes of every token; empty for ids that stand for nothing.
    tokens: Vec<Vec<u8>>,
    bytes: [u32; 256],
    merges: Merges,
    /// Words that are tokens, where a whole word that is a token is never split.
    whole: Option<HashMap<Box<[u8]>, u32>>,
    pattern: Pattern,
    /// Whether text is normalised to NFC first.
    nfc: bool,
    added: Vec<Added>,
}

/// What a [`Bpe`] is made of.
pub struct BpeParts {
    /// The bytes of every token; empty for ids that stand for nothing.
    pub tokens: Vec<Vec<u8>>,
    /// How the merges are known.
    pub merges: Source,
    /// How text is split.
    pub pattern: Pattern,
    /// Whether text is normalised to NFC first.
    pub nfc: bool,
    /// Tokens that are not made by merges.
    pub added: Vec<Added>,
}

/// How merges are known.
pub enum Source {
    /// A list in order: left, right and result.
    List {
        /// The merges.
        merges: Vec<(u32, u32, u32)>,
        /// Whether a word that is a token is that token, whatever its merges are.
        whole: bool,
    },
    /// The ids are the ranks, as in tiktoken.
    Ids,
}

impl Bpe {
    /// Builds the tables; an error if one of the 256 bytes is not a token.
    pub fn new(parts: BpeParts) -> Result<Self, String> {
        let BpeParts { mut tokens, merges, pattern, nfc, mut added } = parts;
        added.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then(a.id.cmp(&b.id)));
        // ids that merges do not make
        let mut beyond: Vec<bool> = tokens.iter().map(Vec::is_empty).collect();
        for token in &added {
            if let Some(is) = beyond.get_mut(token.id as usize) {
                *is = true;
            }
        }
        let mut ids: HashMap<&[u8], u32> = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(&tokens).filter(|(id, _)| !beyond[*id as usize]) {
            ids.entry(token.as_slice()).or_insert(id);
        }
        let mut bytes = [0; 256];
        for (byte, of) in (0..=u8::MAX).zip(&mut bytes) {
            *of = *ids.get([byte].as_slice()).ok_or(format!("byte {byte:#04x} is not a token"))?;
        }
        let (merges, all) = match &merges {
            Source::List { merges, whole } => (Merges::in_order(merges), *whole),
            Source::Ids => (Merges::of_ranks(&tokens, &ids), true),
        };
        let whole = all.then(|| ids.iter().map(|(&token, &id)| (token.into(), id)).collect());
        for token in &added {
            let id = token.id as usize;
            if id >= tokens.len() {
                tokens.resize(id + 1, Vec::new());
            }
            tokens[id] = token.content.clone().into_bytes();
        }
        Ok(Self { tokens, bytes, merges, whole, pattern, nfc, added })
    }

    /// The number of ids.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// The bytes of every token; empty for ids that stand for nothing.
    pub fn tokens(&self) -> &[Vec<u8>] {
        &self.tokens
    }

    /// The tokens that are not made by merges, the longest first.
    pub fn added(&self) -> &[Added] {
        &self.added
    }

    /// How text is split.
    pub fn pattern(&self) -> Pattern {
        self.pattern
    }

    /// The merges.
    pub(super) fn merges(&self) -> &Merges {
        &self.merges
    }

    /// The token of a byte.
    pub(super) fn byte(&self, byte: u8) -> u32 {
        self.bytes[usize::from(byte)]
    }

    /// Whether text is normalised to NFC first.
    pub(super) fn normalises(&self) -> bool {
        self.nfc
    }

    /// The kind of place at which a long text may be cut for encoding.
    pub fn cut(&self) -> Cut {
        let plain = !self.nfc && self.added.iter().all(|token| token.special);
        if plain { Cut::AfterLetter } else { Cut::BeforeSpace }
    }

    /// The bytes that the ids stand for.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for &id in ids {
            let Some(token) = self.tokens.get(id as usize) else {
                let most = self.tokens.len().saturating_sub(1);
                return Err(Error::Setting(format!("token is {id}, expected 0 to {most}")));
            };
            bytes.extend_from_slice(token);
        }
        Ok(bytes)
    }
}

/// Which added tokens are looked for in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// Markers such as `<|endoftext|>` that are spelled out in the text are ordinary text.
    Ordinary,
    /// Markers that are spelled out in the text are tokens.
    Tokens,
}

/// One thread's encoder: the vocabulary and the words that were encoded lately.
pub struct Encoder<'a> {
    bpe: &'a Bpe,
    cache: Option<Cache>,
    special: Special,
}

impl<'a> Encoder<'a> {
    /// An encoder for much text.
    pub fn new(bpe: &'a Bpe) -> Self {
        Self { bpe, cache: Some(Cache::new()), special: Special::Ordinary }
    }

    /// An encoder for one short text: without a cache, whose memory would cost more than it saves.
    pub fn once(bpe: &'a Bpe, special: Special) -> Self {
        Self { bpe, cache: None, special }
    }

    /// Appends the ids of a text.
    pub fn encode(&mut self, text: &str, out: &mut Vec<u32>) {
        self.pieces(text, |encoder, piece, token| match token {
            Some(id) => out.push(id),
            None => encoder.ordinary(&text[piece], out),
        });
    }

    /// The added tokens of a text and what is between them, in order: where each is, and the id of a token.
    pub(super) fn pieces(&mut self, text: &str, mut take: impl FnMut(&mut Self, Range<usize>, Option<u32>)) {
        let wanted = |token: &&Added| !token.special || self.special == Special::Tokens;
        let added: Vec<&Added> = self.bpe.added.iter().filter(wanted).collect();
        let mut start = 0;
        while let Some((at, token)) = first_of(&text[start..], &added) {
            let (from, end) = (start + at, start + at + token.content.len());
            take(self, start..from, None);
            take(self, from..end, Some(token.id));
            start = end;
        }
        take(self, start..text.len(), None);
    }

    /// Appends the ids of a text without added tokens.
    pub(super) fn ordinary(&mut self, text: &str, out: &mut Vec<u32>) {
        let text: Cow<'_, str> = match self.bpe.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            true => text.nfc().collect::<String>().into(),
            false => text.into(),
        };
        let text = text.as_bytes();
        match self.bpe.pattern {
            // one loop for each, so that the splitter is inlined
            Pattern::Gpt2 => self.words(text, |at| Pattern::Gpt2.next(text, at), out),
            Pattern::O200k => self.words(text, |at| Pattern::O200k.next(text, at), out),
            other => self.words(text, |at| other.next(text, at), out),
        }
    }

    #[inline(always)]
    fn words(&mut self, text: &[u8], next: impl Fn(usize) -> usize, out: &mut Vec<u32>) {
        let mut at = 0;
        while at < text.len() {
            let end = next(at);
            match &mut self.cache {
                Some(cache) if end - at <= LONGEST => {
                    let word = cache.key(text, at, end);
                    if !cache.get(word, out) {
                        let before = out.len();
                        self.bpe.word(&text[at..end], out);
                        cache.put(word, &out[before..]);
                    }
                }
                _ => self.bpe.word(&text[at..end], out),
            }
            at = end;
        }
    }
}

impl Bpe {
    fn word(&self, word: &[u8], out: &mut Vec<u32>) {
        if let Some(&id) = self.whole.as_ref().and_then(|whole| whole.get(word)) {
            return out.push(id);
        }
        merge(&self.merges, word.iter().map(|&byte| self.byte(byte)), out);
    }
}

/// The first of the tokens in a text, of those at one place the longest; `added` is sorted by length.
fn first_of<'t>(text: &str, added: &[&'t Added]) -> Option<(usize, &'t Added)> {
    let mut first: Option<(usize, &Added)> = None;
    for token in added.iter().filter(|token| !token.content.is_empty()) {
        let end = first.map_or(text.len(), |(at, _)| (at + token.content.len()).min(text.len()));
        let found = memchr::memmem::find(&text.as_bytes()[..end], token.content.as_bytes());
        if let Some(at) = found.filter(|&at| first.is_none_or(|(best, _)| at < best)) {
            first = Some((at, token));
        }
    }
    first
}
