//! Writing a Hugging Face folder.

use std::ops::Range;
use std::path::Path;

use super::config_json::{HF_CONFIG, config_json};
use super::files::{HF_INDEX, HF_WEIGHTS, MODEL, index_json, is_part_name, part_name, split};
use super::reader::stored_shape;
use super::{PREFIX, TextTokens, is_transposed, transpose};
use crate::format::safetensors::{Header, TensorInfo, Writer};
use crate::format::stacked::filled;
use crate::format::tokenizer::NamedFiles;
use crate::format::{Elem, atomic};
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

/// The default maximum number of bytes of weights in one file, long the default of `transformers`.
pub const DEFAULT_SHARD: u64 = 5_000_000_000;

/// How to write a Hugging Face folder.
#[derive(Clone, Debug)]
pub struct HfOptions {
    /// The encoding of the numbers in the file: F32 or BF16.
    pub elem: Elem,
    /// The tokens before and after a text.
    pub tokens: TextTokens,
    /// The files of a tokenizer, written to the same folder, where `generate` looks for it.
    pub tokenizer: NamedFiles,
    /// The maximum number of bytes of weights in one file; larger models are split into several files with an index. A
    /// tensor is never split.
    pub shard: u64,
}

impl HfOptions {
    /// Files of at most [`DEFAULT_SHARD`] bytes.
    pub const fn new(elem: Elem) -> Self {
        Self { elem, tokens: TextTokens::Last, tokenizer: Vec::new(), shard: DEFAULT_SHARD }
    }
}

/// Writes a folder atomically. `fill` is called once per parameter, in model order, with a zeroed buffer of its shape
/// in the parameter table: (out, in), padded.
pub fn write_hf(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
    mut fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    config.validate()?;
    let owned = |name: &str| {
        let ours = [HF_CONFIG, HF_WEIGHTS, HF_INDEX].contains(&name) || is_part_name(MODEL, name);
        ours || options.tokenizer.iter().any(|(file, _)| file == name) // never lost, only replaced
    };
    atomic::write_folder(folder, owned, |folder| {
        write_config_json(folder, config, options)?;
        for (name, bytes) in &options.tokenizer {
            atomic::write_file(&folder.join(name), |sink| sink.put(bytes))?;
        }
        write_weights(folder, config, options, &mut fill).map(drop)
    })
}

fn stored_bytes(config: &ModelConfig, elem: Elem, spec: &TensorSpec) -> u64 {
    let numel: usize = stored_shape(config, spec).iter().product();
    numel as u64 * elem.size() as u64
}

fn stored_name(config: &ModelConfig, spec: &TensorSpec) -> String {
    let prefix = if matches!(config, ModelConfig::Gpt2(_)) { PREFIX } else { "" };
    format!("{prefix}{}", spec.name)
}

/// Writes `config.json` and returns its CRC-32.
pub(in crate::format) fn write_config_json(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
) -> Result<u32> {
    let path = folder.join(HF_CONFIG);
    if let TextTokens::Eot(eot) = options.tokens
        && eot as usize >= config.vocab_size()
    {
        let expected = format!("below vocab_size, {}", config.vocab_size());
        return Err(Error::field(&path, "eos_token_id", eot, expected));
    }
    let json = format!("{:#}\n", config_json(config, options.elem, &options.tokens));
    atomic::write_bytes(&path, json.as_bytes())
}

/// Writes all weights, in one file or several with their index, and returns the name and CRC-32 of each file.
pub(in crate::format) fn write_weights(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
    fill: &mut impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<Vec<(String, u32)>> {
    let (table, layout) = (config.tensors(), WeightsLayout::new(config, options)?);
    let mut files = Vec::new();
    for WeightsFile { name, header, tensors } in layout.files {
        let crc = write_part(&folder.join(&name), config, header, &table[tensors], fill)?;
        files.push((name, crc));
    }
    if let Some(text) = layout.index {
        let crc = atomic::write_bytes(&folder.join(HF_INDEX), text.as_bytes())?;
        files.push((HF_INDEX.to_owned(), crc));
    }
    Ok(files)
}

/// Which weights go where.
pub(in crate::format) struct WeightsLayout {
    pub files: Vec<WeightsFile>,
    /// The contents of the index, where there is more than one file.
    pub index: Option<String>,
}

/// One file of weights.
pub(in crate::format) struct WeightsFile {
    pub name: String,
    pub header: Header,
    /// Its tensors in the parameter table, in the order of the file.
    pub tensors: Range<usize>,
}

impl WeightsLayout {
    pub fn new(config: &ModelConfig, options: &HfOptions) -> Result<Self> {
        let (table, elem) = (config.tensors(), options.elem);
        let sizes = table.iter().map(|spec| stored_bytes(config, elem, spec));
        let parts = split(sizes, options.shard);
        let (mut places, mut files) = (Vec::new(), Vec::new());
        for (number, tensors) in (1..).zip(&parts) {
            let (name, part) = (part_name(MODEL, number, parts.len()), &table[tensors.clone()]);
            let infos = part.iter().map(|spec| {
                TensorInfo::new(stored_name(config, spec), elem.into(), stored_shape(config, spec))
            });
            // transformers rejects a file without this entry
            let metadata = [("format".to_owned(), "pt".to_owned())];
            let header = Header::build(&metadata, &infos.collect::<Vec<_>>())?;
            places.extend(part.iter().map(|spec| (stored_name(config, spec), name.clone())));
            files.push(WeightsFile { name, header, tensors: tensors.clone() });
        }
        let bytes: u64 = table.iter().map(|spec| stored_bytes(config, elem, spec)).sum();
        // the stored rows, without the padding of the vocabulary
        let index = (parts.len() > 1).then(|| index_json(&places, bytes / elem.size() as u64, bytes));
        Ok(Self { files, index })
    }
}

/// The elements of a tensor as they are stored: in the layout of `transformers`, without padding.
pub(in crate::format) fn stored_values<'a>(
    config: &ModelConfig,
    spec: &TensorSpec,
    values: &'a [f32],
    turned: &'a mut Vec<f32>,
) -> &'a [f32] {
    if is_transposed(config, spec) {
        turned.resize(values.len(), 0.0);
        transpose(values, spec.shape.rows(), spec.shape.cols(), turned);
        return turned;
    }
    &values[..stored_shape(config, spec).iter().product()]
}

/// Writes some of the weights as one file and returns its CRC-32.
fn write_part(
    path: &Path,
    config: &ModelConfig,
    header: Header,
    part: &[TensorSpec],
    fill: &mut impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<u32> {
    atomic::write_file(path, |sink| {
        let mut writer = Writer::new(sink, header)?;
        let (mut values, mut turned) = (Vec::new(), Vec::new());
        for spec in part {
            filled(spec, &mut values, &mut *fill)?;
            writer.put_f32(&stored_name(config, spec), stored_values(config, spec, &values, &mut turned))?;
        }
        writer.finish()?;
        Ok(sink.crc32())
    })
}
