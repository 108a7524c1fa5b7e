//! Writing a file.

use std::path::Path;

use super::header::{TensorInfo, Value, encode};
use super::numbers::{BLOCK, GgufType, quantize};
use super::sizes::{architecture, check, keys};
use super::tensors::{Content, Stored, pair_rows, tensors};
use crate::format::stacked::filled;
use crate::format::{Sink, atomic};
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

/// How to write a file.
#[derive(Clone, Debug)]
pub struct GgufOptions {
    /// The type of matrices; vectors, routers and tables of positions are f32.
    pub kind: GgufType,
    /// What the model is called.
    pub name: String,
    /// The tokenizer and the chat template as metadata; empty if there are none, and the file says so.
    pub tokenizer: Vec<(String, Value)>,
}

/// Values converted at a time.
const CHUNK: usize = 256 * BLOCK;

/// Writes a file atomically. `fill` is called once per parameter, in the order of the file, with a zeroed buffer of its shape in the
/// parameter table: (out, in), padded. A model that the file cannot hold is refused before anything is written.
pub fn write_gguf(
    path: &Path,
    config: &ModelConfig,
    options: &GgufOptions,
    mut fill: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    config.validate()?;
    check(config, path)?;
    let stored = tensors(config, options.kind, path)?;
    let infos: Vec<TensorInfo> = stored.iter().map(|tensor| tensor.info.clone()).collect();
    let head = encode(&metadata(config, options), &infos);
    atomic::write_file(path, |sink| {
        sink.put(&head)?;
        let mut writer = Writer { sink, values: Vec::new(), bytes: Vec::new() };
        stored.iter().try_for_each(|tensor| writer.put(tensor, &mut fill))
    })
}

/// All metadata.
fn metadata(config: &ModelConfig, options: &GgufOptions) -> Vec<(String, Value)> {
    let general = [
        ("general.architecture", architecture(config).into()),
        ("general.type", "model".into()),
        ("general.name", options.name.as_str().into()),
        ("general.file_type", Value::U32(options.kind.file_type())),
        ("general.quantization_version", Value::U32(2)),
    ];
    let mut all: Vec<_> = general.map(|(key, value)| (key.to_owned(), value)).into();
    all.extend(keys(config));
    if options.tokenizer.is_empty() {
        all.push(("tokenizer.ggml.model".into(), "none".into()));
    }
    all.extend(options.tokenizer.iter().cloned());
    all
}

struct Writer<'a, 'b> {
    sink: &'a mut Sink<'b>,
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Writer<'_, '_> {
    fn put(
        &mut self,
        tensor: &Stored,
        fill: &mut impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let info = &tensor.info;
        match &tensor.content {
            Content::Values(values) => self.put_values(info, values)?,
            Content::Parameters { specs, paired } => {
                // of experts one at a time; rows that pad the vocabulary are not stored
                let stored = info.dims.iter().product::<usize>() / specs.len();
                let width = info.dims.last().copied().unwrap_or(1);
                let mut values = std::mem::take(&mut self.values);
                for spec in specs {
                    filled(spec, &mut values, &mut *fill)?;
                    if let Some(dim) = *paired {
                        pair_rows(&mut values, dim, width);
                    }
                    self.put_values(info, &values[..stored])?;
                }
                self.values = values;
            }
        }
        self.sink.put(&vec![0; info.padding() as usize])
    }

    fn put_values(&mut self, info: &TensorInfo, values: &[f32]) -> Result<()> {
        let limit = info.kind.limit();
        // NaN is a problem too
        if let Some(value) = values.iter().find(|value| value.is_nan() || value.abs() >= limit) {
            let expected = format!("a magnitude below {limit}, which {} can hold", info.kind);
            return Err(Error::field(
                self.sink.path(),
                format!("a weight of `{}`", info.name),
                value,
                expected,
            ));
        }
        if let Some(elem) = info.kind.elem() {
            return self.sink.put_f32(elem, values);
        }
        for chunk in values.chunks(CHUNK) {
            self.bytes.clear();
            quantize(chunk, &mut self.bytes);
            self.sink.put(&self.bytes)?;
        }
        Ok(())
    }
}
