//! A text token by token.

use serde::Serialize;

use super::Tokenizer;
use super::bpe::Special;
use crate::Result;

/// The tokens of a text.
#[derive(Debug, Serialize)]
pub struct Shown {
    /// The tokenizer's name.
    pub tokenizer: String,
    /// How it encodes.
    pub method: &'static str,
    /// The number of its ids.
    pub vocab_size: usize,
    /// Bytes of the text.
    pub bytes: usize,
    /// Bytes per token; 0 without tokens.
    pub bytes_per_token: f64,
    /// The tokens in order.
    pub tokens: Vec<ShownToken>,
}

/// One token.
#[derive(Debug, Serialize)]
pub struct ShownToken {
    /// Its id.
    pub id: u32,
    /// What it stands for; bytes that are not UTF-8 by themselves as U+FFFD.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Shown {
    /// Encodes a text.
    pub fn new(tokenizer: &Tokenizer, text: &[u8], special: Special) -> Result<Self> {
        let ids = tokenizer.encode_as(text, special)?;
        let tokens = ids.iter().map(|&id| {
            let bytes = tokenizer.decode(&[id])?;
            Ok(ShownToken { id, text: String::from_utf8_lossy(&bytes).into_owned(), bytes })
        });
        let tokens: Vec<_> = tokens.collect::<Result<_>>()?;
        Ok(Self {
            tokenizer: tokenizer.name().to_owned(),
            method: tokenizer.method(),
            vocab_size: tokenizer.vocab_size(),
            bytes: text.len(),
            bytes_per_token: if tokens.is_empty() { 0.0 } else { text.len() as f64 / tokens.len() as f64 },
            tokens,
        })
    }

    /// The text with its tokens in alternating colours, for a terminal, or with bars between them.
    pub fn text(&self, colour: bool) -> String {
        const COLOURS: [&str; 6] = ["48;5;24", "48;5;52", "48;5;22", "48;5;54", "48;5;58", "48;5;23"];
        let mut shown = String::new();
        let mut bytes: Vec<u8> = Vec::new();
        let mut colours = COLOURS.iter().cycle();
        for (index, token) in self.tokens.iter().enumerate() {
            // tokens that are parts of one character are shown as one
            bytes.extend_from_slice(&token.bytes);
            let last = index + 1 == self.tokens.len();
            if !last && std::str::from_utf8(&bytes).is_err_and(|error| error.error_len().is_none()) {
                continue;
            }
            let text = visible(&String::from_utf8_lossy(&bytes), !colour);
            bytes.clear();
            match (colour, colours.next()) {
                (true, Some(background)) => {
                    // the background ends with the line, or a terminal paints it to its edge
                    let painted: Vec<_> =
                        text.split('\n').map(|line| format!("\x1b[{background}m{line}\x1b[0m")).collect();
                    shown += &painted.join("\n");
                }
                _ => {
                    shown += &text;
                    shown += if last { "" } else { "|" };
                }
            }
        }
        shown
    }
}

/// Control characters as pictures, so that a token is seen where a terminal would act; a line end also ends the line
/// unless everything is to be on one.
pub fn visible(text: &str, one_line: bool) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        match c {
            '\n' if one_line => shown.push('⏎'),
            '\n' => shown.push_str("⏎\n"),
            '\0'..=' ' if c != ' ' => shown.extend(char::from_u32(0x2400 + c as u32)),
            '\u{7f}'..='\u{9f}' => shown.push('\u{fffd}'),
            c => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_told_apart() {
        let tokenizer = Tokenizer::open("gpt2").unwrap();
        let shown = Shown::new(&tokenizer, "Hello world\n\x1b😀".as_bytes(), Special::Ordinary).unwrap();
        assert_eq!(shown.tokens[0].id, 15496);
        assert_eq!(shown.text(false), "Hello| world|⏎|␛|😀");
        let coloured = shown.text(true);
        assert!(coloured.starts_with("\x1b[48;5;24mHello\x1b[0m") && !coloured.contains("\x1b\u{1f600}"));
        assert_eq!(shown.bytes, 17);
        let empty = Shown::new(&tokenizer, b"", Special::Ordinary).unwrap();
        assert_eq!((empty.text(true).as_str(), empty.bytes_per_token), ("", 0.0));
    }
}
