//! Writing a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use ironhorse_core::parallel::{self, PIECE};
use ironhorse_core::{DType, Pool, Precision, bf16_to_f32};

use super::super::hf::{self, HF_CONFIG, HfOptions, TextTokens};
use super::super::safetensors::{Dtype, Header, TensorInfo, Writer};
use super::super::tokenizer::KeptTokenizer;
use super::super::{Elem, atomic};
use super::adapter::{CheckpointAdapter, write_peft};
use super::{MASTER, STATE, TRAINER, TrainerJson, TrainerState, is_ours, stored_name};
use crate::model::{Adapted, ModelConfig, TensorSpec};
use crate::{Error, Result};

/// The contents of a checkpoint besides the tensors.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointParts<'a> {
    /// The model's sizes.
    pub config: &'a ModelConfig,
    /// The element types of the pools. Every tensor is written in the type in which the engine stores it.
    pub precision: Precision,
    /// The state of training.
    pub trainer: &'a TrainerState,
    /// The adapters that are trained in place of the model.
    pub adapter: Option<&'a CheckpointAdapter>,
    /// The tokenizer, for `generate`.
    pub tokenizer: Option<&'a KeptTokenizer>,
    /// The maximum number of bytes of tensors in one file: [`super::PART_BYTES`].
    pub part_bytes: u64,
}

impl<'a> CheckpointParts<'a> {
    /// The parts of a checkpoint without a tokenizer, in files of the usual size.
    pub fn new(config: &'a ModelConfig, precision: Precision, trainer: &'a TrainerState) -> Self {
        Self { config, precision, trainer, adapter: None, tokenizer: None, part_bytes: super::PART_BYTES }
    }

    pub(super) fn model(&self) -> Adapted {
        Adapted { config: *self.config, lora: self.adapter.map(|adapter| adapter.lora) }
    }

    /// The pools that are stored, the weights first.
    pub fn pools(precision: Precision) -> Vec<Pool> {
        let master = precision.has_master().then_some(Pool::Master);
        [Pool::Params].into_iter().chain(master).chain([Pool::Moment1, Pool::Moment2]).collect()
    }
}

/// A file of whole pools.
pub(super) struct PoolsFile {
    pub name: String,
    pub header: Header,
    /// Its tensors in the order of the file.
    pub tensors: Vec<(Pool, usize)>,
}

impl CheckpointParts<'_> {
    /// How the weights are stored.
    pub(super) fn weights_options(&self) -> HfOptions {
        let elem = if self.precision.weights == DType::BF16 { Elem::BF16 } else { Elem::F32 };
        let tokens = self.tokenizer.map_or(TextTokens::Last, |tokenizer| tokenizer.tokens.clone());
        HfOptions { tokens, shard: self.part_bytes, ..HfOptions::new(elem) }
    }

    /// The files of some pools of the tensors of a table.
    pub(super) fn pools_files(
        &self,
        table: &[TensorSpec],
        stem: &str,
        pools: &[Pool],
    ) -> Result<Vec<PoolsFile>> {
        let precision = self.precision;
        let all = pools.iter().flat_map(|&pool| (0..table.len()).map(move |index| (pool, index)));
        let tensors: Vec<(Pool, usize)> =
            all.filter(|&(pool, index)| table[index].is_in(pool, precision.optimizer)).collect();
        let size =
            |&(pool, index): &(Pool, usize)| (table[index].shape.numel() * precision.of(pool).size()) as u64;
        let parts = hf::split(tensors.iter().map(size), self.part_bytes);
        let file = |(number, range): (usize, &std::ops::Range<usize>)| {
            let tensors = tensors[range.clone()].to_vec();
            let infos = tensors.iter().map(|&(pool, index)| {
                let spec = &table[index];
                TensorInfo::new(stored_name(pool, spec), stored_dtype(precision.of(pool)), spec.shape.dims())
            });
            let header = Header::build(&[], &infos.collect::<Vec<_>>())?;
            Ok(PoolsFile { name: hf::part_name(stem, number, parts.len()), header, tensors })
        };
        (1..).zip(&parts).map(file).collect()
    }
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes of all files.
    pub bytes: u64,
    /// Tensors that contain a NaN or an infinity. They are written unchanged, because losing a run would be worse.
    pub non_finite: Vec<String>,
}

/// The approximate size in bytes of a checkpoint of this model.
pub fn checkpoint_bytes(model: &Adapted, precision: Precision) -> u64 {
    let (pools, table) = (CheckpointParts::pools(precision), model.tensors());
    let bytes = |spec: &TensorSpec| {
        let held = pools.iter().filter(|&&pool| spec.is_in(pool, precision.optimizer));
        (spec.shape.numel() * held.map(|&pool| precision.of(pool).size()).sum::<usize>()) as u64
    };
    // adapters are also kept in f32, for PEFT
    let peft = |spec: &TensorSpec| if model.lora.is_some() { 4 * spec.shape.numel() as u64 } else { 0 };
    table.iter().map(|spec| bytes(spec) + peft(spec)).sum::<u64>() + (1 << 20)
}

/// Writes a checkpoint atomically and replaces an earlier one of the same name. `read(pool, index, bytes)` returns a
/// tensor of the parameter table as the engine stores it.
pub fn write_checkpoint(
    folder: &Path,
    parts: &CheckpointParts<'_>,
    mut read: impl FnMut(Pool, usize, &mut Vec<u8>) -> Result<()>,
) -> Result<Written> {
    parts.config.validate()?;
    atomic::write_folder(folder, is_ours, |folder| {
        let mut job =
            Job { folder, parts, table: parts.model().tensors(), crc32: BTreeMap::new(), non_finite: vec![] };
        match parts.adapter {
            Some(adapter) => job.adapter(adapter, &mut read)?,
            None => job.weights(&mut read)?,
        }
        if parts.precision.has_master() {
            let beside = parts.adapter.map(|_| Pool::Params);
            let pools: Vec<Pool> = beside.into_iter().chain([Pool::Master]).collect();
            job.pools(MASTER, &pools, &mut read)?;
        }
        job.pools(STATE, &[Pool::Moment1, Pool::Moment2], &mut read)?;
        job.tokenizer()?;
        job.finish()
    })
}

/// A checkpoint being written.
pub(super) struct Job<'a> {
    pub folder: &'a Path,
    pub parts: &'a CheckpointParts<'a>,
    pub table: Vec<TensorSpec>,
    pub crc32: BTreeMap<String, u32>,
    pub non_finite: Vec<String>,
}

type ReadTensor<'a> = &'a mut dyn FnMut(Pool, usize, &mut Vec<u8>) -> Result<()>;

impl Job<'_> {
    /// The weights and `config.json`, as Hugging Face stores them.
    fn weights(&mut self, read: ReadTensor<'_>) -> Result<()> {
        let Self { folder, parts, .. } = *self;
        let (dtype, options) = (parts.precision.weights, parts.weights_options());
        let crc = hf::write_config_json(folder, parts.config, &options)?;
        self.crc32.insert(HF_CONFIG.to_owned(), crc);
        let (mut bytes, mut index) = (Vec::new(), 0);
        let non_finite = &mut self.non_finite;
        let mut fill = |spec: &TensorSpec, out: &mut [f32]| {
            read(Pool::Params, index, &mut bytes)?;
            expect_bytes(spec, dtype, &bytes)?;
            index += 1;
            widen(dtype, &bytes, out);
            if !is_finite(dtype, &bytes) {
                non_finite.push(spec.name.clone());
            }
            Ok(())
        };
        self.crc32.extend(hf::write_weights(folder, parts.config, &options, &mut fill)?);
        Ok(())
    }

    /// Adapters, as PEFT stores them.
    fn adapter(&mut self, adapter: &CheckpointAdapter, read: ReadTensor<'_>) -> Result<()> {
        let table = (&self.table[..], self.parts.precision);
        let (crc32, non_finite) = write_peft(self.folder, adapter, table, read)?;
        self.crc32.extend(crc32);
        self.non_finite.extend(non_finite);
        Ok(())
    }

    /// The files of the tokenizer.
    pub fn tokenizer(&mut self) -> Result<()> {
        for (name, bytes) in self.parts.tokenizer.iter().flat_map(|tokenizer| &tokenizer.files) {
            let crc = atomic::write_bytes(&self.folder.join(name), bytes)?;
            self.crc32.insert(name.clone(), crc);
        }
        Ok(())
    }

    /// Whole pools, byte for byte, in one file or several.
    fn pools(&mut self, stem: &str, pools: &[Pool], read: ReadTensor<'_>) -> Result<()> {
        for PoolsFile { name, header, tensors } in self.parts.pools_files(&self.table, stem, pools)? {
            let crc = self.file(&name, header, &tensors, read)?;
            self.crc32.insert(name, crc);
        }
        Ok(())
    }

    fn file(
        &mut self,
        name: &str,
        header: Header,
        tensors: &[(Pool, usize)],
        read: ReadTensor<'_>,
    ) -> Result<u32> {
        let precision = self.parts.precision;
        atomic::write_file(&self.folder.join(name), |sink| {
            let mut writer = Writer::new(sink, header)?;
            let mut bytes = Vec::new();
            for &(pool, index) in tensors {
                let (spec, dtype) = (&self.table[index], precision.of(pool));
                read(pool, index, &mut bytes)?;
                expect_bytes(spec, dtype, &bytes)?;
                let name = stored_name(pool, spec);
                if !is_finite(dtype, &bytes) {
                    self.non_finite.push(name.clone());
                }
                writer.put_bytes(&name, stored_dtype(dtype), &bytes)?;
            }
            writer.finish()?;
            Ok(sink.crc32())
        })
    }

    /// The manifest, which makes the folder a checkpoint.
    pub fn finish(self) -> Result<Written> {
        let mut bytes = BTreeMap::new();
        for name in self.crc32.keys() {
            let path = self.folder.join(name);
            let meta = std::fs::metadata(&path).map_err(|source| Error::io(&path, "read", source))?;
            bytes.insert(name.clone(), meta.len());
        }
        let total = bytes.values().sum();
        let json = TrainerJson {
            state: self.parts.trainer.clone(),
            config: *self.parts.config,
            precision: Some(self.parts.precision),
            adapter: self.parts.adapter.cloned(),
            bytes,
            crc32: self.crc32,
        };
        let path = self.folder.join(TRAINER);
        let text = json.to_text().map_err(|error| Error::io(&path, "write", error.into()))?;
        atomic::write_file(&path, |sink| sink.put(text.as_bytes()))?;
        Ok(Written { bytes: total, non_finite: self.non_finite })
    }
}

/// The safetensors type of an element type.
pub(super) fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::BF16 => Dtype::BF16,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        _ => Dtype::F32,
    }
}

pub(super) fn expect_bytes(spec: &TensorSpec, dtype: DType, bytes: &[u8]) -> Result<()> {
    let want = spec.shape.numel() * dtype.size();
    if bytes.len() == want {
        return Ok(());
    }
    let text = format!("`{}` has {} bytes, expected {want}", spec.name, bytes.len());
    Err(ironhorse_core::Error::Program(text).into())
}

/// The numbers as f32, which represents both types exactly.
pub(crate) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32 + Sync) {
        let (cells, _) = bytes.as_chunks();
        parallel::for_each(out.chunks_mut(PIECE).zip(cells.chunks(PIECE)), |(out, cells)| {
            out.iter_mut().zip(cells).for_each(|(out, &cell)| *out = convert(cell));
        });
    }
    match dtype {
        DType::BF16 => each(bytes, out, |cell| bf16_to_f32(u16::from_le_bytes(cell))),
        DType::I16 => each(bytes, out, |cell| f32::from(i16::from_le_bytes(cell))),
        _ => each(bytes, out, f32::from_le_bytes),
    }
}

/// Whether no number of this type is NaN or infinite; integers are never.
pub(super) fn is_finite(dtype: DType, bytes: &[u8]) -> bool {
    // without a branch in the loop, so that it is vectorised
    fn all<const N: usize>(bytes: &[u8], finite: impl Fn([u8; N]) -> bool) -> bool {
        bytes.as_chunks().0.iter().fold(true, |all, &cell| all & finite(cell))
    }
    match dtype {
        DType::F32 => all(bytes, |cell| f32::from_le_bytes(cell).is_finite()),
        DType::BF16 => all(bytes, |cell| bf16_to_f32(u16::from_le_bytes(cell)).is_finite()),
        _ => true,
    }
}
