//! The weights of a base with an adapter in them, as one source of weights.

use super::AdapterFolder;
use crate::Result;
use crate::format::checkpoint::TrainerState;
use crate::format::hf::TextTokens;
use crate::format::tokenizer::{NamedFiles, tokenizer_files};
use crate::format::weights::{AdaptedFrom, WeightSource};
use crate::model::{AdapterPart, BaseDigest, Lora, ModelConfig, add_product};
use std::path::{Path, PathBuf};

/// A base and an adapter for it: `W + (alpha/r)·B·A`, computed when a weight is read.
pub struct Merged {
    base: Box<dyn WeightSource>,
    adapter: AdapterFolder,
    /// What it is called: that of the run or checkpoint, or of the adapter.
    path: PathBuf,
    trainer: Option<TrainerState>,
}

impl Merged {
    /// Refuses an adapter for another base. Where the adapter has its base's digest, the base is read for it.
    pub fn new(mut base: Box<dyn WeightSource>, adapter: AdapterFolder) -> Result<Self> {
        adapter.check(&base.config())?;
        if adapter.base().digest.is_some() {
            let mut digest = BaseDigest::default();
            for spec in base.config().tensors() {
                let mut values = vec![0.0; spec.shape.numel()];
                base.read_unchecked(&spec.name, &mut values)?;
                digest.add(&spec.name, &values);
            }
            adapter.check_base(&digest, base.path())?;
        }
        let path = adapter.path().to_owned();
        Ok(Self { base, adapter, path, trainer: None })
    }

    /// Adds the state of the run whose adapter it is.
    #[must_use]
    pub fn with_trainer(self, trainer: TrainerState) -> Self {
        Self { trainer: Some(trainer), ..self }
    }
}

impl WeightSource for Merged {
    fn config(&self) -> ModelConfig {
        self.base.config()
    }

    fn read_unchecked(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        self.base.read_unchecked(name, out)?;
        let Some(stem) = name.strip_suffix(".weight") else { return Ok(()) };
        let names = ["A", "B"].map(|which| format!("{stem}.lora_{which}.weight"));
        let lora = self.adapter.lora();
        let Ok(AdapterPart { target, .. }) = Lora::part_of(&names[0]) else { return Ok(()) };
        if !lora.targets.has(target) {
            return Ok(());
        }
        let config = self.base.config();
        let mut parts = [false, true].map(|is_b| vec![0.0; lora.numel(&config, target, is_b)]);
        for (values, name) in parts.iter_mut().zip(&names) {
            self.adapter.read_tensor(name, values)?;
        }
        add_product(out, [&parts[0], &parts[1]], &lora);
        Ok(())
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn text_tokens(&self) -> TextTokens {
        self.base.text_tokens()
    }

    fn trainer(&self) -> Option<&TrainerState> {
        self.trainer.as_ref()
    }

    fn adapted(&self) -> Option<AdaptedFrom> {
        let table = self.adapter.lora().tensors(&self.base.config());
        let stems = table.iter().filter_map(|spec| spec.name.strip_suffix(".lora_A.weight"));
        let names = stems.map(|stem| format!("{stem}.weight")).collect();
        Some(AdaptedFrom { base: self.base.path().to_owned(), names })
    }

    /// The tokenizer files beside the adapter, or else those of the base.
    fn tokenizer_files(&self) -> Result<NamedFiles> {
        let own = tokenizer_files(&self.path)?;
        if own.is_empty() { self.base.tokenizer_files() } else { Ok(own) }
    }
}
