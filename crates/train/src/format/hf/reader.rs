//! Reading a Hugging Face folder.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use super::config_json::{HF_CONFIG, architecture, parse_config_json};
use super::files::WeightFiles;
use super::{PREFIX, TextTokens, is_transposed, transpose};
use crate::format::Span;
use crate::format::safetensors::SafeTensors;
use crate::format::stacked::expect_numel;
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

/// An open Hugging Face folder.
#[derive(Debug)]
pub struct HfFolder<R = File> {
    folder: PathBuf,
    files: WeightFiles<R>,
    config: ModelConfig,
    tokens: TextTokens,
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
        let found = Self::new(folder, config, WeightFiles::open(folder)?)?;
        Ok(Self { tokens: TextTokens::parse(&json), ..found })
    }
}

impl<R: Read + Seek> HfFolder<R> {
    /// Checks that the files contain every parameter of a model with these sizes, and no parameter that we would
    /// ignore.
    pub fn new(
        folder: &Path,
        config: impl Into<ModelConfig>,
        files: impl Into<WeightFiles<R>>,
    ) -> Result<Self> {
        let (config, files) = (config.into(), files.into());
        config.validate()?;
        let count = files.entries().count();
        // before making the table, whose size grows with layers and experts; a missing expert is reported below
        let per_layer = config.tensors_per_layer() / if config.has_experts() { 2 } else { 1 };
        if count < per_layer * config.layers() {
            let expected = format!("at least {per_layer} for each of {} layers", config.layers());
            return Err(files.wrong(None, "number of tensors", count.to_string(), expected));
        }
        let prefixed = files.get("transformer.wte.weight").is_some();
        let prefix = if prefixed { PREFIX } else { "" };
        let table = config.tensors();
        for spec in &table {
            let name = format!("{prefix}{}", spec.name);
            let entry = files.entry(&name, folder)?;
            if entry.shape != stored_shape(&config, spec) {
                let found = format!("{:?}", entry.shape);
                let expected = format!("{:?}", stored_shape(&config, spec));
                return Err(files.wrong(Some(&name), &format!("shape of `{name}`"), found, expected));
            }
            if entry.dtype.elem().is_none() {
                let (found, expected) = (entry.dtype.name().to_owned(), "F32, BF16 or F16".to_owned());
                return Err(files.wrong(Some(&name), &format!("dtype of `{name}`"), found, expected));
            }
        }
        let known: HashSet<&str> = table.iter().map(|spec| &*spec.name).collect();
        let extra = files.entries().find(|entry| {
            let name = entry.name.strip_prefix(prefix).unwrap_or(&entry.name);
            !known.contains(name) && !is_buffer(name)
        });
        if let Some(entry) = extra {
            let expected = format!("only those of {}", architecture(&config));
            return Err(files.wrong(Some(&entry.name), "tensor", format!("`{}`", entry.name), expected));
        }
        let (folder, tokens) = (folder.to_owned(), TextTokens::default());
        Ok(Self { folder, files, config, tokens, prefix, table, turned: Vec::new() })
    }

    /// The sizes in `config.json`, with the vocabulary padded.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tokens before and after a text in `config.json`.
    pub fn text_tokens(&self) -> &TextTokens {
        &self.tokens
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Where every parameter is, under the names and in the shapes of the files.
    pub fn spans(&self) -> Vec<Span> {
        let names: HashSet<String> =
            self.table.iter().map(|spec| format!("{}{}", self.prefix, spec.name)).collect();
        let all = self.files.files().iter().flat_map(SafeTensors::spans);
        all.filter(|span| names.contains(&span.name)).collect()
    }

    /// The metadata of the weights, of all files one after the other.
    pub fn metadata(&self) -> impl Iterator<Item = &(String, String)> {
        self.files.files().iter().flat_map(|file| file.header().metadata())
    }

    /// The same sizes as a checkpoint has them, which knows how the vocabulary is padded.
    pub(in crate::format) fn set_config(&mut self, config: ModelConfig) {
        self.config = config;
        self.table = config.tensors();
    }

    /// Reads one parameter by its name in the parameter table, transposed to (out, in) and padded.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let Some(spec) = self.table.iter().find(|spec| spec.name == name) else {
            let expected = format!("one of the parameter table of {}", architecture(&self.config));
            return Err(Error::unknown("tensor", name, expected));
        };
        expect_numel(name, out.len(), spec.shape.numel())?;
        let stored = format!("{}{name}", self.prefix);
        if is_transposed(&self.config, spec) {
            let (rows, cols) = (spec.shape.rows(), spec.shape.cols());
            self.turned.resize(out.len(), 0.0);
            self.files.read_f32(&stored, &mut self.turned)?;
            transpose(&self.turned, cols, rows, out);
            return Ok(());
        }
        let held = self.files.entry(&stored, &self.folder)?.numel();
        let (rows, padding) = out.split_at_mut(held);
        self.files.read_f32(&stored, rows)?;
        padding.fill(0.0);
        Ok(())
    }
}

/// The shape in the file: transposed for GPT-2's linear layers, unpadded for tables with a row for each token.
pub(super) fn stored_shape(config: &ModelConfig, spec: &TensorSpec) -> Vec<usize> {
    let mut dims = config.unpadded_shape(spec);
    if is_transposed(config, spec) {
        dims.reverse();
    }
    dims
}

/// Tensors of old files that are not parameters: causal masks, frequencies, and GPT-2's head, which is tied to `wte`.
fn is_buffer(name: &str) -> bool {
    name == "lm_head.weight"
        || name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
}
