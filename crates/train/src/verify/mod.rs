//! Verification: runs the program op by op, compares every tensor with an answer key, and names the first wrong result.

mod compare;
mod diagnose;
mod limits;
mod lockstep;
mod ranks;
mod reference;
pub mod replay;
mod report;
mod rounding;

pub use compare::{Allowed, Comparison, Worst, compare, ulp_distance};
pub use diagnose::{NonFinite, find_non_finite, first_non_finite};
pub use limits::{Basis, Reason};
pub use lockstep::{Disagreement, KindRow, Lockstep, LockstepReport};
pub use ranks::{Together, session_spec_of_rank, shared, verify_together};
pub use reference::{Damage, KeyReference, Recipe, Reference, StateReference};
pub use report::{FirstWrong, Report, Row, RowKind};
pub use rounding::{Rounding, RoundingEngine};

use crate::model::Recompute;
use crate::session::{Session, SessionSpec, io};
use crate::{Error, Result};
use ironhorse_core::op::Op;
use ironhorse_core::{
    Engine, EngineExt, Operands, Pool, Precision, Program, Scalars, Section, Slot, ValueKind,
};
use limits::Limits;

/// Tolerances: the relative error of each tensor by norm, and of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// ‖got − want‖ / ‖want‖ of each tensor.
    pub tensor: f64,
    /// |got − want| / |want| of the loss.
    pub loss: f64,
}

impl Default for Tolerance {
    /// f32 against f32.
    fn default() -> Self {
        Self { tensor: 1e-5, loss: 1e-6 }
    }
}

/// How to verify.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The tolerances.
    pub tolerance: Tolerance,
    /// Optimizer steps to run; `None` for all that the reference has answers for.
    pub steps: Option<usize>,
    /// What the backward recomputes; the results must not change.
    pub recompute: Recompute,
    /// Into how many parts the tokens are cut for the output head.
    pub head_chunks: usize,
    /// Element types of weights and gradients.
    pub precision: Precision,
    /// What the engine rounds the operands of f32 products to.
    pub operands: Operands,
}

/// Verifies an engine against a reference. In tf32, and in bf16 if the reference does not record PyTorch's error, an
/// f32 engine made by `cpu` simulates the precision to determine its error.
pub fn verify(
    engine: Box<dyn Engine>,
    reference: &mut dyn Reference,
    options: &Options,
    cpu: &mut dyn FnMut() -> Box<dyn Engine>,
) -> Result<Report> {
    if let (Some(steps), Some(most)) = (options.steps, reference.most_steps())
        && steps > most
    {
        return Err(Error::input("--steps", steps, format!("at most {most}, which the answer key records")));
    }
    let limits = Limits::new(reference, options, cpu)?;
    let (rows, losses) = answers(engine, reference, options, &limits)?;
    let damage = reference.damage()?;
    let mut report = Report::new(rows, losses, limits.basis, options.tolerance);
    report.add_damage(damage);
    Ok(report)
}

/// Computes what the reference has answers for: the comparisons, and the loss of each step.
fn answers(
    engine: Box<dyn Engine>,
    reference: &mut dyn Reference,
    options: &Options,
    limits: &Limits,
) -> Result<(Vec<Row>, Vec<f32>)> {
    let config = reference.config();
    let mut session = Session::new(engine, config, &session_spec(reference, options))?;
    load_answers(&mut session, reference)?;
    let mut check = Check { reference, options, limits, rows: Vec::new(), want: Vec::new(), got: Vec::new() };
    let scalars = check.reference.inputs()?.get().counting(check.reference.optimizer().scalars);
    check.forward_backward(&mut session, &scalars)?;
    check.gradients(&mut session)?;
    let losses = check.optimizer_steps(&mut session, &scalars)?;
    Ok((check.rows, losses))
}

/// Loads the weights of a reference, and its adapters if it has any.
pub fn load_answers(session: &mut Session, reference: &mut dyn Reference) -> Result<()> {
    if reference.lora().is_some() {
        session.load(Pool::Frozen, |name, values| reference.read_weight(name, values))?;
    }
    session.load(Pool::Params, |name, values| reference.read_weight(name, values))
}

/// The session that a verification runs.
pub fn session_spec(reference: &dyn Reference, options: &Options) -> SessionSpec {
    let train = Some((reference.batch(), reference.seq()));
    let Options { recompute, head_chunks, precision, .. } = *options;
    // optimizer and dropout are those of the answers
    let precision = precision.with_optimizer(reference.optimizer().optimizer);
    let (dropout, lora) = (reference.dropout(), reference.lora());
    let (packed, preference) = (reference.packed(), reference.preference());
    let spec = SessionSpec { train, recompute, head_chunks, dropout, packed, ..SessionSpec::default() };
    SessionSpec { preference, precision, lora, ..spec }
}

struct Check<'a> {
    reference: &'a mut dyn Reference,
    options: &'a Options,
    limits: &'a Limits,
    rows: Vec<Row>,
    want: Vec<f32>,
    got: Vec<f32>,
}

impl Check<'_> {
    /// Runs forward and backward op by op, comparing each named value right after the op that completes it: later
    /// ops may reuse its memory.
    fn forward_backward(&mut self, session: &mut Session, scalars: &Scalars) -> Result<()> {
        let program = session.train_program()?.clone();
        self.reference.inputs()?.get().write(session.engine(), &program)?;
        let loss = io(&program, "loss")?;
        let end = program.range(Section::Backward).end;
        // the loss of a mixture of experts is a sum over several ops
        let last_loss = (0..end).rev().find(|&i| program.nodes()[i].op.writes().any(|slot| slot == loss));
        let mut values = program.values().iter().peekable();
        for i in 0..end {
            session.engine().run(&program, i..i + 1, scalars)?;
            while let Some(value) = values.next_if(|value| value.after <= i) {
                let name = match (value.kind, value.name.as_str()) {
                    (ValueKind::Activation, "logits") => "logits".to_owned(),
                    (ValueKind::Activation, name) => format!("act.{name}"),
                    (ValueKind::Gradient, name) => format!("dact.{name}"),
                };
                self.tensor(session, &program, i, &name, value.slot)?;
            }
            if let Op::Preference(op) = &program.nodes()[i].op {
                self.rewards(session, &program, i, op.rewards)?;
            }
            if last_loss == Some(i) {
                self.aux(session, &program)?;
                self.tensor(session, &program, i, "loss", loss)?;
            }
        }
        Ok(())
    }

    /// Compares the layers' auxiliary losses, which the reference has as one tensor (L).
    fn aux(&mut self, session: &mut Session, program: &Program) -> Result<()> {
        let Some(want) = self.reference.read("aux")? else { return Ok(()) };
        let slots = (0..want.len()).map(|l| io(program, &format!("layers.{l}.aux")));
        let slots = slots.collect::<Result<Vec<_>>>()?;
        let got = slots.iter().map(|&slot| Ok(session.engine().read_scalar(slot)?));
        let got = got.collect::<Result<Vec<_>>>()?;
        let allowed = self.limits.of(self.reference, "aux", want.len());
        let comparison = compare(&got, &want, &[want.len()], allowed);
        // blame the op of the first wrong layer
        let layer = comparison.first_wrong.as_ref().map_or(0, |wrong| wrong.index[0]);
        let wrote = |&i: &usize| program.nodes()[i].op.writes().any(|slot| slots.get(layer) == Some(&slot));
        let op = (0..program.nodes().len()).find(wrote).unwrap_or(0);
        self.rows.push(Row::new("aux", program, op, comparison));
        Ok(())
    }

    /// Compares the rewards of the pairs that there are.
    fn rewards(&mut self, session: &mut Session, program: &Program, op: usize, slot: Slot) -> Result<()> {
        let Some(want) = self.reference.read("rewards")? else { return Ok(()) };
        self.got.resize(slot.numel(), 0.0);
        session.engine().read_f32(slot, &mut self.got)?;
        let got = self.got.get(..want.len()).unwrap_or(&self.got);
        let allowed = self.limits.of(self.reference, "rewards", want.len());
        let comparison = compare(got, &want, &[want.len() / 2, 2], allowed);
        self.rows.push(Row::new("rewards", program, op, comparison));
        Ok(())
    }

    fn gradients(&mut self, session: &mut Session) -> Result<()> {
        let program = session.train_program()?.clone();
        for param in program.params() {
            let slot = param.grad();
            // Blame the op that wrote it last.
            let last = (0..program.range(Section::Backward).end)
                .rev()
                .find(|&i| program.nodes()[i].op.writes().any(|written| written.overlaps(&slot)));
            self.tensor(session, &program, last.unwrap_or(0), &format!("grad.{}", param.name), slot)?;
        }
        Ok(())
    }

    /// Repeats the step on the same batch and compares the losses and the final weights.
    fn optimizer_steps(&mut self, session: &mut Session, scalars: &Scalars) -> Result<Vec<f32>> {
        let recipe = self.reference.optimizer();
        let steps = self.options.steps.unwrap_or(recipe.steps);
        let program = session.train_program()?.clone();
        let last = program.nodes().len().saturating_sub(1);
        let mut losses = vec![session.engine().read_scalar(io(&program, "loss")?)?];
        if steps == 0 {
            return Ok(losses);
        }
        for step in 1..=steps {
            let scalars = Scalars { step: step as u32, ..*scalars };
            if step > 1 {
                session.engine().run(&program, program.micro_step(), &scalars)?;
                losses.push(session.engine().read_scalar(io(&program, "loss")?)?);
            }
            session.engine().run_section(&program, Section::Update, &scalars)?;
        }
        if let Some(mut want) = self.reference.read("losses")? {
            want.truncate(losses.len());
            let allowed = self.limits.of(self.reference, "losses", want.len());
            let got = losses[..want.len()].to_vec();
            let comparison = compare(&got, &want, &[want.len()], allowed);
            self.rows.push(Row::new("losses", &program, last, comparison));
        }
        if steps == recipe.steps {
            for param in program.params() {
                let name = format!("after.{}", param.name);
                session.read_in_pool(Pool::Params, param, &mut self.got)?;
                let (nodes, at) = (program.nodes(), param.elements().start);
                let updates =
                    |i: &usize| nodes[*i].op.updates(program.params()).iter().any(|r| r.contains(&at));
                let blamed = (0..nodes.len()).rev().find(updates).unwrap_or(last);
                self.compare_got(&program, blamed, &name, param.weight)?;
            }
        }
        Ok(losses)
    }

    /// Compares one slot with the reference's tensor of that name, if it has one.
    fn tensor(
        &mut self,
        session: &mut Session,
        program: &Program,
        op: usize,
        name: &str,
        slot: Slot,
    ) -> Result<()> {
        lockstep::read(session.engine(), slot, &mut self.got, &mut Vec::new())?;
        self.compare_got(program, op, name, slot)
    }

    /// Compares `got`, of the shape of this slot.
    fn compare_got(&mut self, program: &Program, op: usize, name: &str, slot: Slot) -> Result<()> {
        let Some(want) = self.reference.read(name)? else { return Ok(()) };
        self.want = want;
        let shape = self.strip_padding(name, slot)?;
        let allowed = self.limits.of(self.reference, name, self.want.len());
        self.rows.push(Row::new(name, program, op, compare(&self.got, &self.want, &shape, allowed)));
        Ok(())
    }

    /// Reduces `got` to the reference's size by dropping the padding of the vocabulary, which must be 0 in gradients.
    fn strip_padding(&mut self, name: &str, slot: Slot) -> Result<Vec<usize>> {
        let config = self.reference.config();
        let mut shape = slot.shape.dims().to_vec();
        if self.got.len() == self.want.len() {
            return Ok(shape);
        }
        let (vocab, padded) = (config.vocab_size(), config.padded_vocab_size());
        let param = name.split_once('.').map_or("", |(_, param)| param);
        if name == "logits" {
            let rows = self.got.len() / padded;
            for row in 0..rows {
                self.got.copy_within(row * padded..row * padded + vocab, row * vocab);
            }
            self.got.truncate(rows * vocab);
            if let Some(last) = shape.last_mut() {
                *last = vocab;
            }
        } else if config.is_vocab_table(param) {
            self.got.truncate(vocab * config.width());
            shape[0] = vocab;
        }
        if self.got.len() == self.want.len() {
            return Ok(shape);
        }
        Err(Error::input(
            format!("{name}: the number of elements in the reference"),
            self.want.len(),
            format!("{} as in the model ({})", slot.numel(), slot.shape),
        ))
    }
}
