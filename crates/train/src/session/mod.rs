//! A model on an engine: the programs it needs, planned together over one set of weights.

mod any_shape;
mod base;
mod batch;
mod decode;
pub(crate) mod master;
mod pairs;
mod ranks;
mod routing;
mod serving;
mod spec;
mod state;

pub use any_shape::{Wanted, padded_seq};
pub use batch::{Batch, OwnedBatch};
pub use pairs::{BatchPairs, Rewards};
pub use routing::LayerRouting;
pub(crate) use routing::null_is_nan;
pub use serving::{CacheToken, Fed, PREFILL, Serving};
pub use spec::SessionSpec;

use self::decode::not_generating;
use self::spec::Programs;
use crate::format::checkpoint::CheckpointAdapter;
use crate::model::{Adapted, ModelConfig};
use crate::{Error, Result};
use ironhorse_core::{Engine, EngineExt, Pending, Program, Scalars, Section, Slot};

/// A model on an engine.
pub struct Session {
    engine: Box<dyn Engine>,
    model: Adapted,
    /// The frozen base, once it is loaded.
    base: Option<CheckpointAdapter>,
    programs: Programs,
    /// Programs that were not asked for from the start.
    any_shape: any_shape::AnyShape,
    ranks: ranks::Ranks,
}

impl Session {
    /// Builds the programs, plans them together and reserves the engine's memory. Weights are 0 until they are
    /// loaded or initialised.
    pub fn new(
        mut engine: Box<dyn Engine>,
        config: impl Into<ModelConfig>,
        spec: &SessionSpec,
    ) -> Result<Self> {
        let (config, spec) = (config.into(), spec.on(engine.device()));
        let programs = spec.programs(&config)?;
        engine.reserve(&programs.layout())?;
        let model = Adapted { config, lora: spec.lora };
        let ranks = ranks::Ranks::new(spec.sums);
        Ok(Self { engine, model, base: None, programs, any_shape: Default::default(), ranks })
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// The model, and its adapters if it has any.
    pub fn model(&self) -> &Adapted {
        &self.model
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut dyn Engine {
        self.engine.as_mut()
    }

    /// Says that the weights are loaded and no more trained: engines may keep them in an order that they read faster. Other weights can be
    /// loaded, and weights read, as before; call it again then, for the speed and, where products round their operands, for the same answers.
    pub fn settle(&mut self) -> Result<()> {
        let programs: Vec<&Program> = self.programs.all().collect();
        Ok(self.engine.settle(&programs)?)
    }

    /// The training program.
    pub fn train_program(&self) -> Result<&Program> {
        self.programs.train.as_ref().ok_or_else(not_trained)
    }

    /// Any one of the programs: they share the parameter table.
    fn any_program(&self) -> Result<&Program> {
        self.programs.all().next().ok_or_else(|| Error::Unsupported("this session has no program".into()))
    }

    /// Forward and backward of one micro-step; gradients and loss accumulate over `scalars.micro_step`. The scalars are
    /// those of the whole step: [`Scalars::counting`] over the targets of all its micro-steps.
    pub fn micro_step(&mut self, x: &[i32], y: &[i32], scalars: &Scalars) -> Result<()> {
        self.step(Batch::plain(x, y), scalars)
    }

    /// [`Session::micro_step`] of any batch.
    pub fn step(&mut self, batch: Batch<'_>, scalars: &Scalars) -> Result<()> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let sums = self.ranks.sums.is_some();
        let scalars = &Scalars { overwrites: scalars.overwrites || sums, ..*scalars };
        batch.write(self.engine.as_mut(), program)?;
        self.forward_and_backward(scalars)
    }

    /// The optimizer's update after the last micro-step; returns (loss, gradient norm before clipping).
    pub fn update(&mut self, scalars: &Scalars) -> Result<(f32, f32)> {
        let pending = self.start_update(scalars)?;
        self.finish_update(pending)
    }

    /// Starts the update without waiting for it.
    pub fn start_update(&mut self, scalars: &Scalars) -> Result<PendingUpdate> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        self.engine.run_section(program, Section::Update, scalars)?;
        let loss = self.engine.start_read(io(program, "loss")?)?;
        let norm = self.engine.start_read(io(program, "norm")?)?;
        Ok(PendingUpdate { loss, norm, rewards: self.start_rewards()? })
    }

    /// Waits for an update; returns (loss, gradient norm before clipping).
    pub fn finish_update(&mut self, pending: PendingUpdate) -> Result<(f32, f32)> {
        let loss = self.engine.finish_read(pending.loss)?;
        Ok((loss, self.engine.finish_read(pending.norm)?))
    }

    /// Allows updates again after one whose loss or gradient norm was NaN or infinite. Neither that update nor any started
    /// before this call changes weights or moments.
    pub fn clear_halt(&mut self) -> Result<()> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        Ok(self.engine.write_f32(io(program, "halt")?, &[0.0])?)
    }

    /// The mean loss of the targets of a batch that count.
    pub fn evaluate(&mut self, x: &[i32], y: &[i32]) -> Result<f32> {
        self.evaluate_batch(Batch::plain(x, y))
    }

    /// [`Session::evaluate`] of any batch.
    pub fn evaluate_batch(&mut self, batch: Batch<'_>) -> Result<f32> {
        let program = self.programs.eval.as_ref().ok_or_else(not_evaluating)?;
        forward_loss(self.engine.as_mut(), program, batch)?;
        Ok(self.engine.read_scalar(io(program, "loss")?)?)
    }

    /// The loss of every token of a batch and the most likely token in its place, with the scoring program number `at`.
    pub fn score(&mut self, at: usize, [x, y]: [&[i32]; 2], scores: &mut TokenScores) -> Result<()> {
        let program = self.programs.score.get(at).ok_or_else(not_evaluating)?;
        forward_loss(self.engine.as_mut(), program, Batch::plain(x, y))?;
        scores.losses.resize(x.len(), 0.0);
        scores.best.resize(x.len(), 0);
        self.engine.read_f32(io(program, "losses")?, &mut scores.losses)?;
        Ok(self.engine.read_i32(io(program, "best")?, &mut scores.best)?)
    }

    /// (batch, seq) of every scoring program.
    pub fn score_shapes(&self) -> Result<Vec<(usize, usize)>> {
        let shape = |program| Ok(io(program, "x")?.shape).map(|shape| (shape.rows(), shape.cols()));
        self.programs.score.iter().map(shape).collect()
    }

    /// Tokens of one evaluation batch.
    pub fn eval_tokens(&self) -> Result<usize> {
        self.programs.eval.as_ref().map_or(Ok(0), |program| Ok(io(program, "x")?.numel()))
    }
}

/// What a scoring program tells of the tokens of a batch.
#[derive(Clone, Debug, Default)]
pub struct TokenScores {
    /// The loss of each target.
    pub losses: Vec<f32>,
    /// The most likely token in its place.
    pub best: Vec<i32>,
}

/// Runs a program that computes losses.
fn forward_loss(engine: &mut dyn Engine, program: &Program, batch: Batch<'_>) -> Result<()> {
    batch.write(engine, program)?;
    let scalars = batch.counting(Scalars::default());
    Ok(engine.run_section(program, Section::Forward, &scalars)?)
}

fn not_evaluating() -> Error {
    Error::Unsupported("this session was not made for evaluation".into())
}

/// An update in flight, whose loss and gradient norm have not been read yet.
#[derive(Clone, Copy, Debug)]
pub struct PendingUpdate {
    loss: Pending,
    norm: Pending,
    /// Rewards and accuracy, if preferences are learned.
    rewards: Option<[Pending; 3]>,
}

impl PendingUpdate {
    /// Whether the update was complete when the call that started it returned: the engine is synchronous.
    pub fn is_ready(&self) -> bool {
        matches!(self.norm, Pending::Ready(_))
    }
}

fn not_trained() -> Error {
    Error::Unsupported("this session was not made for training".into())
}

/// A program's input or result.
pub(crate) fn io(program: &Program, name: &str) -> Result<Slot> {
    program.io(name).ok_or_else(|| {
        ironhorse_core::Error::Program(format!("no input or result is called `{name}`")).into()
    })
}
