//! Writing a Hugging Face folder.

use std::path::Path;

use super::config_json::{HF_CONFIG, config_json};
use super::reader::{HF_WEIGHTS, stored_shape};
use super::{PREFIX, is_transposed, transpose};
use crate::format::safetensors::{Header, TensorInfo, Writer};
use crate::format::stacked::filled;
use crate::format::{Elem, atomic};
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

/// How to write a Hugging Face folder.
#[derive(Clone, Copy, Debug)]
pub struct HfOptions {
    /// How the numbers stand in the file: F32 or BF16.
    pub elem: Elem,
    /// The end-of-text token; the last of the vocabulary if not given, as in GPT-2.
    pub eot: Option<u32>,
}

/// Writes a folder atomically. `fill` is called once per parameter, in model order, with a zeroed buffer of its shape in
/// the parameter table: (out, in), padded.
pub fn write_hf(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
    fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    config.validate()?;
    atomic::write_folder(folder, &[HF_CONFIG, HF_WEIGHTS], |folder| {
        write_config_json(folder, config, options)?;
        write_weights(folder, config, options, fill).map(drop)
    })
}

/// Writes `config.json` and gives its CRC-32.
pub(in crate::format) fn write_config_json(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
) -> Result<u32> {
    let path = folder.join(HF_CONFIG);
    let eot = options.eot.map_or(config.vocab_size().saturating_sub(1), |eot| eot as usize);
    if eot >= config.vocab_size() {
        let expected = format!("below vocab_size, {}", config.vocab_size());
        return Err(Error::field(&path, "eos_token_id", eot, expected));
    }
    let json = format!("{:#}\n", config_json(config, options.elem, eot));
    atomic::write_file(&path, |sink| {
        sink.put(json.as_bytes())?;
        Ok(sink.crc32())
    })
}

/// Writes `model.safetensors` and gives its CRC-32.
pub(in crate::format) fn write_weights(
    folder: &Path,
    config: &ModelConfig,
    options: &HfOptions,
    mut fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<u32> {
    let table = config.tensors();
    let dtype = options.elem.into();
    let prefix = if matches!(config, ModelConfig::Gpt2(_)) { PREFIX } else { "" };
    let infos = table
        .iter()
        .map(|spec| TensorInfo::new(format!("{prefix}{}", spec.name), dtype, stored_shape(config, spec)));
    // transformers refuses a file without this entry
    let metadata = [("format".to_owned(), "pt".to_owned())];
    let header = Header::build(&metadata, &infos.collect::<Vec<_>>())?;
    atomic::write_file(&folder.join(HF_WEIGHTS), |sink| {
        let mut writer = Writer::new(sink, header)?;
        let (mut values, mut turned) = (Vec::new(), Vec::new());
        for spec in &table {
            filled(spec, &mut values, &mut fill)?;
            let name = format!("{prefix}{}", spec.name);
            if is_transposed(config, spec) {
                turned.resize(values.len(), 0.0);
                transpose(&values, spec.shape.rows(), spec.shape.cols(), &mut turned);
                writer.put_f32(&name, &turned)?;
            } else {
                let stored: usize = stored_shape(config, spec).iter().product();
                writer.put_f32(&name, &values[..stored])?;
            }
        }
        writer.finish()?;
        Ok(sink.crc32())
    })
}
