//! A checkpoint that several processes write together, each what it has: the same bytes as one process writes. One of them makes the
//! folder and its files, at their full size and with their headers; all write their parts to their places, and tell it the
//! checksums, of which it makes those of the files; it writes the manifest, and renames the folder.

use super::super::atomic::{self, NewFolder, Placed};
use super::super::hf::{self, HF_CONFIG, HF_INDEX, WeightsFile, WeightsLayout};
use super::super::sink::Sink;
use super::writer::{Job, PoolsFile, expect_bytes, is_finite, widen};
use super::{CheckpointParts, MASTER, STATE, Written, is_ours, stored_name};
use crate::model::TensorSpec;
use crate::{Error, Result};
use ironhorse_core::Pool;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

/// Elements of a tensor of a pool that a process has, and writes. Of the weights always a whole tensor, which may be stored in
/// another order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The pool.
    pub pool: Pool,
    /// The tensor's index in the parameter table.
    pub index: usize,
    /// Its elements.
    pub elements: Range<usize>,
}

/// Bytes of a file that a process has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    file: usize,
    at: u64,
    bytes: u64,
    crc32: u32,
}

/// What a process has written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    extents: Vec<Extent>,
    /// Tensors with a NaN or an infinity in what it wrote of them.
    non_finite: Vec<String>,
}

/// Where everything is in the files of a checkpoint. All processes of a run have the same.
pub struct SharedLayout {
    files: Vec<SharedFile>,
    /// File and first byte of each tensor.
    places: HashMap<(Pool, usize), (usize, u64)>,
    table: Vec<TensorSpec>,
    index: Option<String>,
}

struct SharedFile {
    name: String,
    /// The header.
    start: Vec<u8>,
    bytes: u64,
}

/// The CRC-32 of two neighbours: of this many bytes, and of those before.
fn joined(before: (u32, u64), after: (u32, u64)) -> u32 {
    let mut crc = crc32fast::Hasher::new_with_initial_len(before.0, before.1);
    crc.combine(&crc32fast::Hasher::new_with_initial_len(after.0, after.1));
    crc.finalize()
}

impl SharedLayout {
    /// That of a checkpoint of whole weights, not of adapters.
    pub fn new(parts: &CheckpointParts<'_>) -> Result<Self> {
        parts.config.validate()?;
        let table = parts.model().tensors();
        let weights = WeightsLayout::new(parts.config, &parts.weights_options())?;
        let mut all = Self { files: Vec::new(), places: HashMap::new(), table, index: weights.index };
        for WeightsFile { name, header, tensors } in weights.files {
            all.add(name, &header, tensors.map(|index| (Pool::Params, index)));
        }
        let master = parts.precision.has_master().then_some((MASTER, &[Pool::Master][..]));
        for (stem, pools) in master.into_iter().chain([(STATE, &[Pool::Moment1, Pool::Moment2][..])]) {
            for PoolsFile { name, header, tensors } in parts.pools_files(&all.table, stem, pools)? {
                all.add(name, &header, tensors.into_iter());
            }
        }
        Ok(all)
    }

    fn add(
        &mut self,
        name: String,
        header: &super::super::safetensors::Header,
        tensors: impl Iterator<Item = (Pool, usize)>,
    ) {
        let (start, file) = (header.start(), self.files.len());
        let first = start.len() as u64;
        for (tensor, entry) in tensors.zip(header.file_order()) {
            self.places.insert(tensor, (file, first + entry.begin));
        }
        self.files.push(SharedFile { name, bytes: first + header.data_len(), start });
    }

    /// Makes the folder and its files, for all.
    pub fn begin(&self, place: &Path) -> Result<NewFolder> {
        let folder = NewFolder::create(place, is_ours)?;
        for SharedFile { name, start, bytes } in &self.files {
            Placed::create(&folder.at().join(name), start, *bytes)?;
        }
        Ok(folder)
    }

    /// Writes shares of a process into the folder that another has made; `read(number)` gives the bytes of one of them, and is
    /// called in their order.
    pub fn write<'a>(
        &self,
        folder: &Path,
        parts: &CheckpointParts<'_>,
        shares: &[Share],
        mut read: impl FnMut(usize) -> Result<Cow<'a, [u8]>>,
    ) -> Result<Report> {
        let mut files: BTreeMap<usize, Placed> = BTreeMap::new();
        let mut report = Report::default();
        for (number, share) in shares.iter().enumerate() {
            let (spec, dtype) = (&self.table[share.index], parts.precision.of(share.pool));
            let (length, bytes) = (share.elements.len() * dtype.size(), read(number)?);
            if bytes.len() != length {
                let (name, found) = (&spec.name, bytes.len());
                let text = format!("the copy of the state has {found} bytes of `{name}`, expected {length}");
                return Err(ironhorse_core::Error::Program(text).into());
            }
            let bytes: &[u8] = &bytes;
            let Some(&(file, first)) = self.places.get(&(share.pool, share.index)) else {
                let text = format!("a checkpoint has no `{}` of the {}", spec.name, share.pool.name());
                return Err(ironhorse_core::Error::Program(text).into());
            };
            let at = first + (share.elements.start * dtype.size()) as u64;
            let name =
                || if share.pool == Pool::Params { spec.name.clone() } else { stored_name(share.pool, spec) };
            if !is_finite(dtype, bytes) && report.non_finite.last() != Some(&name()) {
                report.non_finite.push(name());
            }
            let out = match files.entry(file) {
                std::collections::btree_map::Entry::Occupied(open) => open.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    entry.insert(Placed::open(&folder.join(&self.files[file].name))?)
                }
            };
            if share.pool == Pool::Params {
                let stored = self.stored(parts, spec, bytes)?;
                out.put(at, &stored)?;
                report.add(Extent::new(file, at, &stored));
            } else {
                out.put(at, bytes)?;
                report.add(Extent::new(file, at, bytes));
            }
        }
        files.into_values().try_for_each(Placed::finish)?;
        Ok(report)
    }

    /// A tensor of the weights as it is stored.
    fn stored(&self, parts: &CheckpointParts<'_>, spec: &TensorSpec, bytes: &[u8]) -> Result<Vec<u8>> {
        let dtype = parts.precision.weights;
        expect_bytes(spec, dtype, bytes)?;
        let (mut values, mut turned) = (vec![0.0; spec.shape.numel()], Vec::new());
        widen(dtype, bytes, &mut values);
        let values = hf::stored_values(parts.config, spec, &values, &mut turned);
        let mut stored = Vec::with_capacity(values.len() * dtype.size());
        Sink::new(&mut stored, Path::new(&spec.name)).put_f32(parts.weights_options().elem, values)?;
        Ok(stored)
    }

    /// Completes the folder with what all have reported, and puts it into its place. Every byte must have been written once.
    pub fn finish(
        &self,
        folder: NewFolder,
        parts: &CheckpointParts<'_>,
        reports: &[Report],
    ) -> Result<Written> {
        let mut crc32 = BTreeMap::new();
        for (number, file) in self.files.iter().enumerate() {
            let mut extents: Vec<&Extent> =
                reports.iter().flat_map(|report| &report.extents).filter(|one| one.file == number).collect();
            extents.sort_by_key(|extent| extent.at);
            let (mut crc, mut end) = (crc32fast::hash(&file.start), file.start.len() as u64);
            for extent in extents {
                if extent.at != end {
                    return Err(incomplete(folder.at(), file, end, extent.at));
                }
                crc = joined((crc, end), (extent.crc32, extent.bytes));
                end += extent.bytes;
            }
            if end != file.bytes {
                return Err(incomplete(folder.at(), file, end, file.bytes));
            }
            crc32.insert(file.name.clone(), crc);
        }
        let config = hf::write_config_json(folder.at(), parts.config, &parts.weights_options())?;
        crc32.insert(HF_CONFIG.to_owned(), config);
        if let Some(text) = &self.index {
            crc32.insert(
                HF_INDEX.to_owned(),
                atomic::write_bytes(&folder.at().join(HF_INDEX), text.as_bytes())?,
            );
        }
        let mut non_finite: Vec<String> =
            reports.iter().flat_map(|report| report.non_finite.iter().cloned()).collect();
        non_finite.dedup();
        let mut job = Job { folder: folder.at(), parts, table: Vec::new(), crc32, non_finite };
        job.tokenizer()?;
        let written = job.finish()?;
        folder.commit()?;
        Ok(written)
    }
}

fn incomplete(folder: &Path, file: &SharedFile, found: u64, expected: u64) -> Error {
    let found = format!("written by all ranks together up to byte {found}");
    Error::field(
        &folder.join(&file.name),
        "contents",
        found,
        format!("up to byte {expected}, each byte once"),
    )
}

impl Extent {
    fn new(file: usize, at: u64, bytes: &[u8]) -> Self {
        Self { file, at, bytes: bytes.len() as u64, crc32: crc32fast::hash(bytes) }
    }
}

impl Report {
    /// Adds an extent, joined with the last one where it follows it.
    fn add(&mut self, extent: Extent) {
        match self.extents.last_mut() {
            _ if extent.bytes == 0 => {}
            Some(last) if last.file == extent.file && last.at + last.bytes == extent.at => {
                last.crc32 = joined((last.crc32, last.bytes), (extent.crc32, extent.bytes));
                last.bytes += extent.bytes;
            }
            _ => self.extents.push(extent),
        }
    }
}
