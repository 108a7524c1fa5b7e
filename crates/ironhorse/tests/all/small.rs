//! What the tests of whole models share: engines, sessions, tokens, steps, what is left after them, and damage.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use ironhorse::core::{Engine, EngineExt, Operands, Pool, Precision, Program, Result, Scalars, Slot};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::format::answer_key::AnswerKey;
use ironhorse::train::format::checkpoint::{Checkpoint, CheckpointParts, TrainerState, write_checkpoint};
use ironhorse::train::model::ModelConfig;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Batch, Session, SessionSpec};
use ironhorse::train::verify::{
    KeyReference, Lockstep, LockstepReport, Options, Report, Rounding, RoundingEngine, verify,
};
use ironhorse_testkit::{Hook, Wrapped};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

pub fn cpu() -> Box<dyn Engine> {
    Box::new(CpuEngine::new(1))
}

pub fn rounding(what: Rounding) -> Box<dyn Engine> {
    Box::new(RoundingEngine::new(cpu(), what))
}

pub fn bf16() -> Box<dyn Engine> {
    rounding(Rounding::Bf16)
}

/// A session with the random weights of a seed.
pub fn session(
    engine: Box<dyn Engine>,
    config: impl Into<ModelConfig>,
    spec: &SessionSpec,
    seed: u64,
) -> Session {
    let mut session = Session::new(engine, config, spec).unwrap();
    session.init(seed).unwrap();
    session
}

/// `count` random tokens, and their targets: the tokens after them.
pub fn tokens(vocab: usize, count: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    let mut rng = Rng::new(seed);
    let stream: Vec<i32> = (0..=count).map(|_| rng.index(vocab) as i32).collect();
    (stream[..count].to_vec(), stream[1..].to_vec())
}

/// The scalars of a step over `tokens` tokens.
pub fn scalars(step: u32, tokens: usize, lr: f32) -> Scalars {
    let loss_scale = 1.0 / tokens as f32;
    Scalars { step, loss_scale, lr, weight_decay: 0.1, grad_clip: 1.0, ..Scalars::default() }
}

/// A step of one micro-step; gives the loss and the gradient norm.
pub fn step(session: &mut Session, (x, y): (&[i32], &[i32]), scalars: &Scalars) -> (f32, f32) {
    session.micro_step(x, y, scalars).unwrap();
    session.update(scalars).unwrap()
}

/// A training of which every step has the same tokens.
pub struct Training {
    pub vocab: usize,
    pub batch: (usize, usize),
    pub lr: f32,
}

impl Training {
    pub fn session(
        &self,
        engine: Box<dyn Engine>,
        config: impl Into<ModelConfig>,
        precision: Precision,
    ) -> Session {
        let spec = SessionSpec { train: Some(self.batch), precision, ..SessionSpec::default() };
        session(engine, config, &spec, 5)
    }

    pub fn tokens(&self) -> (Vec<i32>, Vec<i32>) {
        tokens(self.vocab, self.batch.0 * self.batch.1, 3)
    }

    pub fn scalars(&self, step: u32) -> Scalars {
        scalars(step, self.batch.0 * self.batch.1, self.lr)
    }

    /// Gives the loss and the gradient norm.
    pub fn step(&self, session: &mut Session, number: u32) -> (f32, f32) {
        let (x, y) = self.tokens();
        step(session, (&x, &y), &self.scalars(number))
    }

    /// Gives the losses.
    pub fn steps(&self, session: &mut Session, numbers: RangeInclusive<u32>) -> Vec<f32> {
        numbers.map(|number| self.step(session, number).0).collect()
    }

    /// Two passes of the first step, op by op beside the CPU.
    pub fn lockstep(&self, session: &mut Session, operands: Operands) -> LockstepReport {
        let (x, y) = self.tokens();
        let lockstep =
            Lockstep { batch: Batch::plain(&x, &y), scalars: self.scalars(1), passes: 2, operands };
        lockstep.run(session, cpu()).unwrap()
    }
}

pub fn values(session: &mut Session, slot: Slot) -> Vec<f32> {
    let mut values = vec![0.0; slot.numel()];
    session.engine().read_f32(slot, &mut values).unwrap();
    values
}

/// Whole pools of training, with what lies between the parameters.
pub fn bits(session: &mut Session, pools: &[Pool]) -> Vec<Vec<u32>> {
    let program = session.train_program().unwrap();
    let slots: Vec<Slot> = pools.iter().map(|&pool| program.flat(pool)).collect();
    let bits = |slot| values(session, slot).into_iter().map(f32::to_bits).collect();
    slots.into_iter().map(bits).collect()
}

/// What a pool has of the parameters, one after the other, without what lies between them.
pub fn parameters(session: &mut Session, pool: Pool) -> Vec<f32> {
    let (mut all, mut one) = (Vec::new(), Vec::new());
    for spec in session.config().tensors() {
        session.read_param(pool, &spec.name, &mut one).unwrap();
        all.extend_from_slice(&one);
    }
    all
}

/// A checkpoint of the session, written to a folder.
pub fn saved(session: &mut Session, folder: &Path, step: u64) -> Checkpoint {
    let trainer = TrainerState { step, ..TrainerState::default() };
    let (config, precision) = (*session.config(), session.train_program().unwrap().precision());
    let adapter = session.base().cloned();
    let parts =
        CheckpointParts { adapter: adapter.as_ref(), ..CheckpointParts::new(&config, precision, &trainer) };
    write_checkpoint(folder, &parts, |pool, index, bytes| session.read_state(pool, index, bytes)).unwrap();
    Checkpoint::open(folder).unwrap()
}

/// A file of the fixtures of `crates/train`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/fixtures").join(name)
}

/// Verifies an engine with an answer key.
pub fn verified(engine: Box<dyn Engine>, key: &Path, options: &Options) -> Report {
    let mut reference = KeyReference::new(AnswerKey::open(key).unwrap(), None).unwrap();
    verify(engine, &mut reference, options, &mut cpu).unwrap()
}

struct Damage<F> {
    op: usize,
    slot: Option<Slot>,
    by: F,
}

impl<F: Fn(&mut [f32], usize) + Send> Hook<dyn Engine> for Damage<F> {
    fn run(
        &mut self,
        inner: &mut (dyn Engine + 'static),
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
    ) -> Result<()> {
        for i in ops {
            inner.run(program, i..i + 1, scalars)?;
            if i == self.op {
                let slot = self.slot.unwrap_or_else(|| program.nodes()[i].op.args()[0].slot);
                let mut values = vec![0.0; slot.numel()];
                inner.read_f32(slot, &mut values)?;
                (self.by)(&mut values, slot.shape.cols());
                inner.write_f32(slot, &values)?;
            }
        }
        Ok(())
    }
}

/// An engine that damages what one op has written: this slot, or without one the op's first argument. The change is given the
/// values and how many of them a row has.
pub fn damaged(
    inner: Box<dyn Engine>,
    op: usize,
    slot: Option<Slot>,
    by: impl Fn(&mut [f32], usize) + Send + 'static,
) -> Box<dyn Engine> {
    Box::new(Wrapped { inner, hook: Damage { op, slot, by } })
}
