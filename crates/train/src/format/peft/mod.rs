//! Adapters as PEFT keeps them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors have PEFT's names, `base_model.model.` before ours. Their shapes say what has adapters; of the settings, those
//! that would change what is computed are obeyed or refused by their names. The metadata of a file that we wrote has the
//! digest of its base, so that another base is refused.

mod config;
mod merged;

pub(in crate::format) use config::config_text;
pub use merged::Merged;

use self::config::AdapterConfig;
use super::safetensors::{Dtype, Header, SafeTensors, TensorInfo, Writer};
use super::stacked::expect_numel;
use super::{Sink, checkpoint};
use crate::model::{BaseDigest, Lora, ModelConfig, Targets, TensorSpec};
use crate::{Error, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The settings of an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Its tensors.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// What PEFT puts before the name of a tensor.
const PREFIX: &str = "base_model.model.";
/// The metadata that holds the digest of the base.
const BASE_DIGEST: &str = "ironhorse_base";

/// What an adapter says about its base.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BaseFacts {
    /// Its name or path.
    pub name: String,
    /// Its digest ([`BaseDigest`]); `None` where another tool wrote the adapter.
    pub digest: Option<String>,
}

/// An open folder of PEFT, whose tensors all belong to adapters of one rank.
#[derive(Debug)]
pub struct AdapterFolder {
    folder: PathBuf,
    file: SafeTensors<File>,
    lora: Lora,
    base: BaseFacts,
}

impl AdapterFolder {
    /// Opens a folder of PEFT, a checkpoint of a run with adapters, or the newest one of such a run.
    pub fn open(path: &Path) -> Result<Self> {
        let path = checkpoint::named_checkpoint(path)?;
        if path.join(ADAPTER_CONFIG).is_file() {
            return Self::open_folder(&path);
        }
        let newest = checkpoint::checkpoints_of(&path).into_iter().next();
        if let Some((_, newest)) = newest.filter(|(_, newest)| newest.join(ADAPTER_CONFIG).is_file()) {
            return Self::open_folder(&newest);
        }
        let expected = "an adapter: a folder of PEFT, or a run of `train --lora`";
        Err(Error::field(&path, "folder", format!("without {ADAPTER_CONFIG}"), expected))
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        let AdapterConfig { rank, alpha, base } = AdapterConfig::read(&folder.join(ADAPTER_CONFIG))?;
        let path = folder.join(ADAPTER_MODEL);
        if !path.exists() && folder.join("adapter_model.bin").exists() {
            let expected = format!("{ADAPTER_MODEL}; save it with safe_serialization=True");
            return Err(Error::field(folder, "adapter", "only adapter_model.bin, a pickle", expected));
        }
        let file = SafeTensors::open(&path)?;
        let mut targets = Targets::default();
        for entry in file.header().entries() {
            let name = entry.name.strip_prefix(PREFIX);
            let part = name.map(Lora::part_of).and_then(Result::ok);
            let Some((_, target, is_b)) = part else {
                let expected = "lora_A and lora_B of q, k, v, o, gate, up and down only";
                return Err(file.field("tensor", format!("{:?}", entry.name), expected));
            };
            let at = usize::from(is_b);
            if entry.shape.len() != 2 || entry.shape[at] != rank {
                let (field, found) = (format!("shape of `{}`", entry.name), format!("{:?}", entry.shape));
                let side = if is_b { "columns" } else { "rows" };
                return Err(file.field(field, found, format!("{rank} {side}, as {ADAPTER_CONFIG} says")));
            }
            targets.insert(target);
        }
        let digest = file.header().meta(BASE_DIGEST).map(str::to_owned);
        let (lora, base) = (Lora { rank, alpha, targets }, BaseFacts { name: base, digest });
        Ok(Self { folder: folder.to_owned(), file, lora, base })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Rank, alpha and targets.
    pub fn lora(&self) -> Lora {
        self.lora
    }

    /// What it says about its base.
    pub fn base(&self) -> &BaseFacts {
        &self.base
    }

    /// Refuses an adapter whose tensors are not all those that it has for this model, in their shapes.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        self.lora.check(config).map_err(|error| error.in_file(&self.folder))?;
        let table = self.lora.tensors(config);
        for spec in &table {
            let name = format!("{PREFIX}{}", spec.name);
            let (entry, _) = self.file.float_entry(&name)?;
            if entry.shape != spec.shape.dims() {
                let field = format!("shape of `{name}`");
                let expected = format!("{} of this base; the adapter is for {}", spec.shape, self.base.name);
                return Err(self.file.field(field, format!("{:?}", entry.shape), expected));
            }
        }
        let held = self.file.header().entries().len();
        if held > table.len() {
            let found = format!("{held} tensors, of more layers");
            let expected = format!("{} of this base; the adapter is for {}", table.len(), self.base.name);
            return Err(Error::field(&self.folder, "adapter", found, expected));
        }
        Ok(())
    }

    /// Refuses a base that is not the one it was trained with, where it says which.
    pub fn check_base(&self, digest: &BaseDigest, base: &Path) -> Result<()> {
        match &self.base.digest {
            Some(want) if *want != digest.text() => {
                let found = format!("for the base {} of digest {want}", self.base.name);
                let expected = format!("one for {}, of digest {}", base.display(), digest.text());
                Err(Error::field(&self.folder, "adapter", found, expected))
            }
            _ => Ok(()),
        }
    }

    /// Fills `out` with a tensor by its name in the table of [`Lora::tensors`].
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        let name = format!("{PREFIX}{name}");
        expect_numel(&name, out.len(), self.file.float_entry(&name)?.0.numel())?;
        self.file.read_f32(&name, out)?;
        match out.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.file.field(format!("`{name}` at {at}"), out[at], "a finite number")),
            None => Ok(()),
        }
    }

    /// Fills `out` with a tensor of adapters that cover this one ([`Lora::covering`]): 0 where it has none, and its own
    /// factor in B.
    pub fn read_as(&mut self, cover: &Lora, spec: &TensorSpec, out: &mut [f32]) -> Result<()> {
        if *cover == self.lora {
            return self.read_tensor(&spec.name, out);
        }
        out.fill(0.0);
        let (_, target, is_b) = Lora::part_of(&spec.name)?;
        if !self.lora.targets.has(target) {
            return Ok(());
        }
        let (rank, cols) = (self.lora.rank, spec.shape.cols());
        let mut own = vec![0.0; if is_b { spec.shape.rows() * rank } else { rank * cols }];
        self.read_tensor(&spec.name, &mut own)?;
        if !is_b {
            out[..own.len()].copy_from_slice(&own);
            return Ok(());
        }
        let factor = (self.lora.scale() / cover.scale()) as f32;
        for (row, own) in out.chunks_mut(cols).zip(own.chunks(rank)) {
            row.iter_mut().zip(own).for_each(|(out, own)| *out = factor * own);
        }
        Ok(())
    }
}

/// Writes the tensors of adapters as f32: `read(spec, values)` for each in model order.
pub(in crate::format) fn write_adapter(
    sink: &mut Sink<'_>,
    table: &[TensorSpec],
    base: &BaseFacts,
    mut read: impl FnMut(usize, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let name = |spec: &TensorSpec| format!("{PREFIX}{}", spec.name);
    let infos = table.iter().map(|spec| TensorInfo::new(name(spec), Dtype::F32, spec.shape.dims()));
    let mut metadata = vec![("format".to_owned(), "pt".to_owned())];
    metadata.extend(base.digest.iter().map(|digest| (BASE_DIGEST.to_owned(), digest.clone())));
    let header = Header::build(&metadata, &infos.collect::<Vec<_>>())?;
    let mut writer = Writer::new(sink, header)?;
    let mut values = Vec::new();
    for (index, spec) in table.iter().enumerate() {
        values.clear();
        values.resize(spec.shape.numel(), 0.0);
        read(index, &mut values)?;
        writer.put_f32(&name(spec), &values)?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests;
