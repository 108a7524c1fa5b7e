//! The units of all inputs, one after the other.

use std::fs::File;
use std::path::PathBuf;

use super::inputs::{Format, Input};
use super::lines::{self, Line, Lines};
use super::raw::Raw;
use super::rows::{Rows, hash_file};
use super::text::{Around, CutAt, Text};
use super::{Content, ReadSettings, Unit};
use crate::{Error, Result};

/// Reads inputs unit by unit, in order. Every input ends with a unit without documents that has [`Unit::end`].
pub struct Units<'a> {
    inputs: &'a [Input],
    settings: &'a ReadSettings,
    cut: CutAt<'a>,
    spool: Option<PathBuf>,
    input: usize,
    open: Option<Open>,
    number: u64,
    crc: crc32fast::Hasher,
}

enum Open {
    Text(Text),
    Lines(Lines),
    Rows(Box<Rows>),
    /// An input that was read to its end.
    Ended(u64),
}

impl<'a> Units<'a> {
    /// Starts at the beginning of the input `first`. `cut` says where a document may be cut.
    pub fn new(inputs: &'a [Input], settings: &'a ReadSettings, cut: CutAt<'a>, first: usize) -> Self {
        let crc = crc32fast::Hasher::new();
        Self { inputs, settings, cut, spool: None, input: first, open: None, number: 0, crc }
    }

    /// Keeps a large document of standard input in the file `path` until it was read; without one such a document is an error.
    #[must_use]
    pub fn with_spool(mut self, path: PathBuf) -> Self {
        self.spool = Some(path);
        self
    }

    /// How the inputs are read.
    pub fn settings(&self) -> &'a ReadSettings {
        self.settings
    }

    fn next_unit(&mut self) -> Result<Option<Unit>> {
        let Some(input) = self.inputs.get(self.input) else { return Ok(None) };
        let mut open = match self.open.take() {
            Some(open) => open,
            None => open_input(input, self.settings)?,
        };
        let around = Around { settings: self.settings, cut: self.cut, spool: self.spool.as_deref() };
        let (content, read, missing) = match &mut open {
            Open::Text(text) => (text.next(input, around)?, text.raw().position(), 0),
            Open::Lines(lines) => (lines.next(self.settings, &input.path)?, lines.raw().position(), 0),
            Open::Rows(rows) => {
                (rows.next(self.settings, &input.path)?, rows.position(), rows.take_missing())
            }
            Open::Ended(read) => (None, *read, 0),
        };
        let mut unit = Unit {
            input: self.input,
            number: self.number,
            content: Content::Documents(Vec::new()),
            crc: 0,
            read,
            missing,
            end: None,
        };
        match content {
            Some(content) => {
                self.add(&content);
                // a file that is not text is not read further
                self.open = Some(if content == Content::NotText { Open::Ended(read) } else { open });
                self.number += 1;
                unit.content = content;
            }
            None => {
                let end = match open {
                    Open::Text(text) => text.into_raw().finish()?,
                    Open::Lines(lines) => lines.into_raw().finish()?,
                    Open::Rows(_) | Open::Ended(_) => hash_file(&input.path)?,
                };
                unit.end = Some(end);
                unit.crc = self.crc.clone().finalize();
                self.input += 1;
                self.number = 0;
                self.crc.reset();
                return Ok(Some(unit));
            }
        }
        unit.crc = self.crc.clone().finalize();
        Ok(Some(unit))
    }

    fn add(&mut self, content: &Content) {
        match content {
            Content::Lines { bytes, .. } => self.crc.update(bytes),
            Content::Documents(documents) => documents.iter().for_each(|document| {
                self.crc.update(&document.bytes.len().to_le_bytes());
                self.crc.update(&document.bytes);
            }),
            Content::Part(part) => self.crc.update(&part.bytes),
            Content::NotText => {}
        }
    }
}

impl Iterator for Units<'_> {
    type Item = Result<Unit>;

    fn next(&mut self) -> Option<Self::Item> {
        let unit = self.next_unit().transpose();
        if matches!(unit, Some(Err(_))) {
            self.input = self.inputs.len(); // an error is the end
        }
        unit
    }
}

fn open_input(input: &Input, settings: &ReadSettings) -> Result<Open> {
    Ok(match input.format {
        Format::Text => Open::Text(Text::new(Raw::open(input)?)),
        Format::Jsonl => Open::Lines(Lines::new(Raw::open(input)?)),
        Format::Parquet => {
            if input.is_stdin() {
                return Err(Error::input(
                    &input.path,
                    "parquet cannot be read from standard input; use a file",
                ));
            }
            let file = File::open(&input.path).map_err(|source| Error::io(&input.path, "open", source))?;
            Open::Rows(Box::new(Rows::new(file, &input.path, &settings.field)?))
        }
    })
}

/// All documents of the inputs as text, for training a tokenizer. Large ones come in parts.
pub fn documents<'a>(
    inputs: &'a [Input],
    settings: &'a ReadSettings,
) -> impl Iterator<Item = Result<String>> + Send + 'a {
    let cut: CutAt<'a> =
        &|text| crate::tokenizer::split::safe_cut(text, crate::tokenizer::split::Cut::AfterLetter);
    Units::new(inputs, settings, cut, 0).flat_map(move |unit| match unit {
        Ok(unit) => texts(unit, inputs, settings),
        Err(error) => vec![Err(error)],
    })
}

fn texts(unit: Unit, inputs: &[Input], settings: &ReadSettings) -> Vec<Result<String>> {
    let lossy = |bytes: Vec<u8>| {
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    };
    match unit.content {
        Content::Documents(documents) => {
            documents.into_iter().map(|document| Ok(lossy(document.bytes))).collect()
        }
        Content::Part(part) => vec![Ok(lossy(part.bytes))],
        Content::NotText => Vec::new(),
        Content::Lines { first, bytes } => lines::numbered(first, &bytes)
            .filter_map(|(number, line)| match lines::parse(line, &settings.field) {
                Line::Text(text, _) => Some(Ok(text.into_owned())),
                Line::Bad(problem) if !settings.skip_bad => {
                    let path = inputs[unit.input].path.clone();
                    Some(Err(Error::Record { path, unit: "line", number, problem }))
                }
                Line::Blank | Line::Bad(_) => None,
            })
            .collect(),
    }
}
