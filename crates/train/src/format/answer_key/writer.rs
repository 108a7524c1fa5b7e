//! Writing an answer key.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::meta::{FORMAT, KeyOptimizer, VERSION};
use crate::Result;
use crate::format::safetensors::{Dtype, Header, TensorInfo, Writer};
use crate::format::stacked::expect_numel;
use crate::format::{Elem, Sink, atomic};
use crate::model::ModelConfig;

/// The description of an answer key; its floats come from a callback.
#[derive(Clone, Debug)]
pub struct AnswerKeySpec<'a> {
    /// The model's sizes.
    pub config: ModelConfig,
    /// Sequences (B).
    pub batch: usize,
    /// Tokens of a sequence (T).
    pub seq: usize,
    /// Inputs (B, T).
    pub x: &'a [i32],
    /// Targets (B, T).
    pub y: &'a [i32],
    /// The precision that was computed in: "f32", "bf16".
    pub dtype: &'a str,
    /// The seed of weights, tokens and the masks of dropout.
    pub seed: u64,
    /// Names and shapes of the activations, in execution order.
    pub acts: &'a [(String, Vec<usize>)],
    /// Whether their gradients are recorded as well.
    pub with_dacts: bool,
    /// The optimizer, if `losses` and `after.*` are recorded.
    pub optimizer: Option<KeyOptimizer>,
    /// More metadata, such as the version of torch.
    pub extra: &'a [(String, String)],
}

impl AnswerKeySpec<'_> {
    fn tensors(&self) -> Vec<TensorInfo> {
        let table = self.config.tensors();
        let float = |name: String, shape: Vec<usize>| TensorInfo::new(name, Dtype::F32, shape);
        let params = |prefix: &'static str| {
            table
                .iter()
                .map(move |spec| float(format!("{prefix}.{}", spec.name), self.config.unpadded_shape(spec)))
        };
        let mut list = vec![
            TensorInfo::new("x", Dtype::I32, [self.batch, self.seq]),
            TensorInfo::new("y", Dtype::I32, [self.batch, self.seq]),
        ];
        list.extend(params("param"));
        list.extend(self.acts.iter().map(|(name, shape)| float(format!("act.{name}"), shape.clone())));
        list.push(float("logits".into(), vec![self.batch, self.seq, self.config.vocab_size()]));
        list.push(float("loss".into(), vec![]));
        if self.with_dacts {
            list.extend(self.acts.iter().map(|(name, shape)| float(format!("dact.{name}"), shape.clone())));
        }
        list.extend(params("grad"));
        if let Some(optimizer) = &self.optimizer {
            list.push(float("losses".into(), vec![optimizer.steps]));
            list.extend(params("after"));
        }
        list
    }

    fn metadata(&self, crc32: &BTreeMap<String, u32>) -> Vec<(String, String)> {
        let acts: Vec<&str> = self.acts.iter().map(|(name, _)| &**name).collect();
        let mut pairs = vec![
            ("format".to_owned(), FORMAT.to_owned()),
            ("version".to_owned(), VERSION.to_owned()),
            ("model".to_owned(), self.config.kind().to_owned()),
            ("config".to_owned(), self.config.to_json().to_string()),
            ("dtype".to_owned(), self.dtype.to_owned()),
            ("seed".to_owned(), self.seed.to_string()),
            ("acts".to_owned(), json!(acts).to_string()),
        ];
        if let Some(optimizer) = &self.optimizer {
            pairs.push(("optimizer".to_owned(), json!(optimizer).to_string()));
        }
        pairs.push(("crc32".to_owned(), json!(crc32).to_string()));
        pairs.extend_from_slice(self.extra);
        pairs
    }
}

/// Writes an answer key atomically. `fill` is given the full name of a tensor (`param.wte.weight`, `act.h.0.ln_1`, ...)
/// and a zeroed buffer of its size, the token table without padding. It is called twice per tensor, because the
/// checksums come before the data, and must return the same both times.
pub fn write_answer_key(
    path: &Path,
    spec: &AnswerKeySpec<'_>,
    mut fill: impl FnMut(&str, &mut [f32]) -> Result<()>,
) -> Result<()> {
    spec.config.validate()?;
    expect_numel("x", spec.x.len(), spec.batch.saturating_mul(spec.seq))?;
    expect_numel("y", spec.y.len(), spec.x.len())?;
    let tensors = spec.tensors();
    let layout = Header::build(&[], &tensors)?;
    let mut crc32 = BTreeMap::new();
    let mut values = Vec::new();
    for entry in layout.entries() {
        let mut nowhere = std::io::sink();
        let mut sink = Sink::new(&mut nowhere, path);
        match &*entry.name {
            "x" => sink.put_i32(spec.x)?,
            "y" => sink.put_i32(spec.y)?,
            name => {
                produce(name, entry.numel(), &mut values, &mut fill)?;
                sink.put_f32(Elem::F32, &values)?;
            }
        }
        crc32.insert(entry.name.clone(), sink.crc32());
    }
    let header = Header::build(&spec.metadata(&crc32), &tensors)?;
    atomic::write_file(path, |sink| {
        let mut writer = Writer::new(sink, header)?;
        for entry in layout.entries() {
            match &*entry.name {
                "x" => writer.put_i32("x", spec.x)?,
                "y" => writer.put_i32("y", spec.y)?,
                name => {
                    produce(name, entry.numel(), &mut values, &mut fill)?;
                    writer.put_f32(name, &values)?;
                }
            }
        }
        writer.finish()
    })
}

fn produce(
    name: &str,
    numel: usize,
    values: &mut Vec<f32>,
    fill: &mut impl FnMut(&str, &mut [f32]) -> Result<()>,
) -> Result<()> {
    values.clear();
    values.resize(numel, 0.0);
    fill(name, values)
}
