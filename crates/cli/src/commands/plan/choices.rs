//! Every choice that changes the memory of a run: what it needs by category, whether it fits, and which to take.

use crate::args::{Dtype, FlagValue, Fp8Args, MasterArg, MomentsArg, OptimizerArg, RecomputeArg, StateArgs};
use crate::hardware::human_bytes;
use anyhow::Result;
use clap::ValueEnum;
use ironhorse::core::{DropRate, Layout, Pool};
use ironhorse::train::model::{Adapted, StepOptions, Sums};
use serde::Serialize;

/// What a training step is planned for, whatever is chosen.
pub struct Asked<'a> {
    pub model: &'a Adapted,
    pub batch: (usize, usize),
    pub accumulate: u32,
    /// How micro-steps are added up.
    pub sums: Option<Sums>,
    pub dtype: Dtype,
    pub optimizer: OptimizerArg,
    pub fp8: Fp8Args,
    pub dropout: DropRate,
    /// What may be used, where that is known.
    pub room: Option<u64>,
}

/// A choice and what it needs.
#[derive(Serialize)]
pub struct Choice {
    pub recompute: RecomputeArg,
    #[serde(flatten)]
    pub state: StateArgs,
    bytes: Categories,
    activation_bytes: usize,
    pub total_bytes: usize,
    /// Absent where the machine does not say what it has.
    fits: Option<bool>,
}

#[derive(Serialize)]
struct Categories {
    weights: usize,
    master: usize,
    gradients: usize,
    moments: usize,
    activations: usize,
    /// Inputs, results, caches.
    other: usize,
}

impl Categories {
    fn new(layout: &Layout) -> Self {
        let of = |pool| layout.bytes(pool);
        Self {
            weights: of(Pool::Params) + of(Pool::Frozen),
            master: of(Pool::Master),
            gradients: of(Pool::Grads),
            moments: of(Pool::Moment1) + of(Pool::Moment2),
            activations: of(Pool::Activations),
            other: of(Pool::Io) + of(Pool::Cache) + of(Pool::Scales),
        }
    }
}

impl Asked<'_> {
    /// Every way to keep state, each with every level of recomputation. Levels that do nothing for the model are left
    /// out, as are choices that need bf16 weights with other weights.
    pub fn choices(&self) -> Result<Vec<Choice>> {
        let mut choices = Vec::new();
        for &master in MasterArg::value_variants() {
            for &moments in MomentsArg::value_variants() {
                let state = StateArgs { optimizer: self.optimizer, master, moments, fp8: self.fp8 };
                let has =
                    |level: RecomputeArg| level != RecomputeArg::Experts || self.model.config.has_experts();
                for &recompute in RecomputeArg::value_variants().iter().filter(|&&level| has(level)) {
                    if let Ok(precision) = state.precision(self.dtype, self.accumulate) {
                        let options = StepOptions {
                            recompute: recompute.into(),
                            dropout: self.dropout,
                            sums: self.sums,
                            ..StepOptions::default()
                        };
                        let program = self.model.training(self.batch, options, precision)?;
                        choices.push(self.choice(recompute, state, program.layout()));
                    }
                }
            }
        }
        Ok(choices)
    }

    fn choice(&self, recompute: RecomputeArg, state: StateArgs, layout: &Layout) -> Choice {
        let (bytes, total_bytes) = (Categories::new(layout), layout.total());
        let fits = self.room.map(|room| total_bytes as u64 <= room);
        Choice { recompute, state, activation_bytes: bytes.activations, bytes, total_bytes, fits }
    }
}

/// The choice to recommend: the one asked for if it fits; else, of those that fit, the one that costs the least, first in
/// recomputation, which costs time, then in precision of the state. In one line.
pub fn advice(choices: &[Choice], asked: (RecomputeArg, StateArgs)) -> String {
    let flags = |choice: &Choice| {
        let mut flags = format!("--recompute {}", choice.recompute.name());
        if choice.state.master != MasterArg::F32 {
            flags += &format!(" --master {}", choice.state.master.name());
        }
        if choice.state.moments != MomentsArg::F32 {
            flags += &format!(" --moments {}", choice.state.moments.name());
        }
        flags
    };
    let is_asked = |choice: &&Choice| (choice.recompute, choice.state) == asked;
    let fitting: Vec<&Choice> = choices.iter().filter(|choice| choice.fits == Some(true)).collect();
    match (fitting.iter().find(|choice| is_asked(choice)), fitting.first()) {
        _ if choices.iter().all(|choice| choice.fits.is_none()) => {
            "recommended: unknown, because the memory of the device is not known; give --memory SIZE".into()
        }
        (Some(choice), _) => format!("recommended: {} (what was asked for: it fits)", flags(choice)),
        (None, Some(choice)) => format!("recommended: {}, which fits", flags(choice)),
        (None, None) => "recommended: a smaller --batch, --seq or --model; no row fits".into(),
    }
}

/// The table, with `>` before what was asked for, and what its columns mean.
pub fn table(choices: &[Choice], asked: (RecomputeArg, StateArgs)) -> Vec<String> {
    let names = ["weights", "master", "gradients", "moments", "activations", "other", "total"];
    let mut head = format!("  {:<10} {:<9} {:<8}", "recompute", "master", "moments");
    names.iter().for_each(|name| head += &format!(" {name:>11}"));
    let mut lines = vec![head];
    for choice in choices {
        let Categories { weights, master, gradients, moments, activations, other } = choice.bytes;
        let mark = if (choice.recompute, choice.state) == asked { '>' } else { ' ' };
        // f32 weights have no master
        let master_name = if master > 0 { choice.state.master.name() } else { "-".into() };
        let (level, moments_name) = (choice.recompute.name(), choice.state.moments.name());
        let mut line = format!("{mark} {level:<10} {master_name:<9} {moments_name:<8}");
        for bytes in [weights, master, gradients, moments, activations, other, choice.total_bytes] {
            line += &format!(" {:>11}", human_bytes(bytes as u64));
        }
        line += choice.fits.map_or("", |fits| if fits { "  fits" } else { "  does not fit" });
        lines.push(line);
    }
    lines.push("legend: > is what was asked for; recompute is activation checkpointing; master and moments are the optimizer's state".into());
    lines
}
