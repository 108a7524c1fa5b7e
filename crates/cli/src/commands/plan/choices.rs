//! Every choice that changes the memory of a run: what it needs by category, whether it fits, and which to take.

use crate::args::{Dtype, FlagValue, Fp8Args, MasterArg, MomentsArg, OptimizerArg, RecomputeArg, StateArgs};
use crate::hardware::{HEAD_CHUNKS, human_bytes};
use anyhow::Result;
use clap::ValueEnum;
use ironhorse::core::{DropRate, Layout, Pool, Precision};
use ironhorse::train::model::{Adapted, StepOptions, Sums};
use serde::Serialize;

/// What a training step is planned for, whatever is chosen.
pub struct Asked<'a> {
    pub model: &'a Adapted,
    pub batch: (usize, usize),
    pub accumulate: u32,
    /// How micro-steps are added up.
    pub sums: Option<Sums>,
    /// Parts of the output head.
    pub head_chunks: usize,
    pub dtype: Dtype,
    pub optimizer: OptimizerArg,
    pub fp8: Fp8Args,
    pub dropout: DropRate,
    /// What may be used, where that is known.
    pub room: Option<u64>,
}

/// What a choice is: what is recomputed, the parts of the output head, the optimizer's state.
pub type Kept = (RecomputeArg, usize, StateArgs);

/// An output head in parts is shown where it leaves at most this part of the memory.
const MUCH: f64 = 0.97;

/// A choice and what it needs.
#[derive(Serialize)]
pub struct PlanChoice {
    pub recompute: RecomputeArg,
    pub head_chunks: usize,
    #[serde(flatten)]
    pub state: StateArgs,
    bytes: Categories,
    activation_bytes: usize,
    pub total_bytes: usize,
    /// Absent where the machine does not say what it has.
    fits: Option<bool>,
}

impl PlanChoice {
    fn kept(&self) -> Kept {
        (self.recompute, self.head_chunks, self.state)
    }
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
    /// Every way to keep state, each with every level of recomputation, with the output head at once and in parts. Levels that do nothing for the model are left
    /// out, as are choices that need bf16 weights with other weights.
    pub fn choices(&self) -> Result<Vec<PlanChoice>> {
        let mut choices = Vec::new();
        for &master in MasterArg::value_variants() {
            for &moments in MomentsArg::value_variants() {
                let state = StateArgs { optimizer: self.optimizer, master, moments, fp8: self.fp8 };
                let has =
                    |level: RecomputeArg| level != RecomputeArg::Experts || self.model.config.has_experts();
                for &recompute in RecomputeArg::value_variants().iter().filter(|&&level| has(level)) {
                    if let Ok(precision) = state.precision(self.dtype, self.accumulate) {
                        let whole = self.choice((recompute, self.head_chunks, state), precision)?;
                        let in_parts = self.in_parts(&whole, precision);
                        choices.extend([Some(whole), in_parts].into_iter().flatten());
                    }
                }
            }
        }
        Ok(choices)
    }

    /// The same with the output head in parts, if it was not asked for, can be and saves much.
    fn in_parts(&self, whole: &PlanChoice, precision: Precision) -> Option<PlanChoice> {
        let parts = || self.choice((whole.recompute, HEAD_CHUNKS, whole.state), precision).ok();
        let parts = (whole.head_chunks == 1).then(parts).flatten()?;
        let much = |parts: &PlanChoice| parts.total_bytes as f64 <= MUCH * whole.total_bytes as f64;
        Some(parts).filter(much)
    }

    fn choice(&self, kept: Kept, precision: Precision) -> Result<PlanChoice> {
        let (recompute, head_chunks, state) = kept;
        let options = StepOptions { recompute: recompute.into(), head_chunks, ..StepOptions::default() };
        let options = StepOptions { dropout: self.dropout, sums: self.sums, ..options };
        let program = self.model.training(self.batch, options, precision)?;
        let (bytes, total_bytes) = (Categories::new(program.layout()), program.layout().total());
        let fits = self.room.map(|room| total_bytes as u64 <= room);
        let activation_bytes = bytes.activations;
        Ok(PlanChoice { recompute, head_chunks, state, activation_bytes, bytes, total_bytes, fits })
    }
}

/// The choice to recommend: the one asked for if it fits; else, of those that fit, the one that costs the least, first in
/// recomputation, which costs time, then in precision of the state. In one line.
pub fn advice(choices: &[PlanChoice], asked: Kept) -> String {
    let flags = |choice: &PlanChoice| {
        let mut flags = format!("--recompute {}", choice.recompute.name());
        if choice.head_chunks != 1 {
            flags += &format!(" --head-chunks {}", choice.head_chunks);
        }
        if choice.state.master != MasterArg::F32 {
            flags += &format!(" --master {}", choice.state.master.name());
        }
        if choice.state.moments != MomentsArg::F32 {
            flags += &format!(" --moments {}", choice.state.moments.name());
        }
        flags
    };
    let is_asked = |choice: &&PlanChoice| choice.kept() == asked;
    let fitting: Vec<&PlanChoice> = choices.iter().filter(|choice| choice.fits == Some(true)).collect();
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
pub fn table(choices: &[PlanChoice], asked: Kept) -> Vec<String> {
    let names = ["weights", "master", "gradients", "moments", "activations", "other", "total"];
    let mut head = format!("  {:<10} {:<9} {:<8} {:<6}", "recompute", "master", "moments", "chunks");
    names.iter().for_each(|name| head += &format!(" {name:>11}"));
    let mut lines = vec![head];
    for choice in choices {
        let Categories { weights, master, gradients, moments, activations, other } = choice.bytes;
        let mark = if choice.kept() == asked { '>' } else { ' ' };
        // f32 weights have no master
        let master_name = if master > 0 { choice.state.master.name() } else { "-".into() };
        let (level, moments_name) = (choice.recompute.name(), choice.state.moments.name());
        let chunks = choice.head_chunks;
        let mut line = format!("{mark} {level:<10} {master_name:<9} {moments_name:<8} {chunks:<6}");
        for bytes in [weights, master, gradients, moments, activations, other, choice.total_bytes] {
            line += &format!(" {:>11}", human_bytes(bytes as u64));
        }
        line += choice.fits.map_or("", |fits| if fits { "  fits" } else { "  does not fit" });
        lines.push(line);
    }
    lines.push("legend: > is what was asked for; recompute is activation checkpointing; master and moments are the optimizer's state; chunks are the parts of the output head".into());
    lines
}
