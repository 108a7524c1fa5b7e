//! What `bench` and `profile` run, and how they count it.

mod inputs;

pub use inputs::{Inputs, Packed};

use crate::args::{EngineArgs, LoraArgs, RecomputeArg, StateArgs, heading, model_help};
use crate::hardware::check_memory;
use crate::loading::load_base;
use crate::{number, out};
use anyhow::{Result, bail};
use clap::Args;
use ironhorse::core::{DType, Engine, EngineExt, Limit, Limits, Scalars};
use ironhorse::train::bench::Repeat;
use ironhorse::train::format::ModelChoice;
use ironhorse::train::format::debug_state::DebugState;
use ironhorse::train::format::safetensors::SafeTensors;
use ironhorse::train::format::shards::check_tokens;
use ironhorse::train::format::{Kind, sniff};
use ironhorse::train::model::{ModelConfig, Sums};
use ironhorse::train::session::{Session, SessionSpec};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most steps to time.
const MOST_STEPS: u64 = 1_000_000;

/// What `bench` and `profile` run.
#[derive(Args)]
pub struct Workload {
    #[arg(long, help = model_help("or weights"), help_heading = heading::MODEL, default_value = "d12", value_name = "NAME")]
    pub model: String,
    /// A debug state or a safetensors file with the tokens x and y to train on [default: random tokens]
    #[arg(long, help_heading = heading::DATA, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Batch size: sequences per step
    #[arg(long, help_heading = heading::STEPS, default_value_t = 4, value_name = "B", value_parser = number::count::<usize>)]
    pub batch: usize,
    /// Sequence length in tokens
    #[arg(long, help_heading = heading::STEPS, default_value_t = 64, value_name = "T", value_parser = number::count::<usize>)]
    pub seq: usize,
    /// Train on random documents of N tokens on average, packed into the sequences, of which none attends to another.
    /// Speed counts their tokens, not the padding
    #[arg(long, help_heading = heading::STEPS, value_name = "N", conflicts_with = "data", value_parser = number::count::<usize>)]
    pub documents: Option<usize>,
    /// Steps to time, at least
    #[arg(long, help_heading = heading::STEPS, default_value_t = 10, value_name = "N", value_parser = number::whole::<usize>(1..=MOST_STEPS))]
    pub steps: usize,
    /// Seconds to time, at least: a GPU slows down once it is warm
    #[arg(long, help_heading = heading::STEPS, default_value_t = 0.0, value_name = "S", value_parser = number::at_least_0::<f32>)]
    pub seconds: f32,
    /// Steps before timing starts
    #[arg(long, help_heading = heading::STEPS, default_value_t = 2, value_name = "N", value_parser = number::whole::<usize>(0..=MOST_STEPS))]
    pub warmup: usize,
    /// Clip gradients to this norm; 0 turns clipping off
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 1.0, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub grad_clip: f32,
    /// Learning rate
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 1e-4, value_name = "X", value_parser = number::at_least_0::<f32>)]
    pub lr: f32,
    /// Seed of random weights and tokens
    #[arg(long, help_heading = heading::STEPS, default_value_t = 1, value_name = "S", value_parser = number::seed)]
    pub seed: u64,
    /// Dropout of GPT-2, as `train --dropout`
    #[arg(long, help_heading = heading::OPTIMIZER, default_value_t = 0.0, value_name = "P", value_parser = number::below_1::<f64>)]
    pub dropout: f64,
    /// Activation checkpointing: what the backward pass recomputes instead of keeping it in memory
    #[arg(long, help_heading = heading::MEMORY, value_enum, default_value_t = RecomputeArg::None)]
    pub recompute: RecomputeArg,
    /// Into how many parts the tokens of a micro-batch are cut for the output head and the loss: the logits of one part only need memory
    #[arg(long, help_heading = heading::MEMORY, default_value_t = 1, value_name = "N", value_parser = number::count::<usize>)]
    pub head_chunks: usize,
    #[command(flatten)]
    pub adapters: LoraArgs,
    #[command(flatten)]
    pub state: StateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl Workload {
    /// The model on the engine, with weights, for steps of so many micro-steps, and a batch.
    pub fn prepare(&self, accumulate: u32) -> Result<(Session, Inputs)> {
        // What does not go together is refused before an engine says anything.
        let chosen = self.chosen(accumulate, None)?;
        self.made(self.engine.engine()?, chosen)
    }

    /// The same on this engine, of a rank that shares the micro-steps with others.
    pub fn prepare_on(
        &self,
        engine: Box<dyn Engine>,
        accumulate: u32,
        sums: Option<Sums>,
    ) -> Result<(Session, Inputs)> {
        self.made(engine, self.chosen(accumulate, sums)?)
    }

    fn chosen(&self, accumulate: u32, sums: Option<Sums>) -> Result<(ModelChoice, SessionSpec)> {
        let choice = ModelChoice::parse(&self.model)?;
        let spec = SessionSpec {
            lora: self.adapters.lora(&choice.config())?,
            train: Some((self.batch, self.seq)),
            recompute: self.recompute.into(),
            head_chunks: self.head_chunks,
            dropout: number::drop_rate(self.dropout)?,
            packed: self.documents.is_some(),
            precision: self.state.precision(self.engine.dtype()?, accumulate)?,
            sums,
            ..SessionSpec::default()
        };
        Ok((choice, spec))
    }

    fn made(
        &self,
        engine: Box<dyn Engine>,
        (choice, spec): (ModelChoice, SessionSpec),
    ) -> Result<(Session, Inputs)> {
        let session = session_of(choice, engine, &spec, self.seed)?;
        let inputs = match &self.data {
            Some(path) => Inputs::plain(self.tokens(path, session.config())?),
            // `check_memory` has counted them
            None => Inputs::random(self.documents, [self.batch, self.seq], session.config(), self.seed)?,
        };
        Ok((session, inputs))
    }

    fn tokens(&self, path: &Path, config: &ModelConfig) -> Result<(Vec<i32>, Vec<i32>)> {
        if matches!(sniff(path)?, Kind::SafeTensors | Kind::AnswerKey) {
            return self.tokens_of(&mut SafeTensors::open(path)?, config.vocab_size());
        }
        let mut state = DebugState::open(path, config.gpt2("a debug state", "use an answer key")?)?;
        if (state.batch(), state.seq()) != (self.batch, self.seq) {
            bail!(
                "{}: holds a batch of {} × {}, expected --batch {} --seq {}",
                path.display(),
                state.batch(),
                state.seq(),
                self.batch,
                self.seq
            );
        }
        Ok((state.x()?, state.y()?))
    }

    /// `x` and `y` of a safetensors file, both (B, T).
    fn tokens_of(&self, file: &mut SafeTensors, vocab: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let mut read = |name: &str| {
            let shape = file.entry(name)?.shape.clone();
            if shape != [self.batch, self.seq] {
                let expected = format!("[{}, {}], --batch and --seq", self.batch, self.seq);
                return Err(file.field(format!("shape of `{name}`"), format!("{shape:?}"), expected));
            }
            let tokens = file.read_i32(name)?;
            check_tokens(file.path(), &tokens, vocab, |index| format!("{name}[{index}]"))?;
            Ok(tokens)
        };
        Ok((read("x")?, read("y")?))
    }

    /// The optimizer's numbers.
    pub fn scalars(&self) -> Scalars {
        Scalars { lr: self.lr, grad_clip: self.grad_clip, ..Scalars::default() }
    }

    /// How often to run, in steps of so many micro-steps.
    pub fn repeat(&self, accumulate: u32) -> Repeat {
        let time = Duration::try_from_secs_f32(self.seconds).unwrap_or(Duration::MAX);
        Repeat { warmup: self.warmup, steps: self.steps, time, accumulate }
    }

    /// The name of the model without folders.
    pub fn model_name(&self) -> String {
        Path::new(&self.model)
            .file_name()
            .map_or_else(|| self.model.clone(), |name| name.to_string_lossy().into_owned())
    }

    /// The element type whose limits count.
    pub fn element(&self) -> Result<DType> {
        Ok(self.engine.dtype()?.precision(1).weights)
    }
}

/// Says so where the experts of a model that trains in 8 bits stay in bf16.
pub fn note_experts(engine: &dyn Engine, config: &ModelConfig, spec: &SessionSpec) {
    let asked = spec.train.is_some() && spec.precision.fp8.is_some_and(|fp8| fp8.experts);
    if asked && config.has_experts() && engine.device().experts_in_bf16 {
        out::note(
            "--dtype fp8: the experts stay in bf16, because 8-bit kernels for them are for compute capability 9.0 only",
        );
    }
}

/// A model on the engine, if it fits: its weights, or random ones where it is only sizes.
pub fn session_of(
    choice: ModelChoice,
    engine: Box<dyn Engine>,
    spec: &SessionSpec,
    seed: u64,
) -> Result<Session> {
    let config = choice.config();
    check_memory(engine.as_ref(), &config, spec)?;
    note_experts(engine.as_ref(), &config, spec);
    let mut session = Session::new(engine, config, spec)?;
    match choice {
        ModelChoice::Sizes(_) => session.init_base(seed)?,
        ModelChoice::Weights(mut source) => {
            load_base(&mut session, source.as_mut())?;
        }
    }
    if spec.lora.is_some() {
        session.init(seed)?;
    }
    Ok(session)
}

/// The number of parameters, and of those that one token uses where that is not all of them.
pub fn parameters_text(all: usize, active: Option<usize>) -> String {
    let active = active.map_or_else(String::new, |active| format!(" ({active} active)"));
    format!("{all} parameters{active}")
}

/// The rate of arithmetic before the work is timed. A machine shared with others is faster at one moment than at
/// another; a GPU is ours alone, and loading its libraries belongs to the time it takes to start.
pub fn flops_before(engine: &mut dyn Engine, dtype: DType) -> Result<f64> {
    if engine.device().product.is_some() { Ok(0.0) } else { Ok(engine.measure(Limit::Flops(dtype))?) }
}

/// The limits, once the work has been timed.
pub fn limits_after(engine: &mut dyn Engine, dtype: DType, before: f64) -> Result<Limits> {
    let mut limits = engine.measure_limits(dtype)?;
    limits.flops_per_s = limits.flops_per_s.max(before);
    Ok(limits)
}

/// How much of the device's arithmetic a step uses.
#[derive(Clone, Copy, Serialize)]
pub struct Utilization {
    /// Model FLOPs utilization: the model's operations per second over the peak of the device's datasheet in this element
    /// type (dense). `None` where no datasheet peak is known, as for CPUs.
    pub mfu: Option<f64>,
    /// The same over the rate of a large matrix product measured on this machine.
    pub of_measured_peak: f64,
}

impl Utilization {
    /// The utilization at this rate of model operations.
    pub fn new(model_flops_per_s: f64, datasheet: Option<f64>, measured: &Limits) -> Self {
        Self {
            mfu: datasheet.map(|peak| model_flops_per_s / peak),
            of_measured_peak: model_flops_per_s / measured.flops_per_s,
        }
    }

    /// In words; MFU is left out where it is not known.
    pub fn text(self) -> String {
        let mfu = self
            .mfu
            .map_or_else(String::new, |mfu| format!("MFU {:.1} % of the datasheet peak, ", mfu * 100.0));
        format!("{mfu}{:.1} % of the measured peak", self.of_measured_peak * 100.0)
    }
}

/// Memory by category, for JSON.
pub fn memory_map(memory: &[(String, usize)]) -> Map<String, Value> {
    memory.iter().map(|(name, bytes)| (name.clone(), (*bytes).into())).collect()
}
