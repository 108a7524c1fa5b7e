//! Reading an answer key.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use super::meta::{KeyMeta, KeyOptimizer};
use crate::format::atomic;
use crate::format::safetensors::{Dtype, SafeTensors};
use crate::format::shards::check_tokens;
use crate::format::stacked::expect_numel;
use crate::model::{Adapted, ModelConfig, TensorSpec};
use crate::session::OwnedBatch;
use crate::{Error, Result};
use ironhorse_core::op::{IGNORED, check_pairs, check_positions};

/// An open answer key, whose tensors have been checked to exist with the right shapes.
#[derive(Debug)]
pub struct AnswerKey<R = File> {
    file: SafeTensors<R>,
    meta: KeyMeta,
    batch: usize,
    seq: usize,
}

impl AnswerKey<File> {
    /// Opens a file and checks metadata, shapes and tokens.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(SafeTensors::open(path)?)
    }
}

impl<R: Read + Seek> AnswerKey<R> {
    /// Checks metadata, shapes and tokens.
    pub fn new(file: SafeTensors<R>) -> Result<Self> {
        let meta = KeyMeta::parse(file.header(), file.path())?;
        let count = file.header().entries().len();
        // before the parameter table is made: it grows with the layers
        let (per_layer, layers) = (2 * meta.config.tensors_per_layer(), meta.config.layers());
        if count < per_layer * layers {
            let expected = format!("at least {per_layer} for each of {layers} layers");
            return Err(file.field("number of tensors", count, expected));
        }
        let mut key = Self { file, meta, batch: 0, seq: 0 };
        key.check_batch()?;
        key.check_tensors()?;
        Ok(key)
    }

    fn check_batch(&mut self) -> Result<()> {
        let shape = self.file.entry("x")?.shape.clone();
        let max_seq = self.meta.config.max_seq_len();
        match shape[..] {
            [batch, seq] if batch > 0 && (1..=max_seq).contains(&seq) => {
                (self.batch, self.seq) = (batch, seq)
            }
            _ => {
                let expected = format!("[B, T] with T from 1 to max_seq_len, {max_seq}");
                return Err(self.file.field("shape of `x`", format!("{shape:?}"), expected));
            }
        }
        self.expect_shape("y", &shape)?;
        let vocab = self.meta.config.vocab_size();
        for name in ["x", "y"] {
            let mut tokens = self.file.read_i32(name)?;
            if name == "y" {
                // ignored targets are in order; 0 is a token of every vocabulary
                tokens.iter_mut().filter(|target| **target == IGNORED).for_each(|target| *target = 0);
            }
            check_tokens(self.path(), &tokens, vocab, |index| format!("{name}[{index}]"))?;
        }
        self.check_documents()
    }

    /// Checks the positions of packed sequences, and pairs, where the key has them.
    fn check_documents(&mut self) -> Result<()> {
        let (batch, seq) = (self.batch, self.seq);
        if self.is_packed() {
            self.expect_shape("positions", &[batch, seq])?;
            let positions = self.file.read_i32("positions")?;
            check_positions(&positions, seq).map_err(|error| self.wrong("positions", &error))?;
        }
        if self.meta.preference.is_some() {
            self.expect_float("reference", &[batch, seq])?;
            let found = self.file.entry("pairs")?.shape.clone();
            let most = (batch * seq / 2).max(1);
            if !matches!(found[..], [count, 3] if count <= most) {
                let expected = format!("[P, 3] with P at most {most}");
                return Err(self.file.field("shape of `pairs`", format!("{found:?}"), expected));
            }
            if self.has("rewards") {
                self.expect_float("rewards", &[found[0], 2])?;
            }
            let pairs = self.file.read_i32("pairs")?;
            check_pairs(&pairs, batch * seq).map_err(|error| self.wrong("pairs", &error))?;
        }
        Ok(())
    }

    fn wrong(&self, tensor: &str, error: &ironhorse_core::Error) -> Error {
        self.file.field(format!("`{tensor}`"), format!("wrong ({error})"), "rows of documents in order")
    }

    fn check_tensors(&self) -> Result<()> {
        let config = &self.meta.config;
        let trained = Adapted { config: *config, lora: self.meta.lora };
        if let Some(lora) = &self.meta.lora {
            lora.check(config).map_err(|error| error.in_file(self.path()))?;
            for spec in config.tensors() {
                self.expect_float(&format!("param.{}", spec.name), &config.unpadded_shape(&spec))?;
            }
        }
        let table = trained.tensors();
        let after = self.file.header().entries().iter().any(|entry| entry.name.starts_with("after."));
        for spec in &table {
            let shape = config.unpadded_shape(spec);
            self.expect_float(&format!("param.{}", spec.name), &shape)?;
            self.expect_float(&format!("grad.{}", spec.name), &shape)?;
            if after {
                self.expect_float(&format!("after.{}", spec.name), &shape)?;
            }
        }
        self.expect_float("logits", &[self.batch, self.seq, config.vocab_size()])?;
        let loss = self.file.entry("loss")?;
        let scalar: &[usize] = if loss.shape.is_empty() { &[] } else { &[1] };
        self.expect_float("loss", scalar)?;
        for name in &self.meta.acts {
            // the chosen experts are integers
            if self.file.entry(&format!("act.{name}"))?.dtype != Dtype::I32 {
                self.file.float_entry(&format!("act.{name}"))?;
            }
            let gradient = format!("dact.{name}");
            if self.has(&gradient) {
                self.expect_float(&gradient, &self.file.entry(&format!("act.{name}"))?.shape)?;
            }
        }
        if after || self.has("losses") {
            let Some(optimizer) = &self.meta.optimizer else {
                let expected = "the optimizer behind `losses` and `after.*`";
                return Err(self.file.field("metadata `optimizer`", "missing", expected));
            };
            self.expect_float("losses", &[optimizer.steps])?;
        }
        match self.meta.crc32.keys().find(|name| !self.has(name)) {
            None => Ok(()),
            Some(name) => {
                Err(self.file.field(format!("tensor `{name}`"), "missing", "in the file: it has a crc32"))
            }
        }
    }

    fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        let found = &self.file.entry(name)?.shape;
        if found == shape {
            return Ok(());
        }
        Err(self.file.field(format!("shape of `{name}`"), format!("{found:?}"), format!("{shape:?}")))
    }

    fn expect_float(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.file.float_entry(name)?;
        self.expect_shape(name, shape)
    }

    /// Sequences in the batch (B).
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens of a sequence (T).
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.meta.config
    }

    /// The activations in execution order; each is a tensor `act.NAME`.
    pub fn acts(&self) -> &[String] {
        &self.meta.acts
    }

    /// The optimizer behind `losses` and `after.*`.
    pub fn optimizer(&self) -> Option<&KeyOptimizer> {
        self.meta.optimizer.as_ref()
    }

    /// All metadata.
    pub fn meta(&self) -> &KeyMeta {
        &self.meta
    }

    /// The underlying safetensors file, for its header and entries.
    pub fn file(&self) -> &SafeTensors<R> {
        &self.file
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether there is a tensor of that name: `dact.h.0.ln_1`, `losses`.
    pub fn has(&self, name: &str) -> bool {
        self.file.header().get(name).is_some()
    }

    /// Inputs (B, T).
    pub fn x(&mut self) -> Result<Vec<i32>> {
        self.file.read_i32("x")
    }

    /// Targets (B, T).
    pub fn y(&mut self) -> Result<Vec<i32>> {
        self.file.read_i32("y")
    }

    /// Whether sequences hold several documents, so that the key has `positions`.
    pub fn is_packed(&self) -> bool {
        self.has("positions")
    }

    /// Everything that a step is given.
    pub fn inputs(&mut self) -> Result<OwnedBatch> {
        let positions = if self.is_packed() { Some(self.file.read_i32("positions")?) } else { None };
        let pairs = match self.meta.preference {
            Some(_) => Some((self.file.read_i32("pairs")?, self.file.read_f32_vec("reference")?)),
            None => None,
        };
        Ok(OwnedBatch { x: self.x()?, y: self.y()?, positions, pairs })
    }

    /// A tensor by its full name: `act.h.0.ln_1`, `grad.wte.weight`, `logits`. Without padding.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        if self.file.entry(name)?.dtype == Dtype::I32 {
            return Ok(self.file.read_i32(name)?.into_iter().map(|value| value as f32).collect());
        }
        self.file.read_f32_vec(name)
    }

    /// Fills `out` with a tensor by its full name. For `param.`, `grad.` and `after.` of a table with a row for each
    /// token, `out` may have the padded size: the rows beyond the vocabulary become 0.
    pub fn read_into(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let held = self.file.entry(name)?.numel();
        let param = ["param.", "grad.", "after."].iter().find_map(|prefix| name.strip_prefix(prefix));
        if param.is_some_and(|param| self.meta.config.is_vocab_table(param)) && out.len() == self.padded() {
            let (rows, padding) = out.split_at_mut(held);
            padding.fill(0.0);
            return self.file.read_f32(name, rows);
        }
        expect_numel(name, out.len(), held)?;
        self.file.read_f32(name, out)
    }

    /// Elements of a table with a row for each token, padded.
    fn padded(&self) -> usize {
        self.meta.config.padded_vocab_size() * self.meta.config.width()
    }

    /// Reads one parameter by its name in the parameter table, padded.
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        if self.meta.config.is_vocab_table(name) {
            expect_numel(name, out.len(), self.padded())?;
        }
        self.read_into(&format!("param.{name}"), out)
    }

    /// The parameter table of the model.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.meta.config.tensors()
    }

    /// The tensors whose bytes do not have the recorded checksum; reads the whole file, some at a time.
    pub fn crc_mismatches(&mut self) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (name, &want) in &self.meta.crc32 {
            if self.file.crc32(name)? != want {
                wrong.push(name.clone());
            }
        }
        Ok(wrong)
    }

    /// Writes the key again, byte for byte.
    pub fn copy(&mut self, path: &Path) -> Result<()> {
        atomic::write_file(path, |sink| self.file.copy_to(sink))
    }
}
