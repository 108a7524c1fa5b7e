//! A model on an engine: the programs it needs, planned together over one set of weights.

mod any_shape;
mod base;
mod batch;
pub(crate) mod master;
mod pairs;
mod ranks;
mod routing;
mod serving;

pub use any_shape::{Wanted, padded_seq};
pub use batch::{Batch, OwnedBatch};
pub use pairs::{BatchPairs, Rewards};
pub use routing::LayerRouting;
pub(crate) use routing::null_is_nan;
pub use serving::{CacheToken, Fed, PREFILL, Serving};

use self::master::{is_residual, read_master, write_master};
use crate::eval::shapes;
use crate::format::checkpoint::{Checkpoint, CheckpointAdapter, CheckpointParts, widen};
use crate::model::{Adapted, Lora, ModelConfig, Recompute, StepOptions, Sums};
use crate::{Error, Result};
use ironhorse_core::op::Op;
use ironhorse_core::{
    DType, DropRate, Engine, EngineExt, Layout, Param, Pending, Pool, Precision, Program, Scalars, Section,
    Shape, Slot, Timed, TokenChoice, bf16_to_f32, split_master,
};

/// Which programs a session is made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionSpec {
    /// Training steps on (batch, seq).
    pub train: Option<(usize, usize)>,
    /// Losses without training on (batch, seq).
    pub eval: Option<(usize, usize)>,
    /// Losses and the most likely token at every position of texts: at most so many positions each, about so many at a
    /// time.
    pub score: Option<(usize, usize)>,
    /// Token-by-token decoding of this many sequences.
    pub decode: Option<usize>,
    /// The positions that decoding has room for [default: the context].
    pub decode_context: Option<usize>,
    /// Continuing several sequences at once. Without it, `decode` of one sequence can do so for that one.
    pub serving: Option<Serving>,
    /// What the backward computes again.
    pub recompute: Recompute,
    /// How often training drops elements.
    pub dropout: DropRate,
    /// Whether the sequences of `train` and `eval` hold several documents ([`StepOptions::packed`]).
    pub packed: bool,
    /// The β of the loss of pairs, where `train` and `eval` learn which of two documents is preferred
    /// ([`StepOptions::preference`]).
    pub preference: Option<f32>,
    /// How the gradients of micro-steps are added up ([`StepOptions::sums`]).
    pub sums: Option<Sums>,
    /// Into how many parts the tokens are cut for the output head ([`StepOptions::head_chunks`]).
    pub head_chunks: usize,
    /// Element types of weights and gradients.
    pub precision: Precision,
    /// The adapters that are trained, or that a frozen model runs with.
    pub lora: Option<Lora>,
}

impl SessionSpec {
    /// What an engine must reserve for such a session.
    pub fn layout(&self, config: &ModelConfig) -> Result<Layout> {
        Ok(self.programs(config)?.layout())
    }

    /// How its training steps are made.
    pub fn step_options(&self) -> StepOptions {
        let Self { recompute, dropout, packed, preference, sums, head_chunks, .. } = *self;
        StepOptions { recompute, dropout, packed, preference, sums, head_chunks }
    }

    fn programs(&self, config: &ModelConfig) -> Result<Programs> {
        config.validate()?;
        let options = self.step_options();
        let model = Adapted { config: *config, lora: self.lora };
        let train = self.train.map(|batch| model.training(batch, options, self.precision));
        let eval = self.eval.map(|batch| model.evaluation_of(batch, options, self.precision));
        let score = self.score.map_or_else(Vec::new, |(longest, tokens)| shapes(longest, tokens));
        let score = score.into_iter().map(|batch| model.scoring(batch, self.precision));
        let decode = self.decode.map(|batch| match self.decode_context {
            Some(positions) => model.decoding_within(batch, positions, self.precision),
            None => model.decoding(batch, self.precision),
        });
        let one = self.decode == Some(1);
        let serving = self.serving.or(one.then(|| Serving::one(self.decode_context)));
        Ok(Programs {
            serving: serving.map_or(Ok(Vec::new()), |serving| serving.programs(&model, self.precision))?,
            train: train.transpose()?,
            eval: eval.transpose()?,
            score: score.collect::<Result<_>>()?,
            decode: decode.transpose()?,
        })
    }
}

/// The programs of a session, over one set of weights.
struct Programs {
    train: Option<Program>,
    eval: Option<Program>,
    /// For texts of different lengths.
    score: Vec<Program>,
    decode: Option<Program>,
    /// From few tokens to many; the last may give the logits of all tokens.
    serving: Vec<serving::ServingProgram>,
}

impl Programs {
    fn all(&self) -> impl Iterator<Item = &Program> {
        let serving = self.serving.iter().map(|serving| &serving.program);
        self.train.iter().chain(&self.eval).chain(&self.score).chain(&self.decode).chain(serving)
    }

    fn layout(&self) -> Layout {
        self.all().fold(Layout::default(), |all, program| all.union(program.layout()))
    }
}

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
        let config = config.into();
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

    /// The training program.
    pub fn train_program(&self) -> Result<&Program> {
        self.programs.train.as_ref().ok_or_else(not_trained)
    }

    /// Any one of the programs: they share the parameter table.
    fn any_program(&self) -> Result<&Program> {
        self.programs.all().next().ok_or_else(|| Error::Unsupported("this session has no program".into()))
    }

    /// Fills one of the pools laid out like the parameters: `read(name, values)` for every tensor in model order.
    pub fn load(&mut self, pool: Pool, mut read: impl FnMut(&str, &mut [f32]) -> Result<()>) -> Result<()> {
        let mut values = Vec::new();
        let masters = if pool == Pool::Params { self.master_slots()? } else { Vec::new() };
        for (i, (name, slot)) in self.param_slots(pool)?.into_iter().enumerate() {
            values.clear();
            values.resize(slot.numel(), 0.0);
            read(&name, &mut values)?;
            let masters = masters.get(i).unwrap_or(&ranks::NO_MASTERS);
            write_weights(self.engine.as_mut(), (slot, masters), &values)?;
        }
        Ok(())
    }

    /// Where the master weights are, if this session trains with them.
    fn master_slots(&self) -> Result<Vec<ranks::Masters>> {
        match &self.programs.train {
            Some(program) if program.precision().has_master() => {
                let residual = program.precision().has_residual();
                let of = |param: &Param| {
                    self.pieces(Pool::Master, param).map(|pieces| ranks::Masters { pieces, residual })
                };
                program.params().iter().map(of).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The pool that holds the weights to keep: the master weights where there are any.
    pub fn weights_pool(&self) -> Pool {
        let has_master = self.programs.train.as_ref().is_some_and(|program| program.precision().has_master());
        // a rank that has a part of the master weights has all weights rounded
        let whole = !self.ranks.sums.is_some_and(|sums| sums.shards_state());
        if has_master && whole { Pool::Master } else { Pool::Params }
    }

    /// Copies one tensor out of a pool laid out like the parameters; for the weights, their most precise copy.
    pub fn read_param(&mut self, pool: Pool, name: &str, values: &mut Vec<f32>) -> Result<()> {
        let param = self.any_program()?.params().iter().find(|param| param.name == name).cloned();
        let param = param.ok_or_else(|| Error::unknown("tensor", name, "one of the model's parameters"))?;
        self.read_in_pool(pool, &param, values)
    }

    /// [`Session::read_param`] by the row of the parameter table.
    pub(crate) fn read_in_pool(&mut self, pool: Pool, param: &Param, values: &mut Vec<f32>) -> Result<()> {
        let pool = if pool == Pool::Params { self.weights_pool() } else { pool };
        let slot = param.in_pool(pool);
        let residual = pool == Pool::Master && is_residual(&slot);
        Ok(read_master(self.engine.as_mut(), [param.weight, slot], residual, values)?)
    }

    /// Copies one tensor of a pool out as the engine stores it; where this rank has a part of it only, the rest is 0.
    pub fn read_state(&mut self, pool: Pool, index: usize, bytes: &mut Vec<u8>) -> Result<()> {
        let param = self.table_row(index)?;
        let size = param.precision.of(pool).size();
        bytes.clear();
        bytes.resize(param.in_pool(pool).bytes(), 0);
        for (at, slot) in self.pieces(pool, &param)? {
            self.engine.read_bytes(slot, &mut bytes[at * size..at * size + slot.bytes()])?;
        }
        Ok(())
    }

    /// Copies one tensor of a pool in that [`Session::read_state`] copied out; of it what this rank has.
    pub fn write_state(&mut self, pool: Pool, index: usize, bytes: &[u8]) -> Result<()> {
        let param = self.table_row(index)?;
        let (whole, size) = (param.in_pool(pool), param.precision.of(pool).size());
        if bytes.len() != whole.bytes() {
            return Ok(ironhorse_core::check_host_bytes(&whole, bytes.len())?);
        }
        for (at, slot) in self.pieces(pool, &param)? {
            self.engine.write_bytes(slot, &bytes[at * size..at * size + slot.bytes()])?;
        }
        Ok(())
    }

    /// The largest elements of earlier steps, from which a step scales its tensors in 8 bits; empty where there are none. Between
    /// steps those of a step are 0.
    pub fn scales(&mut self) -> Result<Vec<f32>> {
        let slot = self.scale_slot()?;
        let mut values = vec![0.0; slot.numel()];
        self.engine.read_f32(slot, &mut values)?;
        Ok(values.into_iter().step_by(2).collect())
    }

    /// Restores what [`Session::scales`] gave. Says whether there are as many: otherwise nothing is known of earlier steps.
    pub fn set_scales(&mut self, scales: &[f32]) -> Result<bool> {
        let slot = self.scale_slot()?;
        let same = 2 * scales.len() == slot.numel();
        let known = if same { scales } else { &[] };
        let mut values: Vec<f32> = known.iter().flat_map(|&scale| [scale, 0.0]).collect();
        values.resize(slot.numel(), 0.0);
        self.engine.write_f32(slot, &values)?;
        Ok(same)
    }

    /// The scales of the training program, as pairs; of a pool that may have more room.
    fn scale_slot(&self) -> Result<Slot> {
        let update = self.train_program()?.nodes().iter().rev().find_map(|node| match node.op {
            Op::ScaleUpdate(op) => Some(op.scales),
            _ => None,
        });
        let none = Slot { pool: Pool::Scales, offset: 0, shape: Shape::new([0, 2]), dtype: DType::F32 };
        Ok(update.unwrap_or(none))
    }

    fn table_row(&self, index: usize) -> Result<Param> {
        let param = self.train_program()?.params().get(index);
        param.cloned().ok_or_else(|| {
            ironhorse_core::Error::Program(format!("the model has no tensor number {index}")).into()
        })
    }

    /// Restores the state of a checkpoint of the same model: byte for byte where the element types are the same, else
    /// converted. Says whether it was byte for byte.
    pub fn restore(&mut self, checkpoint: &mut Checkpoint) -> Result<bool> {
        let precision = self.train_program()?.precision();
        let table = self.model.tensors();
        let theirs = checkpoint.precision()?;
        if theirs.optimizer != precision.optimizer {
            let found = format!("that of {}", theirs.optimizer.name());
            let expected = format!(
                "that of {}, as the run asks for; resume with --optimizer {}, or start a new run from the weights with --init",
                precision.optimizer.name(),
                theirs.optimizer.name()
            );
            return Err(Error::field(checkpoint.path(), "optimizer state", found, expected));
        }
        let optimizer = precision.optimizer;
        let same = CheckpointParts::pools(precision) == CheckpointParts::pools(theirs)
            && CheckpointParts::pools(precision).iter().all(|&pool| precision.of(pool) == theirs.of(pool));
        let known = self.set_scales(&checkpoint.trainer().scales())?;
        let mut bytes = Vec::new();
        if same {
            for pool in CheckpointParts::pools(precision) {
                for (index, spec) in table.iter().enumerate().filter(|(_, spec)| spec.is_in(pool, optimizer))
                {
                    let param = self.table_row(index)?;
                    for (at, slot) in self.pieces(pool, &param)? {
                        checkpoint.read_part(pool, spec, at..at + slot.numel(), &mut bytes)?;
                        self.engine.write_bytes(slot, &bytes)?;
                    }
                }
            }
            return Ok(known);
        }
        self.load(Pool::Params, |name, values| checkpoint.read_tensor(name, values))?;
        for pool in [Pool::Moment1, Pool::Moment2] {
            for (index, spec) in table.iter().enumerate().filter(|(_, spec)| spec.is_in(pool, optimizer)) {
                let param = self.table_row(index)?;
                for (at, slot) in self.pieces(pool, &param)? {
                    checkpoint.read_part(pool, spec, at..at + slot.numel(), &mut bytes)?;
                    let mut values = vec![0.0; slot.numel()];
                    widen(theirs.of(pool), &bytes, &mut values);
                    self.engine.write_f32(slot, &values)?;
                }
            }
        }
        Ok(false)
    }

    fn param_slots(&self, pool: Pool) -> Result<Vec<(String, Slot)>> {
        if pool == Pool::Frozen {
            return Ok(self.any_program()?.frozen().to_vec());
        }
        let params = self.any_program()?.params();
        Ok(params.iter().map(|param| (param.name.clone(), param.in_pool(pool))).collect())
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
        self.engine.run_section(program, Section::Forward, scalars)?;
        self.backward(scalars)
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

    /// Feeds one token per sequence at `position`; `logits` gets (B, Vp).
    pub fn decode(&mut self, tokens: &[i32], position: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.feed(tokens, position)?;
        self.logits(logits)
    }

    /// Feeds one token per sequence at `position`, and does not wait for the logits.
    pub fn feed(&mut self, tokens: &[i32], position: usize) -> Result<()> {
        let program = self.programs.decode.as_ref().ok_or_else(not_generating)?;
        self.engine.write_i32(io(program, "x")?, tokens)?;
        let scalars = Scalars { position: position as u32, ..Scalars::default() };
        Ok(self.engine.run_section(program, Section::Forward, &scalars)?)
    }

    /// Feeds the last tokens once more, at `position`, and times each kernel.
    pub(crate) fn profile_feed(&mut self, position: usize) -> Result<Vec<Timed>> {
        let program = self.programs.decode.as_ref().ok_or_else(not_generating)?;
        let scalars = Scalars { position: position as u32, ..Scalars::default() };
        let mut record = Vec::new();
        self.engine.profile(program, program.range(Section::Forward), &[], &scalars, &mut record)?;
        Ok(record)
    }

    /// The logits (B, Vp) after the tokens fed last.
    pub fn logits(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        let out = io(self.programs.decode.as_ref().ok_or_else(not_generating)?, "logits")?;
        logits.resize(out.numel(), 0.0);
        Ok(self.engine.read_f32(out, logits)?)
    }

    /// Lets the engine choose the next token of a single sequence among the first `vocab`; `None` if it leaves that to
    /// the host.
    pub fn pick(&mut self, vocab: usize, choice: &TokenChoice) -> Result<Option<u32>> {
        let out = io(self.programs.decode.as_ref().ok_or_else(not_generating)?, "logits")?;
        Ok(self.engine.pick_token(out, vocab, choice)?)
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
    /// Of pairs.
    rewards: Option<[Pending; 3]>,
}

/// Copies weights in, with what there is of the master that goes with them.
fn write_weights(
    engine: &mut dyn Engine,
    (slot, masters): (Slot, &ranks::Masters),
    values: &[f32],
) -> Result<()> {
    let covered: usize = masters.pieces.iter().map(|(_, master)| master.numel()).sum();
    // other ranks have the rest of the masters
    if covered < values.len() && masters.residual {
        let nearest = |&value: &f32| bf16_to_f32(split_master(value).0);
        engine.write_f32(slot, &values.iter().map(nearest).collect::<Vec<_>>())?;
    } else if covered < values.len() || values.is_empty() {
        engine.write_f32(slot, values)?;
    }
    for &(at, master) in &masters.pieces {
        let offset = slot.offset + at * slot.dtype.size();
        let weights = Slot { offset, shape: master.shape, ..slot };
        let part = &values[at..at + master.numel()];
        write_master(engine, [weights, master], masters.residual, part)?;
    }
    Ok(())
}

fn not_generating() -> Error {
    Error::Unsupported("this session was not made for generation".into())
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
