//! Debug states `gpt2_*_debug_state.bin`, version 2: one batch, its logits and loss, and the gradient of every
//! parameter.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::header::{BinHeader, HEADER_BYTES, magic};
use super::safetensors::Dtype;
use super::shards::check_tokens;
use super::stacked::{Stacked, expect_numel, filled, total_elements};
use super::{Elem, Sink, Source, Span, atomic};
use crate::model::{Gpt2Config, TensorSpec};
use crate::{Error, Result};

/// An open debug state.
#[derive(Debug)]
pub struct DebugState<R = File> {
    source: Source<R>,
    header: BinHeader,
    vocab_size: usize,
    places: Places,
    stacked: Stacked,
}

/// The byte offsets of the parts. Valid for sizes whose sum fits in u64.
#[derive(Clone, Copy, Debug)]
struct Places {
    batch: usize,
    seq: usize,
    y: u64,
    logits: u64,
    loss: u64,
    grads: u64,
    end: u64,
}

impl Places {
    fn new(config: &Gpt2Config, batch: usize, seq: usize) -> Option<Self> {
        let tokens = (batch as u64).checked_mul(seq as u64)?;
        let token_bytes = tokens.checked_mul(4)?;
        let y = HEADER_BYTES.checked_add(token_bytes)?;
        let logits = y.checked_add(token_bytes)?;
        let loss = logits.checked_add(token_bytes.checked_mul(config.vocab_size as u64)?)?;
        let grads = loss.checked_add(4)?;
        let end = grads.checked_add(total_elements(config).checked_mul(4)?)?;
        Some(Self { batch, seq, y, logits, loss, grads, end })
    }
}

impl DebugState<File> {
    /// Opens the debug state of a model with these sizes.
    pub fn open(path: &Path, config: &Gpt2Config) -> Result<Self> {
        Self::new(Source::open(path)?, config)
    }
}

impl<R: Read + Seek> DebugState<R> {
    /// Checks the header, the size and the tokens.
    pub fn new(mut source: Source<R>, config: &Gpt2Config) -> Result<Self> {
        config.validate()?;
        let header = BinHeader::read(&mut source, "GPT-2 debug state", &[magic::DEBUG_STATE])?;
        header.version(&source, &[2])?;
        let batch = header.positive(&source, 2, "batch")?;
        let seq = header.positive(&source, 3, "seq")?;
        if seq > config.max_seq_len {
            let expected = format!("at most max_seq_len, {}", config.max_seq_len);
            return Err(source.field("seq", seq, expected));
        }
        let Some(places) = Places::new(config, batch, seq) else {
            return Err(source.field("batch", batch, "a batch that fits in a file"));
        };
        source.expect_len(places.end)?;
        let stacked = Stacked::new(config);
        let mut state = Self { source, header, vocab_size: config.vocab_size, places, stacked };
        state.check_tokens("x", HEADER_BYTES)?;
        state.check_tokens("y", places.y)?;
        Ok(state)
    }

    fn tokens(&self) -> usize {
        self.places.batch * self.places.seq
    }

    fn check_tokens(&mut self, name: &str, offset: u64) -> Result<()> {
        let tokens = self.read_tokens(offset)?;
        check_tokens(self.path(), &tokens, self.vocab_size, |index| format!("{name}[{index}]"))
    }

    fn read_tokens(&mut self, offset: u64) -> Result<Vec<i32>> {
        let mut tokens = vec![0; self.tokens()];
        self.source.read_i32(offset, &mut tokens)?;
        Ok(tokens)
    }

    /// Sequences in the batch (B).
    pub fn batch(&self) -> usize {
        self.places.batch
    }

    /// Tokens of a sequence (T).
    pub fn seq(&self) -> usize {
        self.places.seq
    }

    /// The header with its unnamed fields.
    pub fn header(&self) -> &BinHeader {
        &self.header
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Where everything is: `x`, `y`, `logits`, `loss`, then the gradients under their parameters' names, without the rows
    /// that pad the vocabulary.
    pub fn spans(&self) -> Vec<Span> {
        let Places { batch, seq, y, logits, loss, grads, .. } = self.places;
        let span = |name: &str, dtype, shape: &[usize], offset| Span {
            name: name.to_owned(),
            dtype,
            shape: shape.to_owned(),
            file: self.path().to_owned(),
            offset,
        };
        let mut spans = vec![
            span("x", Dtype::I32, &[batch, seq], HEADER_BYTES),
            span("y", Dtype::I32, &[batch, seq], y),
            span("logits", Dtype::F32, &[batch, seq, self.vocab_size], logits),
            span("loss", Dtype::F32, &[], loss),
        ];
        spans.extend(self.stacked.spans(self.path(), grads, Elem::F32, self.vocab_size));
        spans
    }

    /// Inputs (B, T).
    pub fn x(&mut self) -> Result<Vec<i32>> {
        self.read_tokens(HEADER_BYTES)
    }

    /// Targets (B, T).
    pub fn y(&mut self) -> Result<Vec<i32>> {
        self.read_tokens(self.places.y)
    }

    /// Elements of the logits: B * T * V, without padding.
    pub fn num_logits(&self) -> usize {
        self.tokens() * self.vocab_size
    }

    /// Reads the logits of `out.len() / V` positions, beginning with the `first` of the B * T.
    pub fn read_logits(&mut self, first: usize, out: &mut [f32]) -> Result<()> {
        let start = first.saturating_mul(self.vocab_size);
        if start.saturating_add(out.len()) > self.num_logits() {
            let asked = format!("asked for {} from position {first} on", out.len());
            return Err(self.source.field("logits", asked, format!("at most {} in all", self.num_logits())));
        }
        self.source.read_f32(self.places.logits + start as u64 * 4, Elem::F32, out)
    }

    /// The mean loss.
    pub fn loss(&mut self) -> Result<f32> {
        let mut loss = [0.0];
        self.source.read_f32(self.places.loss, Elem::F32, &mut loss)?;
        Ok(loss[0])
    }

    /// Reads the gradient of a parameter by its name in the parameter table.
    pub fn read_grad(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let (spec, offset) = &self.stacked.tensors()[self.stacked.find(name)?];
        expect_numel(name, out.len(), spec.shape.numel())?;
        self.source.read_f32(self.places.grads + offset * 4, Elem::F32, out)
    }
}

/// What goes into a debug state besides the gradients.
#[derive(Clone, Copy, Debug)]
pub struct DebugStateParts<'a> {
    /// The model's sizes.
    pub config: &'a Gpt2Config,
    /// Sequences (B).
    pub batch: usize,
    /// Tokens of a sequence (T).
    pub seq: usize,
    /// Inputs (B, T).
    pub x: &'a [i32],
    /// Targets (B, T).
    pub y: &'a [i32],
    /// Logits (B, T, V).
    pub logits: &'a [f32],
    /// The mean loss.
    pub loss: f32,
    /// The header of the file this is a copy of: its unnamed fields are kept.
    pub header: Option<&'a BinHeader>,
}

/// Writes a debug state atomically. `grad` is called once per tensor, in file order, with a zeroed buffer of its size.
pub fn write_debug_state(
    path: &Path,
    parts: &DebugStateParts<'_>,
    grad: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    atomic::write_file(path, |sink| write_debug_state_to(sink, parts, grad))
}

/// Writes a debug state into `sink`.
pub fn write_debug_state_to(
    sink: &mut Sink<'_>,
    parts: &DebugStateParts<'_>,
    mut grad: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    parts.config.validate()?;
    let (Ok(batch), Ok(seq)) = (i32::try_from(parts.batch), i32::try_from(parts.seq)) else {
        return Err(Error::field(sink.path(), "batch", parts.batch, "at most 2147483647"));
    };
    let tokens = parts.batch.saturating_mul(parts.seq);
    expect_numel("x", parts.x.len(), tokens)?;
    expect_numel("y", parts.y.len(), tokens)?;
    expect_numel("logits", parts.logits.len(), tokens.saturating_mul(parts.config.vocab_size))?;
    let base = parts.header.cloned().unwrap_or_else(|| BinHeader::new(&[]));
    base.with(&[magic::DEBUG_STATE, 2, batch, seq]).write(sink)?;
    sink.put_i32(parts.x)?;
    sink.put_i32(parts.y)?;
    sink.put_f32(Elem::F32, parts.logits)?;
    sink.put_f32(Elem::F32, &[parts.loss])?;
    let mut values = Vec::new();
    for (spec, _) in Stacked::new(parts.config).tensors() {
        filled(spec, &mut values, &mut grad)?;
        sink.put_f32(Elem::F32, &values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: Gpt2Config = Gpt2Config { padded_vocab_size: 7, ..Gpt2Config::new(4, 5, 2, 1, 2) };

    /// B 2, T 3; written without the code under test.
    fn bytes() -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [magic::DEBUG_STATE, 2, 2, 3].iter().flat_map(|f: &i32| f.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1].iter().for_each(|t: &i32| bytes.extend(t.to_le_bytes()));
        (0..2 * 3 * 5).for_each(|n| bytes.extend((n as f32).to_le_bytes()));
        bytes.extend(5.25f32.to_le_bytes());
        (0..CONFIG.num_params()).for_each(|n| bytes.extend((n as f32 + 1000.0).to_le_bytes()));
        bytes
    }

    fn open(bytes: Vec<u8>) -> Result<DebugState<std::io::Cursor<Vec<u8>>>> {
        DebugState::new(Source::memory(bytes, "s.bin"), &CONFIG)
    }

    #[test]
    fn everything_is_found() {
        let mut state = open(bytes()).unwrap();
        assert_eq!((state.batch(), state.seq()), (2, 3));
        assert_eq!(state.x().unwrap(), [0, 1, 2, 3, 4, 0]);
        assert_eq!(state.y().unwrap(), [1, 2, 3, 4, 0, 1]);
        let mut row = [0.0; 5];
        state.read_logits(5, &mut row).unwrap();
        assert_eq!(row, [25.0, 26.0, 27.0, 28.0, 29.0]);
        assert!(state.read_logits(6, &mut row).is_err());
        assert!(state.read_logits(usize::MAX, &mut row).is_err());
        assert_eq!(state.loss().unwrap(), 5.25);
        let mut grad = [0.0; 2];
        state.read_grad("h.1.ln_1.weight", &mut grad).unwrap();
        assert_eq!(grad, [1024.0, 1025.0]);
        assert!(state.read_grad("nothing", &mut grad).is_err());
    }

    #[test]
    fn the_round_trip_is_byte_identical() {
        let mut before = bytes();
        before[1023] = 1;
        let mut state = open(before.clone()).unwrap();
        let (x, y, loss) = (state.x().unwrap(), state.y().unwrap(), state.loss().unwrap());
        let mut logits = vec![0.0; state.num_logits()];
        state.read_logits(0, &mut logits).unwrap();
        let header = state.header().clone();
        let parts = DebugStateParts {
            config: &CONFIG,
            batch: 2,
            seq: 3,
            x: &x,
            y: &y,
            logits: &logits,
            loss,
            header: Some(&header),
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.bin");
        write_debug_state(&path, &parts, |spec, out| state.read_grad(&spec.name, out)).unwrap();
        assert!(std::fs::read(&path).unwrap() == before);
    }

    #[test]
    fn broken_files_are_named() {
        let patched = |at: usize, value: i32| {
            let mut bytes = bytes();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            open(bytes).unwrap_err().to_string()
        };
        assert_eq!(patched(0, 7), "s.bin: magic is 7, expected 20240327 (GPT-2 debug state)");
        assert_eq!(patched(4, 1), "s.bin: version is 1, expected 2");
        assert_eq!(patched(8, -2), "s.bin: batch (header field 2) is -2, expected at least 1");
        assert_eq!(patched(12, 5), "s.bin: seq is 5, expected at most max_seq_len, 4");
        assert!(patched(8, i32::MAX).contains("file size is"));
        assert_eq!(patched(1024 + 4, 5), "s.bin: x[1] is 5, expected a token of the vocabulary, 0 to 4");
        assert_eq!(patched(1024 + 24, -1), "s.bin: y[0] is -1, expected a token of the vocabulary, 0 to 4");
        assert!(
            open(bytes()[..1500].to_vec())
                .unwrap_err()
                .to_string()
                .contains("file size is 1500 bytes, expected")
        );
    }
}
