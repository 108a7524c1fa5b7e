//! `ironhorse data show` of text: its documents as training sees them, each after the token between documents.

use super::{Run, ShowArgs, Shown};
use crate::out;
use anyhow::{Context, Result};
use ironhorse::text::read::{Content, Format, Input, ReadSettings, Units, resolve};
use ironhorse::text::tokenizer::{TextEncoder, Tokenizer};
use std::path::{Path, PathBuf};

/// Tokens of a document that are shown, if nothing else is asked for: a book is one.
const MOST_SHOWN: usize = 512;

/// The files, if all are text: .txt, .md or .parquet.
pub fn inputs(paths: &[PathBuf]) -> Result<Option<Vec<Input>>> {
    if paths.iter().any(|path| path == Path::new("-")) {
        return Ok(None);
    }
    let inputs = resolve(paths, None).unwrap_or_default(); // what is wrong with them, the reader of chats says
    let is_text = inputs.iter().all(|input| input.format != Format::Jsonl);
    Ok(Some(inputs).filter(|inputs| is_text && !inputs.is_empty()))
}

/// What was read.
#[derive(Clone, Copy, Default)]
pub struct Read {
    pub documents: u64,
    pub tokens: u64,
}

/// A document that is being read.
struct Document {
    file: PathBuf,
    number: u64,
    /// Its first tokens.
    ids: Vec<u32>,
    tokens: usize,
}

/// Shows the first documents; gives them and what was read.
pub fn show(args: &ShowArgs, inputs: &[Input], tokenizer: &Tokenizer) -> Result<(Vec<Shown>, Read)> {
    let name = tokenizer.name();
    let between = tokenizer.eot().with_context(|| format!("{name}: has no token between documents"))?;
    let (settings, cut) = (ReadSettings::default(), |text: &[u8]| tokenizer.safe_cut(text));
    let mut reading = Reading {
        args,
        tokenizer,
        encoder: tokenizer.encoder(),
        between,
        open: None,
        shown: Vec::new(),
        read: Read::default(),
    };
    let (mut input, mut number) = (0, 0);
    for unit in Units::new(inputs, &settings, &cut, 0) {
        let unit = unit?;
        if unit.input != input {
            (input, number) = (unit.input, 0);
        }
        let pieces: Vec<(Vec<u8>, bool)> = match unit.content {
            Content::Documents(documents) => {
                documents.into_iter().map(|document| (document.bytes, true)).collect()
            }
            Content::Part(part) => vec![(part.bytes, part.first)],
            Content::Lines { .. } | Content::NotText => Vec::new(),
        };
        for (bytes, first) in pieces {
            if first && bytes.trim_ascii().is_empty() {
                continue;
            }
            if first {
                reading.finish()?;
                number += 1;
            }
            if reading.enough() {
                return Ok((reading.shown, reading.read));
            }
            reading.add((&inputs[input].path, number), &bytes, first)?;
        }
    }
    reading.finish()?;
    Ok((reading.shown, reading.read))
}

struct Reading<'a> {
    args: &'a ShowArgs,
    tokenizer: &'a Tokenizer,
    encoder: TextEncoder<'a>,
    between: u32,
    open: Option<Document>,
    shown: Vec<Shown>,
    read: Read,
}

impl Reading<'_> {
    /// Whether all that is to be shown is.
    fn enough(&self) -> bool {
        self.open.is_none() && self.shown.len() == self.args.count && !self.args.whole
    }

    fn add(&mut self, (path, number): (&Path, u64), bytes: &[u8], first: bool) -> Result<()> {
        let mut ids = if first { vec![self.between] } else { Vec::new() };
        self.encoder.encode(bytes, &mut ids)?;
        let most = self.args.context.unwrap_or(MOST_SHOWN);
        let new = Document { file: path.to_owned(), number, ids: Vec::new(), tokens: 0 };
        let document = self.open.get_or_insert(new);
        document.tokens += ids.len();
        ids.truncate(most.saturating_sub(document.ids.len()));
        document.ids.append(&mut ids);
        Ok(())
    }

    /// Counts the document that ends, and shows it if it is one of the first.
    fn finish(&mut self) -> Result<()> {
        let Some(document) = self.open.take() else { return Ok(()) };
        self.read.documents += 1;
        self.read.tokens += document.tokens as u64;
        if self.shown.len() < self.args.count {
            let shown = document.shown(self.tokenizer)?;
            out::line(shown.text(out::colours()))?;
            self.shown.push(shown);
        }
        Ok(())
    }
}

impl Document {
    fn shown(self, tokenizer: &Tokenizer) -> Result<Shown> {
        let text = |ids: &[u32]| anyhow::Ok(String::from_utf8_lossy(&tokenizer.decode(ids)?).into_owned());
        let end = self.ids.len();
        let first = end.min(1);
        let run = |start: usize, end: usize, boundary: bool| {
            anyhow::Ok(Run { start, end, learned: true, boundary, text: text(&self.ids[start..end])? })
        };
        let mut runs = vec![run(0, first, true)?];
        if end > first {
            runs.push(run(first, end, false)?);
        }
        Ok(Shown {
            file: self.file,
            line: self.number,
            unit: "document",
            text: text(&self.ids)?,
            learned: vec![true; end],
            runs,
            cut: self.tokens - end,
            ids: self.ids.into_iter().map(|id| id as i32).collect(),
        })
    }
}
