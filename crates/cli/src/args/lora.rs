//! The flags of adapters.

use super::heading;
use crate::number;
use anyhow::{Result, ensure};
use clap::Args;
use ironhorse::train::model::{Lora, ModelConfig, Target, Targets};
use serde::Serialize;

/// Adapters that are trained in place of the weights.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = heading::LORA)]
#[serde(rename_all = "kebab-case")]
pub struct LoraArgs {
    /// Train adapters of this rank beside the frozen weights, which then need neither gradients nor moments
    #[arg(long, value_name = "R", value_parser = number::count::<usize>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<usize>,
    /// LoRA alpha: the adapters' product is scaled by alpha / R [default: 2·R]
    #[arg(long, value_name = "A", requires = "lora", value_parser = number::above_0::<f64>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Which weights have adapters: q, k, v, o, gate, up, down, or all [default: all; of a mixture of experts q,k,v,o]
    #[arg(long, value_name = "LIST", requires = "lora")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<String>,
}

impl LoraArgs {
    /// Fills in what was not given; serialised, the result reproduces the run.
    pub fn settle(&mut self, config: &ModelConfig) {
        let Some(rank) = self.lora else { return };
        self.alpha.get_or_insert(2.0 * rank as f64);
        let all = if config.has_experts() { &Target::ALL[..4] } else { &Target::ALL[..] };
        let names: Vec<&str> = all.iter().map(|target| target.name()).collect();
        self.targets.get_or_insert(names.join(","));
    }

    /// The adapters asked for, which this model can have.
    pub fn lora(&self, config: &ModelConfig) -> Result<Option<Lora>> {
        let mut settled = self.clone();
        settled.settle(config);
        let (Some(rank), Some(alpha), Some(targets)) = (settled.lora, settled.alpha, settled.targets) else {
            return Ok(None);
        };
        let lora = Lora { rank, alpha, targets: Targets::parse(&targets)? };
        lora.check(config)?;
        check_experts(&lora, config)?;
        Ok(Some(lora))
    }

    /// What follows a precision in a report.
    pub fn text(&self) -> String {
        self.lora.map_or_else(String::new, |rank| format!(", adapters of rank {rank}"))
    }
}

/// Refuses to train adapters of experts whose file PEFT would not read: transformers 5 has gate and up of experts as one
/// parameter, and PEFT expects the adapters of down around those of that parameter.
fn check_experts(lora: &Lora, config: &ModelConfig) -> Result<()> {
    let [gate, up, down] = Target::MLP.map(|target| lora.targets.has(target));
    ensure!(
        !config.has_experts() || (gate == up && (down || !gate)),
        "--targets {}: of experts, PEFT reads adapters of gate, up and down together, or of down alone",
        lora.targets
    );
    Ok(())
}
