//! What fuzz targets and tests do with the bytes of a file of each kind: read them, and check what holds for every file
//! that is accepted. Each returns whether it was.

use std::path::Path;

use crate::read::{Line, ReadSettings, Rows, parse_line};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::bpe::{Bpe, Encoder, Special};
use crate::tokenizer::split::{Cut, Pattern, safe_cut};

/// Texts that hold every kind of character that decides something.
const TEXTS: [&str; 3] = [
    "",
    "it's  A\n\n\tb 1234 \u{301}é中😀 <|endoftext|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// Every vocabulary can write every text, and read back what it wrote unless it normalises.
fn round_trip(bpe: &Bpe) {
    for text in TEXTS {
        let mut ids = Vec::new();
        Encoder::once(bpe, Special::Ordinary).encode(text, &mut ids);
        assert!(ids.iter().all(|&id| (id as usize) < bpe.vocab_size()), "an id is out of range");
        assert!(bpe.decode(&ids).is_ok(), "an id cannot be decoded");
    }
}

/// A `tokenizer.json`.
pub fn tokenizer_json(bytes: &[u8]) -> bool {
    Tokenizer::fuzz_json(bytes).is_some_and(|bpe| {
        round_trip(&bpe);
        true
    })
}

/// A rank file.
pub fn ranks(bytes: &[u8]) -> bool {
    Tokenizer::fuzz_ranks(bytes).is_some_and(|bpe| {
        round_trip(&bpe);
        true
    })
}

/// A line of JSON.
pub fn json_line(bytes: &[u8]) -> bool {
    match parse_line(bytes, "text") {
        Line::Text(text, replaced) => {
            // what the crate for any JSON says
            let line = String::from_utf8_lossy(bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes));
            let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            assert_eq!(value["text"].as_str(), Some(text.as_ref()));
            assert_eq!(replaced == 0, std::str::from_utf8(bytes).is_ok());
            true
        }
        Line::Blank => true,
        Line::Bad(_) => false,
    }
}

/// A parquet file.
pub fn parquet(bytes: &[u8]) -> bool {
    let path = Path::new("fuzz.parquet");
    let Ok(mut rows) = Rows::new(bytes::Bytes::copy_from_slice(bytes), path, "text") else { return false };
    loop {
        match rows.next(&ReadSettings::default(), path) {
            Ok(Some(_)) => drop(rows.take_missing()),
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Text that is split and cut.
pub fn text(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    for pattern in [Pattern::Gpt2, Pattern::CL100K_TAIL, Pattern::QWEN2, Pattern::QWEN_MARKS, Pattern::O200k]
    {
        let words = |text: &str| {
            let (mut at, mut ends) = (0, Vec::new());
            while at < text.len() {
                at = pattern.next(text.as_bytes(), at);
                assert!(text.is_char_boundary(at));
                ends.push(at);
            }
            ends
        };
        let all = words(&text);
        for cut in [Cut::AfterLetter, Cut::BeforeSpace] {
            if let Some(at) = safe_cut(text.as_bytes(), cut) {
                assert!(all.contains(&at), "{cut:?} cuts inside a word");
            }
        }
    }
    true
}
