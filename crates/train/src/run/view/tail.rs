//! A log that grows while it is read, and that a resume or a return to a checkpoint cuts back and writes anew.

use super::Table;
use crate::run::metrics::Metrics;
use crate::{Error, Result};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

/// How many of the bytes read last are remembered, to see whether the file was written anew.
const REMEMBERED: usize = 256;
/// The least that is worth a thread of its own.
const PIECE: usize = 1 << 20;

/// How far a log was read.
#[derive(Debug, Default)]
pub struct Tail {
    /// Bytes of whole lines that were read.
    offset: u64,
    /// Lines that were read.
    lines: u64,
    /// The last of these bytes.
    last: Vec<u8>,
}

/// What is new in a log.
#[derive(Debug, Default)]
pub struct News {
    /// What was read before does not count any longer.
    pub starts_again: bool,
    /// The new steps.
    pub table: Table,
    /// How many new lines cannot be read, and what is wrong with the first.
    pub unreadable: Option<(u64, String)>,
}

impl Tail {
    /// Reads what is new. A last line without its end is left for the next time; no file is an empty one.
    pub fn read(&mut self, path: &Path) -> Result<News> {
        let io = |what| move |error| Error::io(path, what, error);
        let mut file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let starts_again = self.offset > 0;
                *self = Self::default();
                return Ok(News { starts_again, ..News::default() });
            }
            opened => opened.map_err(io("read"))?,
        };
        let mut news = News::default();
        if self.offset > 0 && !self.is_same(&mut file).map_err(io("read"))? {
            *self = Self::default();
            news.starts_again = true;
        }
        file.seek(SeekFrom::Start(self.offset)).map_err(io("read"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io("read"))?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let bytes = &bytes[..whole];
        if bytes.is_empty() {
            return Ok(news);
        }
        let (table, unreadable, lines) = parse(bytes);
        news.table = table;
        news.unreadable = unreadable.map(|(count, line, error)| {
            let line = self.lines + line + 1;
            (count, format!("line {line} is not one JSON object with a step's metrics ({error})"))
        });
        (self.offset, self.lines) = (self.offset + whole as u64, self.lines + lines);
        self.last.extend_from_slice(&bytes[bytes.len().saturating_sub(REMEMBERED)..]);
        self.last.drain(..self.last.len().saturating_sub(REMEMBERED));
        Ok(news)
    }

    /// Whether the file still has what was read last where it was.
    fn is_same(&self, file: &mut File) -> std::io::Result<bool> {
        if file.metadata()?.len() < self.offset {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.offset - self.last.len() as u64))?;
        let mut there = vec![0; self.last.len()];
        match file.read_exact(&mut there) {
            Ok(()) => Ok(there == self.last),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Unreadable lines: how many, and the number (from 0) and error of the first.
type Unreadable = Option<(u64, u64, String)>;

/// The steps of whole lines, what cannot be read, and how many lines there are. Long logs are read by several threads.
fn parse(bytes: &[u8]) -> (Table, Unreadable, u64) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let size = (bytes.len() / threads + 1).max(PIECE);
    let (mut pieces, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let least = size.min(rest.len());
        let end =
            rest[least - 1..].iter().position(|&byte| byte == b'\n').map_or(rest.len(), |at| least + at);
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    let (first, others) = pieces.split_first().map_or((&[][..], &[][..]), |(first, others)| (*first, others));
    std::thread::scope(|scope| {
        let others: Vec<_> = others.iter().map(|piece| scope.spawn(|| parse_piece(piece))).collect();
        let (mut table, mut unreadable, mut lines) = parse_piece(first);
        for other in others {
            // a thread of ours does not panic; if it did, its steps are missing
            let Ok((part, bad, count)) = other.join() else { continue };
            table.append(part);
            unreadable = match (unreadable, bad) {
                (Some((a, line, error)), Some((b, ..))) => Some((a + b, line, error)),
                (None, Some((count, line, error))) => Some((count, lines + line, error)),
                (before, None) => before,
            };
            lines += count;
        }
        (table, unreadable, lines)
    })
}

fn parse_piece(bytes: &[u8]) -> (Table, Unreadable, u64) {
    let (mut table, mut unreadable, mut lines): (Table, Unreadable, u64) = (Table::default(), None, 0);
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        if !line.trim_ascii().is_empty() {
            match serde_json::from_slice::<Metrics>(line) {
                Ok(metrics) => table.push(metrics),
                Err(error) => {
                    let (count, _, _) = unreadable.get_or_insert_with(|| (0, lines, error.to_string()));
                    *count += 1;
                }
            }
        }
        lines += 1;
    }
    (table, unreadable, lines)
}
