//! Files of chat data, line by line.

use std::path::PathBuf;

use ironhorse_train::data::Sample;

use super::{Chat, Mask, PairRecord, Record};
use crate::read::{Content, Format, Input, ReadSettings, Units, resolve};
use crate::{Error, Result};

/// A sample and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatLine {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1.
    pub line: u64,
    /// The sample, cut to the context.
    pub sample: Sample,
    /// Tokens that were cut off.
    pub cut: usize,
    /// What is unusual in the order of its roles, as the end of a sentence that begins with the line.
    pub disorder: Option<String>,
}

/// A pair of samples and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairLine {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1.
    pub line: u64,
    /// The chosen sample and the rejected one.
    pub pair: [Sample; 2],
    /// What is unusual in the order of its roles, as the end of a sentence that begins with the line.
    pub disorder: Option<String>,
}

/// What was read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Samples.
    pub samples: u64,
    /// Their tokens, after cutting.
    pub tokens: u64,
    /// Tokens that are learned.
    pub learned: u64,
    /// Samples of which no token is learned.
    pub unlearned: u64,
    /// Samples that were longer than the context.
    pub truncated: u64,
    /// Tokens that were cut off them.
    pub cut: u64,
}

impl Counts {
    /// Adds the sample of a line.
    pub fn add(&mut self, line: &ChatLine) {
        self.add_sample(&line.sample, line.cut);
    }

    /// Adds a sample of which `cut` tokens were cut off.
    pub fn add_sample(&mut self, sample: &Sample, cut: usize) {
        let learned = sample.targets() as u64;
        self.samples += 1;
        self.tokens += sample.ids.len() as u64;
        self.learned += learned;
        self.unlearned += u64::from(learned == 0);
        self.truncated += u64::from(cut > 0);
        self.cut += cut as u64;
    }

    /// One line for people.
    pub fn text(&self, context: Option<usize>) -> String {
        let share = self.learned as f64 / self.tokens.max(1) as f64 * 100.0;
        let mut text = format!(
            "{} samples, {} tokens, {} learned ({share:.1} %)",
            self.samples, self.tokens, self.learned
        );
        if let (1.., Some(context)) = (self.truncated, context) {
            text +=
                &format!("; {} longer than {context} tokens were cut by {} in all", self.truncated, self.cut);
        }
        if self.unlearned > 0 {
            text += &format!("; of {} nothing is learned", self.unlearned);
        }
        text
    }
}

/// Files of chat data: JSON lines, also with .gz or .zst.
#[derive(Debug)]
pub struct ChatFiles {
    inputs: Vec<Input>,
    settings: ReadSettings,
}

impl ChatFiles {
    /// Names, folders and patterns, as of [`resolve`]; `-` is standard input.
    pub fn new(paths: &[PathBuf]) -> Result<Self> {
        Ok(Self { inputs: resolve(paths, Some(Format::Jsonl))?, settings: ReadSettings::default() })
    }

    /// The samples of the files in order, each cut to `context` tokens. After an error there are no more.
    pub fn samples<'a>(&'a self, chat: &'a Chat, mask: Mask, context: Option<usize>) -> ChatLines<'a> {
        ChatLines { chat, mask, context, lines: self.lines() }
    }

    /// The pairs of the files in order. After an error there are no more.
    pub fn pairs<'a>(&'a self, chat: &'a Chat, mask: Mask) -> PairLines<'a> {
        PairLines { chat, mask, lines: self.lines() }
    }

    fn lines(&self) -> Lines<'_> {
        let units = Units::new(&self.inputs, &self.settings, &|_| None, 0);
        let lines = Unread { bytes: Vec::new(), at: 0, line: 1 };
        Lines { inputs: &self.inputs, units, input: 0, lines, found: false }
    }
}

/// The samples of [`ChatFiles`].
pub struct ChatLines<'a> {
    chat: &'a Chat,
    mask: Mask,
    context: Option<usize>,
    lines: Lines<'a>,
}

/// The pairs of [`ChatFiles`].
pub struct PairLines<'a> {
    chat: &'a Chat,
    mask: Mask,
    lines: Lines<'a>,
}

/// The lines of files.
struct Lines<'a> {
    inputs: &'a [Input],
    units: Units<'a>,
    /// The file that is read.
    input: usize,
    lines: Unread,
    /// Whether that file had a line that is not blank.
    found: bool,
}

/// Lines of a file that were not looked at yet.
struct Unread {
    bytes: Vec<u8>,
    /// The offset in `bytes` at which the next line begins.
    at: usize,
    /// The number of the next line.
    line: u64,
}

/// A line, where it is from, and what was made of it.
type Made<T> = (PathBuf, u64, T);

impl Lines<'_> {
    /// What `make` makes of the next line that is not blank. Its error goes on after "line N ", and ends the lines.
    fn next<T>(&mut self, make: &dyn Fn(&str) -> Result<T, String>) -> Option<Result<Made<T>>> {
        let read = self.read(make).transpose();
        if matches!(read, Some(Err(_))) {
            self.lines.bytes.clear();
            self.units = Units::new(&[], self.units.settings(), &|_| None, 0);
        }
        read
    }

    fn read<T>(&mut self, make: &dyn Fn(&str) -> Result<T, String>) -> Result<Option<Made<T>>> {
        loop {
            while self.lines.at < self.lines.bytes.len() {
                let rest = &self.lines.bytes[self.lines.at..];
                let length = memchr::memchr(b'\n', rest).unwrap_or(rest.len());
                let made = text_of(&rest[..length]).and_then(|text| text.map(make).transpose());
                let line = self.lines.line;
                self.lines.at += length + 1;
                self.lines.line += 1;
                let path = &self.inputs[self.input].path;
                let refuse = |problem| Error::Sample { path: path.clone(), line, problem };
                if let Some(made) = made.map_err(refuse)? {
                    self.found = true;
                    return Ok(Some((path.clone(), line, made)));
                }
            }
            let Some(unit) = self.units.next().transpose()? else { return Ok(None) };
            match unit.content {
                Content::Lines { first, bytes } => {
                    self.input = unit.input;
                    self.lines = Unread { bytes, at: 0, line: first };
                }
                _ if unit.end.is_some() && !self.found => {
                    let path = &self.inputs[unit.input].path;
                    return Err(Error::input(path, "has no sample, expected a JSON object in every line"));
                }
                _ => self.found = false,
            }
        }
    }
}

/// The text of a line; `None` if it is blank.
fn text_of(line: &[u8]) -> Result<Option<&str>, String> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let text = std::str::from_utf8(line);
    text.map(Some).map_err(|error| format!("is not UTF-8 (byte {} of it)", error.valid_up_to() + 1))
}

fn unusable(error: Error) -> String {
    format!("cannot be used: {error}")
}

impl Iterator for ChatLines<'_> {
    type Item = Result<ChatLine>;

    fn next(&mut self) -> Option<Self::Item> {
        let Self { chat, mask, context, lines } = self;
        let made = lines.next(&|text| {
            let record = Record::parse(text)?;
            let mut sample = chat.sample(&record, *mask).map_err(unusable)?;
            let cut = sample.cut(context.unwrap_or(usize::MAX));
            Ok((sample, cut, record.disorder()))
        });
        Some(made?.map(|(path, line, (sample, cut, disorder))| ChatLine {
            path,
            line,
            sample,
            cut,
            disorder,
        }))
    }
}

impl Iterator for PairLines<'_> {
    type Item = Result<PairLine>;

    fn next(&mut self) -> Option<Self::Item> {
        let Self { chat, mask, lines } = self;
        let made = lines.next(&|text| {
            let record = PairRecord::parse(text)?;
            let disorder = record.chosen.disorder().or_else(|| record.rejected.disorder());
            Ok((chat.pair(&record, *mask).map_err(unusable)?, disorder))
        });
        Some(made?.map(|(path, line, (pair, disorder))| PairLine { path, line, pair, disorder }))
    }
}
