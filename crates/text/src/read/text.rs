//! Text files: one document each, or several with a delimiter between them. A large document is read twice, for its
//! hash and for its parts, so that memory does not grow with it.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::inputs::{Input, Packing};
use super::raw::Raw;
use super::{Content, Document, DocumentHash, DocumentPart, ReadSettings, Use};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The last place in a text where it may be cut.
pub type CutAt<'a> = &'a (dyn Fn(&[u8]) -> Option<usize> + Sync);

/// The bytes after which a stretch without any place to cut is cut by force.
const MOST_UNCUT: usize = 64 << 20;
/// The bytes at the beginning of a file among which a zero byte says that it is not text.
const LOOKED_AT: usize = 8192;

/// Reads a text file.
pub struct Text {
    raw: Raw,
    buffer: Vec<u8>,
    state: State,
}

enum State {
    Start,
    Delimited { searched: usize },
    Parts(Parts),
    Done,
}

/// A large document on its way.
struct Parts {
    hash: DocumentHash,
    purpose: Option<Use>,
    first: bool,
    /// Bytes up to the part for validation.
    head: Option<u64>,
    done: u64,
}

/// The end of a part of a document.
struct Cut {
    at: usize,
    /// Whether the ids may differ from those of the whole.
    forced: bool,
    /// Whether the document ends here.
    end: bool,
}

impl Cut {
    fn at(at: usize) -> Self {
        Self { at, forced: false, end: false }
    }

    fn and_end(self) -> Self {
        Self { end: true, ..self }
    }
}

/// What readers need beside the input.
#[derive(Clone, Copy)]
pub struct Around<'a> {
    pub settings: &'a ReadSettings,
    pub cut: CutAt<'a>,
    /// The file that keeps a large document of standard input until it was read.
    pub spool: Option<&'a Path>,
}

impl Text {
    pub fn new(raw: Raw) -> Self {
        Self { raw, buffer: Vec::new(), state: State::Start }
    }

    pub fn raw(&self) -> &Raw {
        &self.raw
    }

    pub fn into_raw(self) -> Raw {
        self.raw
    }

    /// The next content; `None` at the end.
    pub fn next(&mut self, input: &Input, around: Around<'_>) -> Result<Option<Content>> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Start => self.start(input, around),
            State::Delimited { searched } => self.delimited(searched, around.settings),
            State::Parts(parts) => self.parts(parts, around),
            State::Done => Ok(None),
        }
    }

    fn start(&mut self, input: &Input, around: Around<'_>) -> Result<Option<Content>> {
        let settings = around.settings;
        let most = if settings.delimiter.is_some() { settings.unit_bytes } else { settings.large_bytes };
        let count = self.raw.fill(most, &mut self.buffer)?;
        if memchr::memchr(0, &self.buffer[..self.buffer.len().min(LOOKED_AT)]).is_some() {
            if settings.skip_bad {
                return Ok(Some(Content::NotText));
            }
            let problem = "holds zero bytes, expected text; --skip-bad leaves such files out and counts them";
            return Err(Error::input(&input.path, problem));
        }
        if settings.delimiter.is_some() {
            return self.split_off(0, count < most, settings);
        }
        if count < most {
            return Ok((!self.buffer.is_empty()).then(|| self.whole(settings)));
        }
        let (hash, len) = self.measure(input, around.spool)?;
        let head = settings.val_tail.map(|tail| (len as f64 * (1.0 - tail)) as u64);
        let purpose = head.map(|_| Use::Train);
        self.parts(Parts { hash, purpose, first: true, head, done: 0 }, around)
    }

    /// A document that is in memory as a whole.
    fn whole(&mut self, settings: &ReadSettings) -> Content {
        let mut bytes = std::mem::take(&mut self.buffer);
        let Some(tail) = settings.val_tail else {
            return Content::Documents(vec![Document { bytes, purpose: None }]);
        };
        let head = (bytes.len() as f64 * (1.0 - tail)) as usize;
        let tail = bytes.split_off(line_before(&bytes, head));
        let parts = [(bytes, Use::Train), (tail, Use::Val)].into_iter();
        Content::Documents(parts.map(|(bytes, of)| Document { bytes, purpose: Some(of) }).collect())
    }

    /// The hash and the length of a document that is only begun to be read. What was read is put back.
    fn measure(&mut self, input: &Input, spool: Option<&Path>) -> Result<(DocumentHash, u64)> {
        let mut hash = Sha256::new();
        let (mut len, mut chunk) = (0, Vec::new());
        if !input.is_stdin() {
            let mut again = Raw::open(input)?;
            while again.fill(1 << 20, &mut chunk)? > 0 {
                hash.update(&chunk);
                len += chunk.len() as u64;
                chunk.clear();
            }
            return Ok((DocumentHash::finish(hash), len));
        }
        let path = spool.ok_or_else(|| {
            Error::input(&input.path, "the text on standard input is too large to be read twice; use a file")
        })?;
        let failed = |source| Error::io(path, "write", source);
        let mut file = File::create(path).map_err(failed)?;
        chunk = std::mem::take(&mut self.buffer);
        while !chunk.is_empty() {
            file.write_all(&chunk).map_err(failed)?;
            hash.update(&chunk);
            len += chunk.len() as u64;
            chunk.clear();
            self.raw.fill(1 << 20, &mut chunk)?;
        }
        let file = File::open(path).map_err(|source| Error::io(path, "open", source))?;
        let _ = std::fs::remove_file(path); // it stays readable until it is closed
        self.raw = Raw::new(&Input { packing: Packing::Plain, ..input.clone() }, Box::new(file))?;
        Ok((DocumentHash::finish(hash), len))
    }

    fn parts(&mut self, mut parts: Parts, around: Around<'_>) -> Result<Option<Content>> {
        let wanted = around.settings.unit_bytes.saturating_sub(self.buffer.len());
        let ended = wanted > 0 && self.raw.fill(wanted, &mut self.buffer)? < wanted;
        let cut = if ended { Cut::at(self.buffer.len()).and_end() } else { self.find_cut(around)? };
        let head = parts.head.and_then(|head| usize::try_from(head - parts.done).ok());
        let (at, at_head) = match head.filter(|&head| head <= cut.at) {
            Some(head) => (line_before(&self.buffer, head), true),
            None => (cut.at, false),
        };
        let rest = self.buffer.split_off(at);
        let bytes = std::mem::replace(&mut self.buffer, rest);
        let forced = cut.forced && !at_head;
        let part =
            DocumentPart { bytes, first: parts.first, hash: parts.hash, purpose: parts.purpose, forced };
        parts.done += at as u64;
        parts.first = false;
        if at_head {
            // the rest is a document of its own
            let hash = DocumentHash(parts.hash.0 ^ 1);
            parts = Parts { hash, purpose: Some(Use::Val), first: true, head: None, done: parts.done };
        }
        if !cut.end || at_head {
            self.state = State::Parts(parts);
        }
        Ok(Some(Content::Part(part)))
    }

    /// Finds the place to cut the buffer; reads on while there is none.
    fn find_cut(&mut self, around: Around<'_>) -> Result<Cut> {
        let mut window = around.settings.unit_bytes.min(self.buffer.len());
        loop {
            if let Some(at) = (around.cut)(&self.buffer[..window]).filter(|&at| at > 0) {
                return Ok(Cut::at(at));
            }
            if window < self.buffer.len() {
                window = self.buffer.len();
                continue;
            }
            if self.buffer.len() >= MOST_UNCUT {
                let at = Tokenizer::forced_cut(&self.buffer);
                return Ok(Cut { at, forced: true, end: false });
            }
            // twice as much, so that the search looks at every byte only a few times
            let more = self.buffer.len().max(1);
            if self.raw.fill(more, &mut self.buffer)? < more {
                return Ok(Cut::at(self.buffer.len()).and_end());
            }
            window = self.buffer.len();
        }
    }

    fn delimited(&mut self, searched: usize, settings: &ReadSettings) -> Result<Option<Content>> {
        let count = self.raw.fill(settings.unit_bytes, &mut self.buffer)?;
        self.split_off(searched, count < settings.unit_bytes, settings)
    }

    /// The documents that are complete in the buffer, which holds no delimiter before `searched`.
    fn split_off(
        &mut self,
        searched: usize,
        ended: bool,
        settings: &ReadSettings,
    ) -> Result<Option<Content>> {
        let delimiter = settings.delimiter.as_deref().unwrap_or("\0").as_bytes();
        let (mut documents, mut start) = (Vec::new(), 0);
        for at in memchr::memmem::find_iter(&self.buffer[searched..], delimiter) {
            let end = searched + at;
            documents.push(between(&self.buffer[start..end]));
            start = end + delimiter.len();
        }
        self.buffer.drain(..start);
        if ended {
            documents.push(between(&self.buffer));
            self.buffer.clear();
            return Ok(Some(Content::Documents(documents)));
        }
        self.state = State::Delimited { searched: self.buffer.len().saturating_sub(delimiter.len() - 1) };
        Ok(Some(Content::Documents(documents)))
    }
}

/// A document without the line ends next to the delimiters.
fn between(bytes: &[u8]) -> Document {
    let bytes = bytes.strip_prefix(b"\r\n").or_else(|| bytes.strip_prefix(b"\n")).unwrap_or(bytes);
    let bytes = bytes.strip_suffix(b"\r\n").or_else(|| bytes.strip_suffix(b"\n")).unwrap_or(bytes);
    Document { bytes: bytes.to_vec(), purpose: None }
}

/// The end of the last line before `at`, or `at` itself, moved back to the start of a character.
fn line_before(bytes: &[u8], at: usize) -> usize {
    if let Some(line) = memchr::memrchr(b'\n', &bytes[..at]) {
        return line + 1;
    }
    let back =
        (at.saturating_sub(3)..=at).rev().find(|&at| bytes.get(at).is_none_or(|byte| byte & 0xc0 != 0x80));
    back.unwrap_or(at)
}
