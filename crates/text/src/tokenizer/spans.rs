//! Where in a text each token is.

use std::ops::Range;

use unicode_normalization::char::canonical_combining_class;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::bpe::{Bpe, Encoder, Special};
use super::{Kind, Tokenizer};
use crate::Result;

/// A token and the bytes of the text that it stands for. Where characters were normalised or are several tokens, the spans of
/// neighbours may overlap.
pub type Spanned = (u32, Range<usize>);

impl Tokenizer {
    /// The ids of a text, markers such as `<|endoftext|>` as tokens, and where each is in the text.
    pub fn encode_spans(&self, text: &str) -> Result<Vec<Spanned>> {
        match &self.kind {
            Kind::Bpe(bpe) => Ok(of_bpe(bpe, text)),
            Kind::Foreign(foreign) => foreign.encode_spans(text),
            Kind::Bytes | Kind::Longest(_) => {
                let ids = self.encode_as(text.as_bytes(), Special::Tokens)?;
                let mut at = 0;
                ids.into_iter()
                    .map(|id| {
                        let start = at;
                        at += self.decode(&[id])?.len();
                        Ok((id, start..at))
                    })
                    .collect()
            }
        }
    }
}

fn of_bpe(bpe: &Bpe, text: &str) -> Vec<Spanned> {
    let mut spanned = Vec::new();
    let mut ids = Vec::new();
    let mut encoder = Encoder::once(bpe, Special::Tokens);
    encoder.pieces(text, |encoder, piece, token| match token {
        Some(id) => spanned.push((id, piece)),
        None => {
            ids.clear();
            encoder.ordinary(&text[piece.clone()], &mut ids);
            let origins = Origins::new(&text[piece.clone()], bpe.normalises());
            let mut at = 0;
            for &id in &ids {
                let end = at + bpe.tokens()[id as usize].len();
                let (first, last) = (origins.of(at), origins.of(end - 1));
                spanned.push((id, piece.start + first.start..piece.start + last.end));
                at = end;
            }
        }
    });
    spanned
}

/// Which bytes of a text the bytes of its normalised form come from.
enum Origins {
    /// Each byte comes from itself: the text was not changed.
    Same,
    /// For every run of characters that is normalised by itself, the offsets of its beginning: normalised, and in the text.
    Runs(Vec<[usize; 2]>),
}

impl Origins {
    fn new(text: &str, normalises: bool) -> Self {
        if !normalises || is_nfc_quick(text.chars()) == IsNormalized::Yes {
            return Self::Same;
        }
        // nothing before such a character ever joins it
        let begins = |c: char| {
            canonical_combining_class(c) == 0 && is_nfc_quick(std::iter::once(c)) == IsNormalized::Yes
        };
        let starts = text.char_indices().filter(|&(at, c)| at == 0 || begins(c)).map(|(at, _)| at);
        let starts: Vec<usize> = starts.chain([text.len()]).collect();
        let mut normalised = 0;
        let mut runs = Vec::with_capacity(starts.len());
        for pair in starts.windows(2) {
            runs.push([normalised, pair[0]]);
            normalised += text[pair[0]..pair[1]].nfc().map(char::len_utf8).sum::<usize>();
        }
        runs.push([normalised, text.len()]);
        Self::Runs(runs)
    }

    /// The bytes of the text that the normalised byte at `at` comes from.
    fn of(&self, at: usize) -> Range<usize> {
        match self {
            Self::Same => at..at + 1,
            Self::Runs(runs) => {
                let next = runs.partition_point(|run| run[0] <= at).clamp(1, runs.len() - 1);
                runs[next - 1][1]..runs[next][1]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_merges_are_where_they_are() {
        let spans = |tokenizer: &str, text: &str| -> Vec<Range<usize>> {
            let spanned = Tokenizer::open(tokenizer).unwrap().encode_spans(text).unwrap();
            spanned.into_iter().map(|(_, span)| span).collect()
        };
        assert_eq!(spans("bytes", "aé"), [0..1, 1..2, 2..3]);
        assert_eq!(spans("gpt2", "Hello world<|endoftext|>!"), [0..5, 5..11, 11..24, 24..25]);
        assert!(spans("gpt2", "").is_empty());
    }

    /// e and an acute accent are one character of two bytes once normalised; so is the Hangul syllable of two letters.
    #[test]
    fn normalised_text_keeps_its_places() {
        let text = "ae\u{301}x\u{1112}\u{1161}.";
        let origins = Origins::new(text, true);
        let normal: String = text.nfc().collect();
        let found: Vec<Range<usize>> = (0..normal.len()).map(|at| origins.of(at)).collect();
        assert_eq!(found, [0..1, 1..4, 1..4, 4..5, 5..11, 5..11, 5..11, 11..12]);
        assert_eq!(Origins::new(text, false).of(3), 3..4);
    }
}
