//! The programs of a model with adapters, or without.

use super::Lora;
use crate::model::decoder::{self, Plan};
use crate::model::{ModelConfig, ServingStep, StepOptions, TensorSpec};
use crate::{Error, Result};
use ironhorse_core::{Optimizer, Precision, Program};

/// A model, and the adapters that are trained in its place if there are any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapted {
    /// The model.
    pub config: ModelConfig,
    /// Its adapters.
    pub lora: Option<Lora>,
}

impl Adapted {
    /// The table of what is trained: the adapters, or all parameters.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        match &self.lora {
            Some(lora) => lora.tensors(&self.config),
            None => self.config.tensors(),
        }
    }

    /// How many parameters are trained, the padding of the vocabulary not counted.
    pub fn trained_params(&self) -> usize {
        match &self.lora {
            Some(_) => self.tensors().iter().map(|spec| spec.shape.numel()).sum(),
            None => self.config.told_params(),
        }
    }

    fn plan(&self, lora: Lora) -> Result<Plan> {
        lora.check(&self.config)?;
        let mut plan = self.config.plan()?;
        plan.setup.adapters = Some(lora.groups(&self.config));
        plan.lora = Some((lora, self.config));
        Ok(plan)
    }

    /// [`ModelConfig::training`], with adapters if there are any: the update changes those only.
    pub fn training(
        &self,
        batch: (usize, usize),
        options: impl Into<StepOptions>,
        precision: Precision,
    ) -> Result<Program> {
        let options = options.into();
        let Some(lora) = self.lora else { return self.config.training(batch, options, precision) };
        if options.dropout.drops() {
            return Err(Error::input("dropout", options.dropout.rate(), "0 with adapters"));
        }
        if precision.optimizer != Optimizer::AdamW {
            let found = precision.optimizer.name();
            return Err(Error::input("the optimizer of adapters", found, Optimizer::AdamW.name()));
        }
        decoder::training(self.plan(lora)?, batch, options, precision)
    }

    /// [`ModelConfig::evaluation_of`]
    pub fn evaluation_of(
        &self,
        batch: (usize, usize),
        options: StepOptions,
        precision: Precision,
    ) -> Result<Program> {
        match self.lora {
            Some(lora) => decoder::evaluation(self.plan(lora)?, batch, options, precision),
            None => self.config.evaluation_of(batch, options, precision),
        }
    }

    /// [`ModelConfig::scoring`]
    pub fn scoring(&self, batch: (usize, usize), precision: Precision) -> Result<Program> {
        match self.lora {
            Some(lora) => decoder::scoring(self.plan(lora)?, batch, precision),
            None => self.config.scoring(batch, precision),
        }
    }

    /// [`ModelConfig::decoding`]
    pub fn decoding(&self, batch: usize, precision: Precision) -> Result<Program> {
        match self.lora {
            Some(lora) => decoder::decoding(self.plan(lora)?, batch, None, precision),
            None => self.config.decoding(batch, precision),
        }
    }

    /// [`ModelConfig::decoding_within`] of this model.
    pub fn decoding_within(&self, batch: usize, positions: usize, precision: Precision) -> Result<Program> {
        match self.lora {
            Some(lora) => decoder::decoding(self.plan(lora)?, batch, Some(positions), precision),
            None => self.config.decoding_within(batch, positions, precision),
        }
    }

    /// [`ModelConfig::serving`] of this model.
    pub fn serving(&self, step: ServingStep, precision: Precision) -> Result<Program> {
        match self.lora {
            Some(lora) => decoder::serving(self.plan(lora)?, step, precision),
            None => self.config.serving(step, precision),
        }
    }
}

impl From<ModelConfig> for Adapted {
    fn from(config: ModelConfig) -> Self {
        Self { config, lora: None }
    }
}
