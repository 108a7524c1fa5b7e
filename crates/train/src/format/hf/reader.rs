//! Reading a Hugging Face folder.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use super::config_json::{HF_CONFIG, parse_config_json};
use super::{PREFIX, is_transposed, transpose};
use crate::format::safetensors::SafeTensors;
use crate::format::stacked::expect_numel;
use crate::model::{Gpt2Config, TensorSpec};
use crate::{Error, Result};

/// The weights' file in the folder.
pub const HF_WEIGHTS: &str = "model.safetensors";

/// An open Hugging Face folder.
#[derive(Debug)]
pub struct HfFolder<R = File> {
    folder: PathBuf,
    file: SafeTensors<R>,
    config: Gpt2Config,
    prefix: &'static str,
    table: Vec<TensorSpec>,
    turned: Vec<f32>,
}

impl HfFolder<File> {
    /// Opens a folder and checks that every parameter is there in its shape.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(HF_CONFIG);
        let json = std::fs::read(&path).map_err(|source| Error::io(&path, "read", source))?;
        let config = parse_config_json(&json, &path)?;
        Self::new(folder, config, SafeTensors::open(&folder.join(HF_WEIGHTS))?)
    }
}

impl<R: Read + Seek> HfFolder<R> {
    /// Checks that `file` holds every parameter of a model with these sizes, and none that we would leave out.
    pub fn new(folder: &Path, config: Gpt2Config, file: SafeTensors<R>) -> Result<Self> {
        config.validate()?;
        let count = file.header().entries().len();
        // before the table is made: it grows with n_layer
        if count < 12 * config.n_layer {
            let expected = format!("at least 12 for each of {} layers", config.n_layer);
            return Err(file.field("number of tensors", count, expected));
        }
        let prefixed = file.header().get("transformer.wte.weight").is_some();
        let prefix = if prefixed { PREFIX } else { "" };
        let table = config.tensors();
        for spec in &table {
            let name = format!("{prefix}{}", spec.name);
            let entry = file.entry(&name)?;
            if entry.shape != stored_shape(&config, spec) {
                let found = format!("{:?}", entry.shape);
                let expected = format!("{:?}", stored_shape(&config, spec));
                return Err(file.field(format!("shape of `{name}`"), found, expected));
            }
            if entry.dtype.elem().is_none() {
                return Err(file.field(format!("dtype of `{name}`"), entry.dtype.name(), "F32, BF16 or F16"));
            }
        }
        let known: std::collections::HashSet<&str> = table.iter().map(|spec| &*spec.name).collect();
        let extra = file.header().entries().iter().find(|entry| {
            let name = entry.name.strip_prefix(prefix).unwrap_or(&entry.name);
            !known.contains(name) && !is_buffer(name)
        });
        if let Some(entry) = extra {
            return Err(file.field("tensor", format!("`{}`", entry.name), "only those of GPT2LMHeadModel"));
        }
        Ok(Self { folder: folder.to_owned(), file, config, prefix, table, turned: Vec::new() })
    }

    /// The sizes in `config.json`, with the vocabulary padded.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The other way to pad the vocabulary, for a checkpoint that knows it.
    pub(in crate::format) fn set_padding(&mut self, padded_vocab_size: usize) {
        self.config.padded_vocab_size = padded_vocab_size;
        self.table[0] = self.config_table_head();
    }

    fn config_table_head(&self) -> TensorSpec {
        let shape = [self.config.padded_vocab_size, self.config.n_embd].into();
        TensorSpec { shape, ..self.table[0].clone() }
    }

    /// Reads one parameter by its name in the parameter table, turned to (out, in) and padded.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let Some(spec) = self.table.iter().find(|spec| spec.name == name) else {
            return Err(Error::Config(format!("no tensor `{name}` in GPT-2")));
        };
        expect_numel(name, out.len(), spec.shape.numel())?;
        let stored = format!("{}{name}", self.prefix);
        if is_transposed(spec) {
            let (rows, cols) = (spec.shape.rows(), spec.shape.cols());
            self.turned.resize(out.len(), 0.0);
            self.file.read_f32(&stored, &mut self.turned)?;
            transpose(&self.turned, cols, rows, out);
            return Ok(());
        }
        let held = self.file.entry(&stored)?.numel();
        let (rows, padding) = out.split_at_mut(held);
        self.file.read_f32(&stored, rows)?;
        padding.fill(0.0);
        Ok(())
    }
}

/// The shape in the file: transposed for linear layers, unpadded for the token table.
pub(super) fn stored_shape(config: &Gpt2Config, spec: &TensorSpec) -> Vec<usize> {
    let mut dims = spec.shape.dims().to_vec();
    if is_transposed(spec) {
        dims.reverse();
    }
    if spec.name == "wte.weight" {
        dims[0] = config.vocab_size;
    }
    dims
}

/// Tensors of old files that hold no parameter: causal masks, and the head that is tied to `wte`.
fn is_buffer(name: &str) -> bool {
    name == "lm_head.weight" || name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
}
