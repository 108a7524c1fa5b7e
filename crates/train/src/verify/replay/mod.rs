//! Replays a step whose loss or gradient norm was NaN or infinite, from its black box: on the device it ran on, in f32
//! on the CPU and in f64. Which of these are finite tells whether the data, the numerics or the hardware is at fault.

mod report;

pub use report::{Cause, ReplayReport};

use super::diagnose::{self, NonFinite, find_non_finite};
use crate::format::black_box::{BadStep, BlackBox};
use crate::format::checkpoint::{Checkpoint, CheckpointAdapter, CheckpointParts, TRAINER};
use crate::format::open_weights;
use crate::format::shards::check_tokens;
use crate::model::{Adapted, ModelConfig};
use crate::session::{Batch, BatchPairs, Session, SessionSpec, io};
use crate::{Error, Result};
use ironhorse_core::op::{IGNORED, Op, check_positions};
use ironhorse_core::{DropRate, Engine, EngineExt, Pool, Precision, Scalars, Section};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The purpose of a run of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The same kind of device and the same element types: does it repeat?
    Same,
    /// Another device in the same element types.
    Other,
    /// The CPU in f32: is it the precision?
    F32,
    /// The oracle in f64: is it the data or the weights?
    F64,
}

/// An engine and its purpose.
pub struct Place {
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// Its purpose.
    pub role: Role,
    /// The name of the arithmetic: "bf16", "f64".
    pub dtype: String,
}

/// The result of a run of the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rerun {
    /// The purpose.
    pub role: Role,
    /// The engine.
    pub engine: String,
    /// The arithmetic.
    pub dtype: String,
    /// The range of micro-steps that were run, end exclusive: all, or only the one that is known to be bad.
    pub micro_steps: (u32, u32),
    /// Whether loss, gradient norm and everything before them are finite.
    pub finite: bool,
    /// The loss of these micro-steps: a number, or "NaN", "inf", "-inf".
    pub loss: String,
    /// The norm of its gradients, likewise.
    pub norm: String,
    /// The first NaN or infinity; `None` if everything is finite, or was finite when the ops ran one by one.
    pub found: Option<NonFinite>,
    /// Wall time in seconds.
    pub seconds: f64,
}

/// A black box with its weights.
pub struct Replay {
    bad: BadStep,
    x: Vec<i32>,
    y: Vec<i32>,
    /// The positions of tokens, if sequences are packed.
    positions: Option<Vec<i32>>,
    /// Pairs and the losses of the reference, if preferences are learned.
    pairs: Option<(Vec<i32>, Vec<f32>)>,
    weights: PathBuf,
    config: ModelConfig,
    /// The adapters, if the run trains some.
    adapter: Option<CheckpointAdapter>,
    precision: Precision,
    settings: Value,
}

impl Replay {
    /// Opens a black box and checks that its weights are those that the step ran on.
    pub fn open(path: &Path) -> Result<Self> {
        let BlackBox { bad, x, y, positions, pairs, weights } = BlackBox::open(path)?;
        let manifest = weights.join(TRAINER);
        let Ok(bytes) = std::fs::read(&manifest) else {
            let expected = "the checkpoint the step ran on; a run keeps that of its latest bad steps only";
            return Err(Error::field(path, "weights", format!("gone ({})", weights.display()), expected));
        };
        let found = crc32fast::hash(&bytes);
        if found != bad.weights_crc32 {
            let expected = format!("{}, as the black box says: these are other weights", bad.weights_crc32);
            return Err(Error::field(&manifest, "crc32", found, expected));
        }
        let checkpoint = Checkpoint::open_weights(&weights)?;
        let config = *checkpoint.config();
        let targets: Vec<i32> = y.iter().map(|&target| if target == IGNORED { 0 } else { target }).collect();
        for (name, tokens) in [("x", &x), ("y", &targets)] {
            check_tokens(path, tokens, config.vocab_size(), |index| format!("{name}[{index}]"))?;
        }
        if let Some(positions) = &positions {
            check_positions(positions, bad.seq)?;
        }
        let (precision, settings) = (checkpoint.precision()?, checkpoint.trainer().settings.clone());
        let adapter = checkpoint.adapter().cloned();
        Ok(Self { bad, x, y, positions, pairs, weights, config, adapter, precision, settings })
    }

    /// What is known about the step.
    pub fn bad(&self) -> &BadStep {
        &self.bad
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model, and its adapters if the run trained those.
    pub fn model(&self) -> Adapted {
        Adapted { config: self.config, lora: self.adapter.as_ref().map(|adapter| adapter.lora) }
    }

    /// The settings of the run that wrote it.
    pub fn settings(&self) -> &Value {
        &self.settings
    }

    /// The element types of a role.
    pub fn precision(&self, role: Role) -> Precision {
        match role {
            Role::Same | Role::Other => self.precision,
            Role::F32 | Role::F64 => Precision::F32,
        }
    }

    /// The session of a role.
    pub fn spec(&self, role: Role) -> SessionSpec {
        SessionSpec {
            train: Some((self.bad.batch, self.bad.seq)),
            recompute: self.bad.recompute,
            head_chunks: self.bad.head_chunks,
            dropout: DropRate::new(self.bad.dropout).unwrap_or_default(),
            precision: self.precision(role),
            packed: self.positions.is_some(),
            preference: self.bad.preference,
            lora: self.model().lora,
            ..SessionSpec::default()
        }
    }

    /// Runs the step. `only` is a micro-step that is known to be bad: the others are skipped.
    pub fn run(&self, place: Place, only: Option<u32>) -> Result<Rerun> {
        let begin = Instant::now();
        let Place { engine, role, dtype } = place;
        let name = engine.name().to_owned();
        let mut session = Session::new(engine, self.config, &self.spec(role))?;
        self.load(&mut session)?;
        let only = only.filter(|&micro_step| micro_step < self.bad.accumulate);
        let range = only.map_or((0, self.bad.accumulate), |only| (only, only + 1));
        let mut rerun = Rerun {
            role,
            engine: name,
            dtype,
            micro_steps: range,
            finite: true,
            loss: f32::NAN.to_string(),
            norm: f32::NAN.to_string(),
            found: None,
            seconds: 0.0,
        };
        let whole = role == Role::Same || role == Role::Other;
        if !whole {
            rerun.found = diagnose::in_weights(&mut session)?;
        }
        for micro_step in range.0..range.1 {
            let scalars = Scalars { micro_step, ..self.bad.scalars };
            let scalars =
                if micro_step == range.0 { diagnose::alone(&mut session, &scalars)? } else { scalars };
            let batch = self.batch(micro_step);
            if whole {
                self.run_whole(&mut session, batch, &scalars, &mut rerun)?;
            } else {
                self.run_ops(&mut session, batch, &scalars, &mut rerun)?;
            }
            if !rerun.finite {
                rerun.micro_steps = (micro_step, micro_step + 1);
                break;
            }
        }
        rerun.seconds = begin.elapsed().as_secs_f64();
        Ok(rerun)
    }

    /// What a micro-step is computed of.
    fn batch(&self, micro_step: u32) -> Batch<'_> {
        let tokens = self.bad.batch * self.bad.seq;
        let range = micro_step as usize * tokens..(micro_step as usize + 1) * tokens;
        let positions = self.positions.as_ref().map(|positions| &positions[range.clone()]);
        let pairs = self.pairs.as_ref().map(|(bounds, reference)| {
            let rows = bounds.len() / self.bad.accumulate as usize;
            let at = micro_step as usize * rows;
            BatchPairs { bounds: &bounds[at..at + rows], reference: &reference[range.clone()] }
        });
        Batch { x: &self.x[range.clone()], y: &self.y[range], positions, pairs }
    }

    /// Runs a micro-step as training does; if the result is NaN or infinite, runs it again op by op to find the origin.
    fn run_whole(
        &self,
        session: &mut Session,
        batch: Batch<'_>,
        scalars: &Scalars,
        rerun: &mut Rerun,
    ) -> Result<()> {
        let ran = session.step(batch, scalars).and_then(|()| results(session, scalars, rerun));
        if ran.is_ok() && rerun.finite {
            return Ok(());
        }
        rerun.finite = false;
        let found = find_non_finite(session, batch, scalars);
        match (ran, found) {
            (Ok(()), found) => rerun.found = found?,
            // non-finite router logits are an input error
            (Err(_), Ok(Some(found))) => rerun.found = Some(found),
            (Err(error), _) => return Err(error),
        }
        Ok(())
    }

    /// Runs a micro-step op by op and checks each result: in f64 a step is too slow to be run twice.
    fn run_ops(
        &self,
        session: &mut Session,
        batch: Batch<'_>,
        scalars: &Scalars,
        rerun: &mut Rerun,
    ) -> Result<()> {
        let found = diagnose::in_ops(session, batch, scalars)?;
        let rest = match &found {
            Some(NonFinite::Op { index, .. }) => {
                let program = session.train_program()?.clone();
                session.engine().run(&program, index + 1..program.range(Section::Backward).end, scalars)
            }
            _ => Ok(()),
        };
        if rest.is_ok() {
            results(session, scalars, rerun)?;
        }
        if rerun.found.is_none() {
            rerun.found = found;
        }
        rerun.finite &= rerun.found.is_none();
        Ok(())
    }

    /// Loads the weights: byte for byte if the element types are those of the run, else with the highest available
    /// precision.
    fn load(&self, session: &mut Session) -> Result<()> {
        let mut checkpoint = Checkpoint::open_weights(&self.weights)?;
        if let Some(CheckpointAdapter { base, .. }) = &self.adapter {
            let mut source = open_weights(base)?;
            session.load_base(base, |name, values| source.read_tensor(name, values))?;
        }
        let precision = session.train_program()?.precision();
        if precision != self.precision {
            return session.load(Pool::Params, |name, values| checkpoint.read_tensor(name, values));
        }
        let mut bytes = Vec::new();
        let kept = |pool: &Pool| matches!(pool, Pool::Params | Pool::Master);
        for pool in CheckpointParts::pools(precision).into_iter().filter(kept) {
            for (index, spec) in checkpoint.model().tensors().iter().enumerate() {
                checkpoint.read_pool(pool, spec, &mut bytes)?;
                session.write_state(pool, index, &bytes)?;
            }
        }
        Ok(())
    }
}

/// Loss and gradient norm of the micro-steps so far.
fn results(session: &mut Session, scalars: &Scalars, rerun: &mut Rerun) -> Result<()> {
    let program = session.train_program()?.clone();
    let update = program.range(Section::Update);
    for index in update.filter(|&index| matches!(program.nodes()[index].op, Op::GradNorm(_))) {
        session.engine().run(&program, index..index + 1, scalars)?;
    }
    let loss = session.engine().read_scalar(io(&program, "loss")?)?;
    let norm = session.engine().read_scalar(io(&program, "norm")?)?;
    (rerun.loss, rerun.norm) = (loss.to_string(), norm.to_string());
    rerun.finite = loss.is_finite() && norm.is_finite();
    Ok(())
}
