//! Tokens become text: whole characters only, and nothing of a stop string.

use super::codec::{Codec, Stream};
use crate::Result;

/// The text of one answer as it grows.
pub struct Writer {
    stream: Stream,
    /// The beginning of a character.
    bytes: Vec<u8>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stops: Vec<String>,
}

/// What a token added.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Text that is final.
    pub text: String,
    /// A stop string was complete: nothing more comes.
    pub stopped: bool,
}

impl Writer {
    /// A writer of an answer that ends before any of these strings.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stream: Stream::default(), bytes: Vec::new(), held: String::new(), stops }
    }

    /// Adds a token.
    pub fn push(&mut self, codec: &dyn Codec, token: u32) -> Result<Added> {
        let bytes = self.stream.next(codec, token)?;
        self.bytes.extend(bytes);
        self.take_characters(false);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = first {
            self.held.truncate(at);
            return Ok(Added { text: std::mem::take(&mut self.held), stopped: true });
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Ok(Added { text: std::mem::replace(&mut self.held, rest), stopped: false })
    }

    /// What is left at the end; a character that is not complete becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        self.take_characters(true);
        std::mem::take(&mut self.held)
    }

    /// Moves whole characters from the bytes to the text.
    fn take_characters(&mut self, all: bool) {
        loop {
            match std::str::from_utf8(&self.bytes) {
                Ok(text) => {
                    self.held.push_str(text);
                    self.bytes.clear();
                    return;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    self.held.push_str(&String::from_utf8_lossy(&self.bytes[..valid]));
                    let wrong = match error.error_len() {
                        Some(wrong) => wrong,
                        None if all => self.bytes.len() - valid,
                        None => {
                            self.bytes.drain(..valid);
                            return;
                        }
                    };
                    self.held.push(char::REPLACEMENT_CHARACTER);
                    self.bytes.drain(..valid + wrong);
                }
            }
        }
    }
}

/// The length of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = (1..=stop.len().min(text.len())).rev();
    let ends = |&length: &usize| stop.is_char_boundary(length) && text.ends_with(&stop[..length]);
    lengths.into_iter().find(ends).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tokenizer::Tokenizer;

    /// What comes of the bytes of a text, token by token.
    fn written(bytes: &[u8], stops: &[&str]) -> (Vec<String>, bool) {
        let codec = Tokenizer::bytes();
        let mut writer = Writer::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut pieces = Vec::new();
        for &byte in bytes {
            let added = writer.push(&codec, u32::from(byte)).unwrap();
            pieces.push(added.text);
            if added.stopped {
                return (pieces, true);
            }
        }
        pieces.push(writer.finish());
        (pieces, false)
    }

    #[test]
    fn characters_are_never_split() {
        let (pieces, stopped) = written("añ–🚂".as_bytes(), &[]);
        assert_eq!(pieces, ["a", "", "ñ", "", "", "–", "", "", "", "🚂", ""]);
        assert!(!stopped);
        assert_eq!(written(b"a\xf0\x9f\x9a", &[]).0.concat(), "a\u{fffd}");
        assert_eq!(written(b"a\xff\xfeb\xc3", &[]).0.concat(), "a\u{fffd}\u{fffd}b\u{fffd}");
    }

    #[test]
    fn nothing_of_a_stop_string_is_told() {
        let (pieces, stopped) = written(b"one\n\ntwo", &["\n\n", "two"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("one", true));
        let (pieces, stopped) = written(b"aab-aabaabc.", &["aabc"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("aab-aab", true));
        let (pieces, stopped) = written("ab🚂".as_bytes(), &["b🚂🚂", "x"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("ab🚂", false), "the end tells what was held");
        assert_eq!(written(b"abc", &["a"]), (vec![String::new()], true));
    }
}
