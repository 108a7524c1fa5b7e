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
        self.check_tied(name, &out[..held])
    }

    /// Refuses a file whose head is another than the token table that `config.json` says it is: it was trained apart.
    fn check_tied(&mut self, name: &str, rows: &[f32]) -> Result<()> {
        let is_table = ["model.embed_tokens.weight", "wte.weight"].contains(&name);
        let is_tied = is_table && self.table.iter().all(|spec| spec.name != HEAD);
        let Some(head) = self.files.get(HEAD).filter(|_| is_tied) else { return Ok(()) };
        let same = head.numel() == rows.len() && {
            self.turned.resize(rows.len(), 0.0);
            self.files.read_f32(HEAD, &mut self.turned)?;
            self.turned.iter().zip(rows).all(|(head, row)| head.to_bits() == row.to_bits())
        };
        self.turned = Vec::new();
        if same {
            return Ok(());
        }
        let expected = format!(
            "the values of `{name}`, as tie_word_embeddings in {HF_CONFIG} says; set it to false there if the head was \
             trained apart"
        );
        Err(self.files.wrong(Some(HEAD), &format!("`{HEAD}`"), "another tensor".to_owned(), expected))
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

/// The output head.
const HEAD: &str = "lm_head.weight";

/// Tensors of old files that are not parameters: causal masks, frequencies, and GPT-2's head, which is tied to `wte`.
fn is_buffer(name: &str) -> bool {
    name == HEAD
        || name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::safetensors::{Dtype, Header, TensorInfo, Writer};
    use crate::format::{Sink, Source};
    use crate::model::Gpt2Config;

    const CONFIG: ModelConfig = ModelConfig::Gpt2(Gpt2Config::new(3, 5, 2, 1, 4));

    /// A file of the values 1, 2, 3, … whose head has these values.
    fn with_head(values: &[f32]) -> HfFolder<std::io::Cursor<Vec<u8>>> {
        let table = CONFIG.tensors();
        let mut infos: Vec<TensorInfo> = table
            .iter()
            .map(|spec| TensorInfo::new(&*spec.name, Dtype::F32, stored_shape(&CONFIG, spec)))
            .collect();
        infos.push(TensorInfo::new(HEAD, Dtype::F32, [values.len() / 4, 4]));
        let header = Header::build(&[], &infos).unwrap();
        let mut bytes = Vec::new();
        let mut sink = Sink::new(&mut bytes, Path::new("w"));
        let _ = Writer::new(&mut sink, header).unwrap();
        drop(sink);
        for info in &infos {
            let count = info.shape.iter().product::<usize>();
            let own: Vec<f32> = (1..=count).map(|n| n as f32).collect();
            let held = if info.name == HEAD { values } else { &own };
            bytes.extend(held.iter().flat_map(|value| value.to_le_bytes()));
        }
        HfFolder::new(Path::new("hf"), CONFIG, SafeTensors::new(Source::memory(bytes, "w")).unwrap()).unwrap()
    }

    /// A head that is stored although it is tied must be the token table, or part of the model would be lost.
    #[test]
    fn a_stored_head_must_be_the_table_it_is_tied_to() {
        let table: Vec<f32> = (1..=20).map(|n| n as f32).collect();
        let numel = CONFIG.tensors()[0].shape.numel();
        let read = |head: &[f32]| with_head(head).read_tensor("wte.weight", &mut vec![0.0; numel]);
        read(&table).unwrap();
        let mut other = table.clone();
        other[19] = 20.5;
        for head in [&other[..], &table[..16]] {
            let error = read(head).unwrap_err().to_string();
            assert!(
                error.starts_with("w: `lm_head.weight` is another tensor, expected the values of"),
                "{error}"
            );
            assert!(error.contains("tie_word_embeddings"), "{error}");
        }
    }
}
