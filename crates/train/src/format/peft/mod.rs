//! Adapters as PEFT keeps them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors have PEFT's names, `base_model.model.` before ours. Experts are modules of their own there, as in the files of
//! models; PEFT stacks them as it reads where transformers does. Their shapes say what has adapters; of the settings, those
//! that would change what is computed are obeyed or refused by their names. The metadata of a file that we wrote has the
//! digest of its base, so that another base is refused.

mod config;
mod merged;
mod stacked;

pub(in crate::format) use config::config_text;
pub use merged::Merged;

use self::config::{AdapterConfig, UNNAMED};
use self::stacked::{Held, Own, Stacked};
use super::safetensors::{Dtype, Header, SafeTensors, TensorInfo, Writer};
use super::stacked::expect_numel;
use super::{Sink, checkpoint};
use crate::model::{AdapterPart, BaseDigest, Lora, ModelConfig, Targets, TensorSpec};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
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
pub struct AdapterFolder<R = File> {
    folder: PathBuf,
    file: SafeTensors<R>,
    /// Adapters that can stand for all of the file's, whose ranks and factors may differ.
    lora: Lora,
    /// Rank and alpha of the adapters that are not stacked.
    own: Own,
    stacked: Stacked,
    held: Held,
    base: BaseFacts,
}

impl AdapterFolder<File> {
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
        let config = folder.join(ADAPTER_CONFIG);
        let settings = std::fs::read(&config).map_err(|source| Error::io(&config, "read", source))?;
        let path = folder.join(ADAPTER_MODEL);
        if !path.exists() && folder.join("adapter_model.bin").exists() {
            let expected = format!("{ADAPTER_MODEL}; save it with safe_serialization=True");
            return Err(Error::field(folder, "adapter", "only adapter_model.bin, a pickle", expected));
        }
        Self::new(folder, &settings, SafeTensors::open(&path)?)
    }
}

impl<R: Read + Seek> AdapterFolder<R> {
    /// Reads the settings, the content of `adapter_config.json`, and checks that `file` has adapters of their ranks and nothing
    /// else.
    pub fn new(folder: &Path, settings: &[u8], file: SafeTensors<R>) -> Result<Self> {
        let AdapterConfig { own, stacked, base } =
            AdapterConfig::parse(settings, &folder.join(ADAPTER_CONFIG))?;
        let mut targets = Targets::default();
        for entry in file.header().entries() {
            let name = entry.name.strip_prefix(PREFIX);
            if let Some((several, _)) = name.and_then(|name| stacked.targets_of(name)) {
                several.iter().for_each(|&target| targets.insert(target));
                continue; // the sizes are checked with those of a model
            }
            let part = name.map(Lora::part_of).and_then(Result::ok);
            let Some(AdapterPart { target, is_b, .. }) =
                part.filter(|part| stacked.of(part.target).is_none())
            else {
                let expected = "lora_A and lora_B of q, k, v, o, gate, up and down only";
                return Err(file.field("tensor", format!("{:?}", entry.name), expected));
            };
            let (at, rank) = (usize::from(is_b), own.rank);
            if entry.shape.len() != 2 || entry.shape[at] != rank {
                let (field, found) = (format!("shape of `{}`", entry.name), format!("{:?}", entry.shape));
                let side = if is_b { "columns" } else { "rows" };
                return Err(file.field(field, found, format!("{rank} {side}, as {ADAPTER_CONFIG} says")));
            }
            targets.insert(target);
        }
        let digest = file.header().meta(BASE_DIGEST).map(str::to_owned);
        let base = BaseFacts { name: base, digest };
        let lora = covering(targets, own, stacked);
        let folder = folder.to_owned();
        Ok(Self { folder, file, lora, own, stacked, held: Held::default(), base })
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
        let experts = if let ModelConfig::Moe(sizes) = config { sizes.n_experts } else { 0 };
        let mut expected = BTreeMap::new();
        for spec in self.lora.tensors(config) {
            let part = Lora::part_of(&spec.name)?;
            match self.stacked.of(part.target) {
                Some(own) if part.expert.is_some() => {
                    let dims = [spec.shape.rows(), spec.shape.cols()];
                    expected.insert(self.stacked.tensor(part), Stacked::shape(part, own, experts, dims));
                }
                Some(_) => {
                    return Err(self.file.field("adapter", "of experts", "one for a model without experts"));
                }
                None => {
                    let [rows, cols] = [spec.shape.rows(), spec.shape.cols()];
                    let rank = self.own.rank;
                    let shape = if part.is_b { [rows, rank] } else { [rank, cols] };
                    expected.insert(spec.name, shape);
                }
            }
        }
        for (name, shape) in &expected {
            let name = format!("{PREFIX}{name}");
            let (entry, _) = self.file.float_entry(&name)?;
            if entry.shape != shape {
                let field = format!("shape of `{name}`");
                let expected = format!("{shape:?} of this base; the adapter is for {}", self.base.name);
                return Err(self.file.field(field, format!("{:?}", entry.shape), expected));
            }
        }
        let held = self.file.header().entries().len();
        if held > expected.len() {
            let found = format!("{held} tensors, of more layers or experts");
            let expected = format!("{} of this base; the adapter is for {}", expected.len(), self.base.name);
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

    /// What is doubtful about a base that goes by these names: adapters of PEFT only say a name, and one for another base of the
    /// same shapes gives text without sense. `None` where the digest of the base is known, or the name is one of these.
    pub fn doubt(&self, names: &[&Path]) -> Option<String> {
        let said = Path::new(&self.base.name);
        let last = said.file_name()?;
        let same = |name: &&Path| {
            let parts = || name.components().map(|part| part.as_os_str());
            *name == said || parts().any(|part| part == last)
        };
        let unknown = self.base.digest.is_some() || self.base.name == UNNAMED;
        let fits = unknown || names.iter().any(same);
        (!fits).then(|| {
            format!(
                "{}: the adapter says that its base is {}; it has the shapes of {}, and nothing else says that it fits",
                self.folder.display(),
                self.base.name,
                names.first().map_or_else(String::new, |name| name.display().to_string())
            )
        })
    }

    /// Fills `out` with a tensor by its name in the table of [`Lora::tensors`].
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        self.read_as(&self.lora.clone(), name, out)
    }

    /// The numbers of a tensor as the file has them, in its own rank.
    fn read_own(&mut self, name: &str, part: AdapterPart) -> Result<Vec<f32>> {
        let stacked = self.stacked.of(part.target).filter(|_| part.expert.is_some());
        let name = match stacked {
            Some(_) => format!("{PREFIX}{}", self.stacked.tensor(part)),
            None => format!("{PREFIX}{name}"),
        };
        let values = match stacked {
            Some(own) => self.held.part(&mut self.file, &name, part, own)?,
            None => {
                let mut values = vec![0.0; self.file.float_entry(&name)?.0.numel()];
                self.file.read_f32(&name, &mut values)?;
                values
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.file.field(format!("`{name}` at {at}"), values[at], "a finite number")),
            None => Ok(values),
        }
    }

    /// Fills `out` with a tensor, by its name, of adapters that cover this one ([`Lora::covering`]): 0 where it has none, and
    /// its own factor in B.
    pub fn read_as(&mut self, cover: &Lora, name: &str, out: &mut [f32]) -> Result<()> {
        let part = Lora::part_of(name)?;
        if !self.lora.targets.has(part.target) {
            out.fill(0.0);
            return Ok(());
        }
        let values = self.read_own(name, part)?;
        let Own { rank, alpha } = self.stacked.of(part.target).unwrap_or(self.own);
        expect_numel(name, out.len() * rank, values.len() * cover.rank)?;
        if (rank, alpha) == (cover.rank, cover.alpha) {
            out.copy_from_slice(&values);
            return Ok(());
        }
        out.fill(0.0);
        if !part.is_b {
            out[..values.len()].copy_from_slice(&values);
            return Ok(());
        }
        let factor = (alpha / rank as f64 / cover.scale()) as f32;
        for (row, own) in out.chunks_mut(cover.rank).zip(values.chunks(rank)) {
            row.iter_mut().zip(own).for_each(|(out, own)| *out = factor * own);
        }
        Ok(())
    }
}

/// Adapters on these targets that can stand for those of a file.
fn covering(targets: Targets, own: Own, stacked: Stacked) -> Lora {
    let lora = |Own { rank, alpha }: Own| Lora { rank, alpha, targets };
    let all: Vec<Lora> = targets.iter().map(|target| lora(stacked.of(target).unwrap_or(own))).collect();
    Lora::covering(&all).unwrap_or(lora(own))
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
