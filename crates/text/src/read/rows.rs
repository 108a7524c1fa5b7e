//! Parquet files: one document per row, out of one column.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::{ChunkReader, FileReader, SerializedFileReader};
use sha2::{Digest, Sha256};

use super::{Content, Document, InputEnd, ReadSettings};
use crate::contained::contained;
use crate::{Error, Result};

/// Why a file is refused on which the crate `parquet` panics.
const DAMAGED: &str = "it is damaged";
/// Rows decoded at a time.
const ROWS: usize = 256;

/// Reads one column of a parquet file.
pub struct Rows<R: ChunkReader + 'static = File> {
    reader: SerializedFileReader<R>,
    column: usize,
    group: usize,
    values: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Bytes of the row groups that were read, as they are in the file.
    read: u64,
    missing: u64,
}

fn wrong(path: &Path, error: impl std::fmt::Display) -> Error {
    Error::input(path, format!("is not a valid parquet file ({error})"))
}

impl<R: ChunkReader + 'static> Rows<R> {
    /// Checks the column.
    pub fn new(file: R, path: &Path, field: &str) -> Result<Self> {
        contained(|| Self::open(file, path, field)).unwrap_or_else(|| Err(wrong(path, DAMAGED)))
    }

    fn open(file: R, path: &Path, field: &str) -> Result<Self> {
        let reader = SerializedFileReader::new(file).map_err(|error| wrong(path, error))?;
        let schema = reader.metadata().file_metadata().schema_descr();
        let column = schema.columns().iter().position(|column| column.path().string() == field);
        let column = column.ok_or_else(|| {
            let names: Vec<_> =
                schema.columns().iter().map(|column| column.path().string()).take(20).collect();
            Error::input(
                path,
                format!("has no column `{field}`, only {}; --field names another", names.join(", ")),
            )
        })?;
        let of = schema.column(column);
        if of.physical_type() != Type::BYTE_ARRAY || of.max_rep_level() > 0 {
            let list = if of.max_rep_level() > 0 { "lists of " } else { "" };
            let found = format!("{list}{}", of.physical_type());
            return Err(Error::input(
                path,
                format!("column `{field}` holds {found}, expected text (BYTE_ARRAY)"),
            ));
        }
        Ok(Self { reader, column, group: 0, values: None, read: 0, missing: 0 })
    }

    /// Bytes of the file that were read.
    pub fn position(&self) -> u64 {
        self.read
    }

    /// Rows without a value since the last call.
    pub fn take_missing(&mut self) -> u64 {
        std::mem::take(&mut self.missing)
    }

    /// The next rows, at least `unit_bytes` of them; `None` at the end.
    pub fn next(&mut self, settings: &ReadSettings, path: &Path) -> Result<Option<Content>> {
        contained(|| self.read_rows(settings, path)).unwrap_or_else(|| Err(wrong(path, DAMAGED)))
    }

    fn read_rows(&mut self, settings: &ReadSettings, path: &Path) -> Result<Option<Content>> {
        let (mut documents, mut bytes) = (Vec::new(), 0);
        while bytes < settings.unit_bytes {
            let Some(values) = &mut self.values else {
                if self.group == self.reader.num_row_groups() {
                    break;
                }
                let group = self.reader.get_row_group(self.group).map_err(|error| wrong(path, error))?;
                self.read += u64::try_from(group.metadata().compressed_size()).unwrap_or(0);
                let column = group.get_column_reader(self.column).map_err(|error| wrong(path, error))?;
                let ColumnReader::ByteArrayColumnReader(column) = column else {
                    return Err(wrong(path, "the type of a column changes"));
                };
                self.values = Some(column);
                self.group += 1;
                continue;
            };
            let (mut found, mut levels): (Vec<ByteArray>, Vec<i16>) = (Vec::new(), Vec::new());
            let (rows, present, _) = values
                .read_records(ROWS, Some(&mut levels), None, &mut found)
                .map_err(|error| wrong(path, error))?;
            if rows == 0 {
                self.values = None;
                continue;
            }
            self.missing += rows.saturating_sub(present) as u64;
            for value in found {
                bytes += value.len();
                documents.push(Document { bytes: value.data().to_vec(), purpose: None });
            }
        }
        let any = !documents.is_empty() || self.missing > 0;
        Ok(any.then_some(Content::Documents(documents)))
    }
}

/// The size and the SHA-256 of a file.
pub fn hash_file(path: &Path) -> Result<InputEnd> {
    let failed = |source| Error::io(path, "read", source);
    let mut file = File::open(path).map_err(|source| Error::io(path, "open", source))?;
    let (mut hash, mut bytes, mut chunk) = (Sha256::new(), 0, vec![0; 1 << 18]);
    loop {
        match file.read(&mut chunk).map_err(failed)? {
            0 => return Ok(InputEnd { bytes, sha256: format!("{:x}", hash.finalize()) }),
            count => {
                hash.update(&chunk[..count]);
                bytes += count as u64;
            }
        }
    }
}
