//! Reading tensors by name, streamed.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::header::{Dtype, Entry, FLOATS, Header};
use super::writer::Writer;
use crate::Result;
use crate::format::{Elem, Sink, Source, Span};

/// The largest header, as in the reference implementation of the format.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header length.
const LENGTH_BYTES: u64 = 8;

/// An open safetensors file.
#[derive(Debug)]
pub struct SafeTensors<R = File> {
    source: Source<R>,
    header: Header,
    data: u64,
}

impl SafeTensors<File> {
    /// Opens a file and checks its header against its size.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Source::open(path)?)
    }
}

impl<R: Read + Seek> SafeTensors<R> {
    /// Checks the header against the size; reads no tensor yet.
    pub fn new(mut source: Source<R>) -> Result<Self> {
        if source.len() < LENGTH_BYTES {
            let (found, expected) = (source.len(), "at least 8 bytes, the length of a safetensors header");
            return Err(source.field("file size", format!("{found} bytes"), expected));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        source.read_at(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        let most = MAX_HEADER.min(source.len() - LENGTH_BYTES);
        if !(2..=most).contains(&length) {
            return Err(source.field("header length", length, format!("2 to {most} (safetensors)")));
        }
        // the check above guarantees at most the size of the file
        let mut raw = vec![0; length as usize];
        source.read_at(LENGTH_BYTES, &mut raw)?;
        if raw[0] != b'{' {
            let expected = "123, an opening brace (safetensors)";
            return Err(source.field("first byte of the header", raw[0], expected));
        }
        let data = LENGTH_BYTES + length;
        let header = Header::parse(raw, source.len() - data)
            .map_err(|wrong| source.field(wrong.field, wrong.found, wrong.expected))?;
        Ok(Self { source, header, data })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Where every tensor is, in the order of the header.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        self.header.entries().iter().map(|entry| Span {
            name: entry.name.clone(),
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            file: self.path().to_owned(),
            offset: self.data + entry.begin,
        })
    }

    /// An error about one field of this file.
    pub fn field(
        &self,
        field: impl Into<String>,
        found: impl ToString,
        expected: impl ToString,
    ) -> crate::Error {
        self.source.field(field, found, expected)
    }

    /// The entry of a tensor that must be there.
    pub fn entry(&self, name: &str) -> Result<&Entry> {
        let found = self.header.get(name);
        found.ok_or_else(|| self.source.field(format!("tensor `{name}`"), "missing", "in the file"))
    }

    /// The entry of a tensor that must be there and have a type that can be converted to f32, with that type.
    pub fn float_entry(&self, name: &str) -> Result<(&Entry, Elem)> {
        let entry = self.entry(name)?;
        let elem = entry.dtype.elem();
        let elem =
            elem.ok_or_else(|| self.field(format!("dtype of `{name}`"), entry.dtype.name(), FLOATS))?;
        Ok((entry, elem))
    }

    /// Fills `out` with a tensor widened to f32 (from F32, BF16 or F16).
    pub fn read_f32(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        self.read_f32_at(name, 0, out)?;
        let numel = self.entry(name)?.numel();
        if out.len() != numel {
            let expected = format!("{} elements", out.len());
            return Err(self.field(format!("size of `{name}`"), numel, expected));
        }
        Ok(())
    }

    /// Fills `out` with the elements of a tensor from `first` on, widened to f32.
    pub fn read_f32_at(&mut self, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        let (entry, elem) = self.float_entry(name)?;
        let numel = entry.numel();
        if first.checked_add(out.len()).is_none_or(|end| end > numel) {
            let expected = format!("at least {} elements", first.saturating_add(out.len()));
            return Err(self.source.field(format!("size of `{name}`"), numel, expected));
        }
        let offset = self.data + entry.begin + first as u64 * elem.size() as u64;
        self.source.read_f32(offset, elem, out)
    }

    /// Fills `out` with the bytes of a tensor from byte `first` on.
    pub fn read_bytes_at(&mut self, name: &str, first: usize, out: &mut [u8]) -> Result<()> {
        let entry = self.entry(name)?;
        let (begin, bytes) = (entry.begin, entry.end - entry.begin);
        let wanted = first as u64 + out.len() as u64;
        if wanted > bytes {
            let expected = format!("at least {wanted} bytes");
            return Err(self.source.field(format!("size of `{name}`"), bytes, expected));
        }
        self.source.read_at(self.data + begin + first as u64, out)
    }

    /// A whole tensor widened to f32.
    pub fn read_f32_vec(&mut self, name: &str) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.float_entry(name)?.0.numel()];
        self.read_f32(name, &mut out)?;
        Ok(out)
    }

    /// A whole I32 tensor.
    pub fn read_i32(&mut self, name: &str) -> Result<Vec<i32>> {
        let entry = self.entry(name)?;
        if entry.dtype != Dtype::I32 {
            return Err(self.source.field(format!("dtype of `{name}`"), entry.dtype.name(), "I32"));
        }
        let mut out = vec![0; entry.numel()];
        let offset = self.data + entry.begin;
        self.source.read_i32(offset, &mut out)?;
        Ok(out)
    }

    /// Calls `each` with the bytes of a tensor, some at a time.
    pub fn for_each_chunk(&mut self, name: &str, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let entry = self.entry(name)?;
        let (offset, len) = (self.data + entry.begin, entry.end - entry.begin);
        self.source.for_each_chunk(offset, len, each)
    }

    /// The CRC-32 of a tensor's bytes.
    pub fn crc32(&mut self, name: &str) -> Result<u32> {
        let entry = self.entry(name)?;
        let (offset, len) = (self.data + entry.begin, entry.end - entry.begin);
        self.source.crc32(offset, len)
    }

    /// Writes the file again, byte for byte.
    pub fn copy_to(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        let names: Vec<String> = self.header.file_order().map(|entry| entry.name.clone()).collect();
        let mut writer = Writer::new(sink, self.header.clone())?;
        for name in names {
            self.copy_tensor(&name, &mut writer)?;
        }
        writer.finish()
    }

    /// Writes one tensor as the next of `writer`, byte for byte.
    pub fn copy_tensor(&mut self, name: &str, writer: &mut Writer<'_, '_>) -> Result<()> {
        let entry = self.entry(name)?;
        let (numel, dtype) = (entry.numel(), entry.dtype);
        writer.put_with(name, dtype, numel, |sink| self.for_each_chunk(name, |chunk| sink.put(chunk)))
    }
}
