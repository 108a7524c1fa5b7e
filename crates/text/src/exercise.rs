//! What fuzz targets and tests do with the bytes of a file of each kind: read them, and check what holds for every file
//! that is accepted. Each returns whether it was.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;
use crate::prepare::{MANIFEST, Manifest, Settings, prepare};
use crate::read::{Content, Format, Input, Line, Packing, ReadSettings, Rows, Units, parse_line};
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

/// Any `tokenizer.json`, also one that is left to the crate `tokenizers`.
pub fn any_tokenizer_json(bytes: &[u8]) -> bool {
    Tokenizer::fuzz_any_json(bytes).is_some_and(|tokenizer| {
        for text in TEXTS {
            if let Ok(ids) = tokenizer.encode(text.as_bytes()) {
                assert!(
                    ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()),
                    "an id is out of range"
                );
                let _ = tokenizer.decode(&ids); // not all of them can
            }
        }
        true
    })
}

/// llm.c's `tokenizer.bin`.
pub fn tokenizer_bin(bytes: &[u8]) -> bool {
    Tokenizer::fuzz_bin(bytes).is_some_and(|tokenizer| {
        for text in TEXTS {
            // without all bytes among its tokens it cannot write every text
            if let Ok(ids) = tokenizer.encode(text.as_bytes()) {
                assert!(
                    ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()),
                    "an id is out of range"
                );
                assert!(
                    tokenizer.decode(&ids).is_ok_and(|back| back == text.as_bytes()),
                    "it reads something else"
                );
            }
        }
        true
    })
}

/// `vocab.json`, `merges.txt` and `tokenizer_config.json`, with a zero byte between them.
pub fn vocab_json(bytes: &[u8]) -> bool {
    let mut parts = bytes.splitn(3, |&byte| byte == 0);
    let parts = [(); 3].map(|()| parts.next().unwrap_or_default());
    Tokenizer::fuzz_vocab(parts).is_some_and(|bpe| {
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

/// A folder of its own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name =
            format!("ironhorse-exercise-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).ok()?;
        Some(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // if that fails, only space is wasted
    }
}

/// Units of one file that are looked at: a packed file of a few bytes can have billions.
const MOST_UNITS: usize = 10_000;
/// Stands between documents here.
const BETWEEN: &str = "--";

/// A file of text or of JSON lines, plain or packed. The first byte says how it is read: bit 0 as lines, bits 1 and 2 the
/// packing, bit 3 with a delimiter, bit 4 with a part for validation, bit 5 without what is not text.
pub fn documents(bytes: &[u8]) -> bool {
    let (Some((&how, file)), Some(scratch)) = (bytes.split_first(), Scratch::new()) else { return false };
    let packing = [Packing::Plain, Packing::Gzip, Packing::Zstd, Packing::Plain][usize::from(how >> 1 & 3)];
    let format = if how & 1 == 0 { Format::Text } else { Format::Jsonl };
    let input = Input { path: scratch.0.join("f"), format, packing, bytes: file.len() as u64, modified: 0 };
    if std::fs::write(&input.path, file).is_err() {
        return false;
    }
    let settings = ReadSettings {
        delimiter: (how & 8 != 0).then(|| BETWEEN.to_owned()),
        val_tail: (how & 16 != 0).then_some(0.3),
        skip_bad: how & 32 != 0,
        unit_bytes: 16,
        large_bytes: 40,
        ..ReadSettings::default()
    };
    let inputs = [input];
    let cut = |text: &[u8]| safe_cut(text, Cut::AfterLetter);
    let (mut all, mut ended, mut skipped) = (Vec::new(), false, false);
    for (number, unit) in Units::new(&inputs, &settings, &cut, 0).enumerate().take(MOST_UNITS) {
        let Ok(unit) = unit else { return false };
        assert!(!ended && unit.number == number as u64, "units come in order");
        ended = unit.end.is_some_and(|end| {
            assert_eq!(end.bytes, file.len() as u64, "the whole file is read");
            true
        });
        match unit.content {
            Content::Lines { bytes, .. } => all.extend(bytes),
            Content::Part(part) => all.extend(part.bytes),
            Content::Documents(documents) => documents.into_iter().for_each(|document| {
                let found = memchr::memmem::find(&document.bytes, BETWEEN.as_bytes());
                let split = settings.delimiter.is_some() && format == Format::Text;
                assert!(found.is_none() || !split, "a delimiter in a document");
                all.extend(document.bytes);
            }),
            Content::NotText => skipped = true,
        }
    }
    let split = settings.delimiter.is_some() && format == Format::Text;
    if ended && packing == Packing::Plain && !skipped && !split {
        assert!(all == file, "bytes are lost or added");
    }
    true
}

/// `manifest.json`.
pub fn manifest(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::parse(bytes, Path::new(MANIFEST)) else { return false };
    for shard in manifest.train.iter().chain(&manifest.val) {
        assert_eq!(Path::new("folder").join(&shard.file).parent(), Some(Path::new("folder")));
    }
    let again = serde_json::to_vec(&manifest).unwrap_or_default();
    assert!(Manifest::parse(&again, Path::new(MANIFEST)).is_ok_and(|again| again == manifest));
    true
}

/// A preparation that was interrupted, to be gone on with by any journal.
pub struct Interrupted {
    inputs: [Input; 1],
    settings: Settings,
    tokenizer: Tokenizer,
    /// What it has left in its folder.
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Interrupted {
    /// A preparation below this folder, stopped by a line that is not JSON in the middle of its second shard.
    pub fn new(folder: &Path) -> Result<Self, Error> {
        let failed = |source| Error::io(folder, "write", source);
        let mut lines: String = (0..12).map(|n| format!("{{\"text\": \"number {}\"}}\n", n % 9)).collect();
        lines += "not JSON\n{\"text\": \"the last\"}\n";
        let path = folder.join("in.jsonl");
        std::fs::write(&path, &lines).map_err(failed)?;
        let (format, packing) = (Format::Jsonl, Packing::Plain);
        let inputs = [Input { path, format, packing, bytes: lines.len() as u64, modified: 0 }];
        let mut settings = Settings::new(&folder.join("out"), "s");
        (settings.val, settings.shard_tokens, settings.dedup, settings.threads) = (0.3, 25, true, 1);
        settings.read.unit_bytes = 48;
        let tokenizer = Tokenizer::bytes();
        let stopped = prepare(&inputs, &tokenizer, &settings, &mut |_| ControlFlow::Continue(()));
        assert!(stopped.is_err(), "the line that is not JSON does not stop it");
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&settings.out).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            files.push((path.clone(), std::fs::read(&path).map_err(failed)?));
        }
        settings.read.skip_bad = true;
        Ok(Self { inputs, settings, tokenizer, files })
    }

    fn is_journal(path: &Path) -> bool {
        path.to_string_lossy().ends_with(".journal.json")
    }

    /// The journal it has left.
    pub fn journal(&self) -> &[u8] {
        let found = self.files.iter().find(|(path, _)| Self::is_journal(path));
        found.map_or(&[], |(_, bytes)| bytes)
    }

    /// Goes on by this journal, in the same folder every time.
    pub fn go_on(&self, journal: &[u8]) -> bool {
        let out = &self.settings.out;
        let _ = std::fs::remove_dir_all(out);
        let put = |(path, bytes): &(PathBuf, Vec<u8>)| {
            std::fs::write(path, if Self::is_journal(path) { journal } else { bytes }).is_ok()
        };
        assert!(
            std::fs::create_dir_all(out).is_ok() && self.files.iter().all(put),
            "cannot write to {}",
            out.display()
        );
        let done = prepare(&self.inputs, &self.tokenizer, &self.settings, &mut |_| ControlFlow::Continue(()));
        match done {
            Ok(prepared) => {
                for shard in prepared.manifest.train.iter().chain(&prepared.manifest.val) {
                    let len = std::fs::metadata(out.join(&shard.file)).map_or(0, |meta| meta.len());
                    assert_eq!(len, shard.bytes, "{}", shard.file);
                }
                true
            }
            Err(error) => {
                assert_eq!(error.to_string().lines().count(), 1, "{error}");
                false
            }
        }
    }
}
