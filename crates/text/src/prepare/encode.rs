//! A unit of work to tokens, on any thread.

use std::path::Path;

use super::journal::Counts;
use crate::read::{
    Content, Document, DocumentHash, DocumentPart, InputEnd, Line, Unit, Use, numbered, parse_line,
};
use crate::tokenizer::TextEncoder;
use crate::{Error, Result};

/// A document, or a part of one, in [`Encoded::tokens`].
pub struct Piece {
    /// The hash of the whole document; `None` for a part that is not its first.
    pub hash: Option<DocumentHash>,
    pub purpose: Option<Use>,
    pub tokens: usize,
    pub bytes: u64,
}

/// A unit as tokens.
pub struct Encoded {
    pub number: u64,
    pub crc: u32,
    pub read: u64,
    pub end: Option<InputEnd>,
    pub pieces: Vec<Piece>,
    pub tokens: Vec<u32>,
    pub counts: Counts,
    /// The first record that is invalid; what came before it is in `pieces`.
    pub failed: Option<Error>,
}

/// One thread's work.
pub struct Work<'a> {
    pub encoder: TextEncoder<'a>,
    pub eot: u32,
    pub field: &'a str,
    pub skip_bad: bool,
}

impl Work<'_> {
    /// Encodes a unit; `path` is its input, for errors.
    pub fn encode(&mut self, unit: Unit, path: &Path) -> Encoded {
        let mut out = Encoded {
            number: unit.number,
            crc: unit.crc,
            read: unit.read,
            end: unit.end,
            pieces: Vec::new(),
            tokens: Vec::new(),
            counts: Counts { missing: unit.missing, ..Counts::default() },
            failed: None,
        };
        out.failed = self.content(unit.content, path, &mut out).err();
        out
    }

    fn content(&mut self, content: Content, path: &Path, out: &mut Encoded) -> Result<()> {
        match content {
            Content::NotText => out.counts.not_text += 1,
            Content::Part(part) => self.part(&part, out)?,
            Content::Documents(documents) => {
                documents.iter().try_for_each(|document| self.document(document, out))?;
            }
            Content::Lines { first, bytes } => {
                for (number, line) in numbered(first, &bytes) {
                    match parse_line(line, self.field) {
                        Line::Blank => {}
                        Line::Bad(_) if self.skip_bad => out.counts.bad += 1,
                        Line::Bad(problem) => {
                            return Err(Error::Record {
                                path: path.to_owned(),
                                unit: "line",
                                number,
                                problem,
                            });
                        }
                        Line::Text(text, replaced) => {
                            out.counts.replaced += replaced;
                            self.whole(text.as_bytes(), None, out)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn document(&mut self, document: &Document, out: &mut Encoded) -> Result<()> {
        self.whole(&document.bytes, document.purpose, out)
    }

    fn whole(&mut self, bytes: &[u8], purpose: Option<Use>, out: &mut Encoded) -> Result<()> {
        if bytes.trim_ascii().is_empty() {
            out.counts.empty += 1;
            return Ok(());
        }
        self.piece(bytes, Some(DocumentHash::of(bytes)), purpose, out)
    }

    fn part(&mut self, part: &DocumentPart, out: &mut Encoded) -> Result<()> {
        out.counts.forced_cuts += u64::from(part.forced);
        self.piece(&part.bytes, part.first.then_some(part.hash), part.purpose, out)
    }

    fn piece(
        &mut self,
        bytes: &[u8],
        hash: Option<DocumentHash>,
        purpose: Option<Use>,
        out: &mut Encoded,
    ) -> Result<()> {
        let before = out.tokens.len();
        if hash.is_some() {
            out.tokens.push(self.eot);
        }
        out.counts.replaced += self.encoder.encode(bytes, &mut out.tokens)?;
        let tokens = out.tokens.len() - before;
        out.pieces.push(Piece { hash, purpose, tokens, bytes: bytes.len() as u64 });
        Ok(())
    }
}
