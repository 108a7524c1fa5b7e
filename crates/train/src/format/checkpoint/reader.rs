//! Reading a checkpoint.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ironhorse_core::{DType, Pool, Precision, f32_to_bf16, join_master};

use super::super::Source;
use super::super::hf::{HfFolder, TextTokens};
use super::super::peft::AdapterFolder;
use super::super::safetensors::{Dtype, SafeTensors};
use super::super::stacked::expect_numel;
use super::super::tokenizer::{NamedFiles, tokenizer_files};
use super::adapter::{CheckpointAdapter, Stored, not_weights};
use super::writer::stored_dtype;
use super::{MASTER, STATE, TRAINER, TrainerJson, TrainerState, is_part_of, is_state, stored_name};
use crate::model::{Adapted, ModelConfig, TensorSpec};
use crate::{Error, Result};

/// An open checkpoint, whose files have the sizes and checksums they were written with.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    trainer: TrainerJson,
    weights: Stored,
    master: Vec<SafeTensors<File>>,
    /// Empty if only the weights were requested.
    state: Vec<SafeTensors<File>>,
}

impl Checkpoint {
    /// Opens a folder; reads every file once to compare its checksum.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_as(folder, true, true)
    }

    /// Opens a folder whose checksums another process of the run has compared: of the files only the sizes are checked.
    pub fn open_compared(folder: &Path) -> Result<Self> {
        Self::manifest(folder)?;
        Self::open_as(folder, true, false)
    }

    /// Opens a folder for its weights: the optimizer's state, up to four times their size, is neither read nor needed.
    pub fn open_weights(folder: &Path) -> Result<Self> {
        Self::open_as(folder, false, true)
    }

    /// Reads the manifest of a folder; of the other files only the sizes are checked.
    pub fn manifest(folder: &Path) -> Result<TrainerJson> {
        let trainer = Self::parse_manifest(folder)?;
        check_sizes(folder, &trainer, |_| true)?;
        Ok(trainer)
    }

    fn parse_manifest(folder: &Path) -> Result<TrainerJson> {
        let path = folder.join(TRAINER);
        let json = std::fs::read(&path).map_err(|source| Error::io(&path, "read", source))?;
        TrainerJson::parse(&json, &path)
    }

    /// Opens a folder with or without the optimizer's `state`. `check` compares the sizes and checksums of the files.
    pub fn open_as(folder: &Path, state: bool, check: bool) -> Result<Self> {
        let trainer = Self::parse_manifest(folder)?;
        let wanted = |name: &str| state || !is_state(name);
        if check {
            check_sizes(folder, &trainer, wanted)?; // finds a truncated file without reading the others
            check_crc32(folder, &trainer, wanted)?;
        }
        let weights = match trainer.adapter {
            Some(_) => Stored::Adapter(AdapterFolder::open(folder)?),
            None => Stored::Model(open_model(folder, &trainer)?),
        };
        let those = |stem: &str| {
            let names = trainer.crc32.keys().filter(|name| is_part_of(name, stem) && wanted(name));
            names.map(|name| SafeTensors::open(&folder.join(name))).collect::<Result<Vec<_>>>()
        };
        let (master, state) = (those(MASTER)?, those(STATE)?);
        Ok(Self { folder: folder.to_owned(), trainer, weights, master, state })
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.trainer.config
    }

    /// The model, and its adapters if it has any.
    pub fn model(&self) -> Adapted {
        self.trainer.model()
    }

    /// The adapters that the run trains, if it does not train the model itself.
    pub fn adapter(&self) -> Option<&CheckpointAdapter> {
        self.trainer.adapter.as_ref()
    }

    /// The state of training.
    pub fn trainer(&self) -> &TrainerState {
        &self.trainer.state
    }

    /// The element types of the run; an error for a checkpoint of an earlier version, which did not keep them.
    pub fn precision(&self) -> Result<Precision> {
        self.trainer.precision.ok_or_else(|| {
            let found = "version 1, which does not hold the whole training state";
            Error::field(&self.folder, "checkpoint", found, "version 2; use its weights with --init")
        })
    }

    /// The files of the tokenizer; empty without one.
    pub fn tokenizer_files(&self) -> Result<NamedFiles> {
        let mut files = tokenizer_files(&self.folder)?;
        files.retain(|(name, _)| self.trainer.crc32.contains_key(name));
        Ok(files)
    }

    /// The tokens before and after a text, which a tokenizer has put into `config.json`.
    pub fn text_tokens(&self) -> TextTokens {
        match &self.weights {
            Stored::Model(weights) => weights.text_tokens().clone(),
            Stored::Adapter(_) => TextTokens::Last,
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Checks that every tensor is there, in its shape and in the run's element type, for callers that map the files: of
    /// the optimizer's moments only with `state`. Padding of the vocabulary may be there or not.
    pub fn check_tensors(&self, state: bool) -> Result<()> {
        let precision = self.trainer.precision.unwrap_or_default();
        let weights = stored_dtype(precision.weights);
        let Stored::Model(model) = &self.weights else { return Err(not_weights(&self.folder)) };
        if self.trainer.precision.is_some()
            && let Some(span) = model.spans().iter().find(|span| span.dtype != weights)
        {
            let expected = format!("{}, as trainer.json says", weights.name());
            let field = format!("dtype of `{}`", span.name);
            return Err(Error::field(&span.file, field, span.dtype.name(), expected));
        }
        let pools = [
            (Pool::Master, &self.master, precision.weights == DType::BF16),
            (Pool::Moment1, &self.state, state),
            (Pool::Moment2, &self.state, state),
        ];
        for (pool, files, _) in pools.into_iter().filter(|(_, _, expected)| *expected) {
            let held = |spec: &TensorSpec| spec.is_in(pool, precision.optimizer);
            for spec in self.trainer.config.tensors().into_iter().filter(held) {
                self.check_pool_tensor(
                    files,
                    &stored_name(pool, &spec),
                    stored_dtype(precision.of(pool)),
                    &spec,
                )?;
            }
        }
        Ok(())
    }

    fn check_pool_tensor(
        &self,
        files: &[SafeTensors<File>],
        name: &str,
        dtype: Dtype,
        spec: &TensorSpec,
    ) -> Result<()> {
        let file = &files[self.find(files, name)?];
        expect_dtype(file, name, dtype)?;
        let entry = file.entry(name)?;
        let shape = self.trainer.config.unpadded_shape(spec);
        if entry.shape != shape && entry.shape != spec.shape.dims() {
            let found = format!("{:?}", entry.shape);
            return Err(file.field(format!("shape of `{name}`"), found, format!("{shape:?}")));
        }
        Ok(())
    }

    /// Which of the files has a tensor.
    fn find(&self, files: &[SafeTensors<File>], name: &str) -> Result<usize> {
        files.iter().position(|file| file.header().get(name).is_some()).ok_or_else(|| {
            let expected = "in the checkpoint, opened with its state";
            Error::field(&self.folder, format!("tensor `{name}`"), "missing", expected)
        })
    }

    /// Reads one parameter by its name in the parameter table, as exactly as it is stored: from the master weights
    /// where there are any.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let precision = self.trainer.precision.unwrap_or_default();
        if let Stored::Adapter(adapter) = &mut self.weights {
            return adapter.read_tensor(name, out); // as exactly as the master weights
        }
        let Some(file) = self.master.iter_mut().find(|file| file.header().get(name).is_some()) else {
            return self.weights.read_tensor(name, out);
        };
        if !precision.has_residual() {
            return file.read_f32(name, out);
        }
        let mut bytes = Vec::new();
        read_bytes(file, name, DType::I16, &mut bytes)?;
        expect_numel(name, out.len(), bytes.len() / 2)?;
        self.weights.read_tensor(name, out)?;
        for (value, &cell) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = join_master(f32_to_bf16(*value), i16::from_le_bytes(cell));
        }
        Ok(())
    }

    /// Reads one tensor of a pool as the engine stores it.
    pub fn read_pool(&mut self, pool: Pool, spec: &TensorSpec, bytes: &mut Vec<u8>) -> Result<()> {
        self.read_part(pool, spec, 0..spec.shape.numel(), bytes)
    }

    /// Reads these elements of a tensor of a pool as the engine stores them; of all pools but the weights, whose order in the file
    /// is another one, nothing else is read.
    pub fn read_part(
        &mut self,
        pool: Pool,
        spec: &TensorSpec,
        elements: Range<usize>,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let precision = self.precision()?;
        let dtype = precision.of(pool);
        let beside = precision.has_master() && self.trainer.adapter.is_some();
        if pool == Pool::Params && !beside {
            let mut values = vec![0.0; spec.shape.numel()];
            self.weights.read_tensor(&spec.name, &mut values)?;
            let values = values.get(elements).unwrap_or_default();
            bytes.clear();
            match dtype {
                DType::BF16 => bytes.extend(values.iter().flat_map(|&v| f32_to_bf16(v).to_le_bytes())),
                _ => bytes.extend(values.iter().flat_map(|&value| value.to_le_bytes())),
            }
            return Ok(());
        }
        let name = stored_name(pool, spec);
        let in_master = matches!(pool, Pool::Params | Pool::Master);
        let files = if in_master { &self.master } else { &self.state };
        let at = self.find(files, &name)?;
        let files = if in_master { &mut self.master } else { &mut self.state };
        let file = &mut files[at];
        expect_dtype(file, &name, stored_dtype(dtype))?;
        expect_numel(&name, file.entry(&name)?.numel(), spec.shape.numel())?;
        bytes.clear();
        bytes.resize(elements.len() * dtype.size(), 0);
        file.read_bytes_at(&name, elements.start * dtype.size(), bytes)
    }
}

/// The weights of a model, whose `config.json` agrees with the manifest.
fn open_model(folder: &Path, trainer: &TrainerJson) -> Result<HfFolder<File>> {
    let mut weights = HfFolder::open(folder)?;
    if !weights.config().computes_as(&trainer.config) {
        let expected = format!("that of config.json, {}", weights.config().to_json());
        let path = folder.join(TRAINER);
        return Err(Error::field(&path, "config", trainer.config.to_json(), expected));
    }
    weights.set_config(trainer.config);
    Ok(weights)
}

fn expect_dtype(file: &SafeTensors<File>, name: &str, dtype: Dtype) -> Result<()> {
    let found = file.entry(name)?.dtype;
    if found == dtype {
        return Ok(());
    }
    Err(file.field(format!("dtype of `{name}`"), found.name(), dtype.name()))
}

/// A tensor's bytes; its type must be the one of the pool.
fn read_bytes(file: &mut SafeTensors<File>, name: &str, dtype: DType, bytes: &mut Vec<u8>) -> Result<()> {
    expect_dtype(file, name, stored_dtype(dtype))?;
    bytes.clear();
    file.for_each_chunk(name, |chunk| {
        bytes.extend_from_slice(chunk);
        Ok(())
    })
}

fn check_sizes(folder: &Path, trainer: &TrainerJson, wanted: impl Fn(&str) -> bool) -> Result<()> {
    for (name, &want) in trainer.bytes.iter().filter(|(name, _)| wanted(name)) {
        let path = folder.join(name);
        let meta = std::fs::metadata(&path).map_err(|source| Error::io(&path, "open", source))?;
        if meta.len() != want {
            let expected = format!("{want} bytes, as trainer.json says");
            return Err(Error::field(&path, "file size", format!("{} bytes", meta.len()), expected));
        }
    }
    Ok(())
}

fn check_crc32(folder: &Path, trainer: &TrainerJson, wanted: impl Fn(&str) -> bool) -> Result<()> {
    for (name, &want) in trainer.crc32.iter().filter(|(name, _)| wanted(name)) {
        let path = folder.join(name);
        let mut source = Source::open(&path)?;
        let found = source.crc32(0, source.len())?;
        if found != want {
            return Err(Error::field(&path, "crc32", found, format!("{want}, as trainer.json says")));
        }
    }
    Ok(())
}
