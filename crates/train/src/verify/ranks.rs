//! A step that several ranks share, held against the same answers as a step of one: the rows of the batch are its micro-steps.

use super::{Check, Options, Reference, Report, Row, compare, load_answers, session_spec};
use crate::model::{ModelConfig, Sums};
use crate::session::{Batch, OwnedBatch, Session, SessionSpec, io};
use crate::verify::limits::Limits;
use crate::{Error, Result};
use ironhorse_core::{Communicator, Engine, EngineExt, Place, Program, Scalars, Section, Shard};
use std::sync::Arc;

/// The ranks that verify together.
#[derive(Clone)]
pub struct Together {
    /// All of them.
    pub with: Arc<dyn Communicator>,
    /// What each keeps.
    pub shard: Shard,
}

/// The session of a rank: one row of the batch is a micro-step.
pub fn session_spec_of_rank(
    reference: &dyn Reference,
    options: &Options,
    together: &Together,
) -> Result<SessionSpec> {
    let sums = shared(reference, together.with.place(), together.shard)?;
    let train = Some((1, reference.seq()));
    Ok(SessionSpec { train, sums: Some(sums), ..session_spec(reference, options) })
}

/// How ranks add up the rows of the batch. Refuses answers whose loss is not a sum over them, and batches that the ranks cannot
/// share.
pub fn shared(reference: &dyn Reference, place: Place, shard: Shard) -> Result<Sums> {
    let sums = Sums { place, shard, accumulate: reference.batch() as u32, ..Sums::default() };
    let world = place.world;
    if !reference.batch().is_multiple_of(world) {
        let expected = format!("a multiple of the {world} ranks, which share them");
        return Err(Error::input("the rows of the key's batch", reference.batch(), expected));
    }
    let refused = match reference.config() {
        ModelConfig::Moe(config) if reference.config().has_experts() && config.aux_alpha > 0.0 => {
            Some("an auxiliary loss, which is that of a whole batch: export a key with aux_alpha=0")
        }
        _ if reference.dropout().rate() > 0.0 => {
            Some("dropout, whose masks differ when a batch is cut into micro-steps")
        }
        _ if reference.preference().is_some() => Some("preference pairs, whose loss is not a sum over rows"),
        _ => None,
    };
    match refused {
        Some(what) => Err(Error::Unsupported(format!("ranks cannot share a key with {what}"))),
        None => sums.check().map(|()| sums),
    }
}

/// [`verify`](super::verify) of a step that ranks share: loss, every gradient and the weights after the update. Rank 0 compares
/// and has the report.
pub fn verify_together(
    engine: Box<dyn Engine>,
    reference: &mut dyn Reference,
    options: &Options,
    together: &Together,
    cpu: &mut dyn FnMut() -> Box<dyn Engine>,
) -> Result<Option<Report>> {
    let spec = session_spec_of_rank(reference, options, together)?;
    let limits = Limits::new(reference, options, cpu)?;
    let mut session = Session::new(engine, reference.config(), &spec)?;
    session.join(together.with.clone())?;
    load_answers(&mut session, reference)?;
    let mut check =
        Check { reference, options, limits: &limits, rows: Vec::new(), want: Vec::new(), got: Vec::new() };
    let losses = check.shared_steps(&mut session)?;
    let (rows, damage) = (check.rows, reference.damage()?);
    if !together.with.place().leads() {
        return Ok(None);
    }
    let mut report = Report::new(rows, losses, limits.basis, options.tolerance);
    report.add_damage(damage);
    Ok(Some(report))
}

/// One row of a batch.
fn row(inputs: &OwnedBatch, number: usize, seq: usize) -> Batch<'_> {
    let of = |all: &'_ [i32]| number * seq..((number + 1) * seq).min(all.len());
    let positions = inputs.positions.as_deref().map(|all| &all[of(all)]);
    Batch { positions, ..Batch::plain(&inputs.x[of(&inputs.x)], &inputs.y[of(&inputs.y)]) }
}

impl Check<'_> {
    /// Runs the steps; compares the loss and the gradients of the first, and the losses and weights after the last.
    fn shared_steps(&mut self, session: &mut Session) -> Result<Vec<f32>> {
        let (inputs, recipe) = (self.reference.inputs()?, self.reference.optimizer());
        let (rows, seq) = (self.reference.batch(), self.reference.seq());
        let scalars = inputs.get().counting(recipe.scalars);
        let program = session.train_program()?.clone();
        let steps = self.options.steps.unwrap_or(recipe.steps);
        let mut losses = Vec::new();
        for step in 1..=steps.max(1) {
            let scalars = Scalars { step: step as u32, ..scalars };
            for number in session.begin_step(rows) {
                let scalars = Scalars { micro_step: number as u32, ..scalars };
                session.step(row(&inputs, number, seq), &scalars)?;
            }
            let loss = io(&program, "loss")?;
            losses.push(session.engine().read_scalar(loss)?);
            if step == 1 {
                self.got = vec![losses[0]];
                self.compare_got(&program, program.range(Section::Sum).end - 1, "loss", loss)?;
                self.shared_gradients(session, &program)?;
            }
            if steps > 0 {
                session.engine().run_section(&program, Section::Update, &scalars)?;
            }
        }
        if steps > 0 {
            self.shared_results(session, &program, &losses)?;
        }
        Ok(losses)
    }

    fn shared_gradients(&mut self, session: &mut Session, program: &Program) -> Result<()> {
        let Some(all) = session.gather_gradients()? else { return Ok(()) };
        for param in program.params() {
            let slot = param.grad();
            let writes = |&i: &usize| program.nodes()[i].op.writes().any(|written| written.overlaps(&slot));
            let last = (0..program.range(Section::Backward).end).rev().find(writes);
            self.got = all[param.elements()].to_vec();
            self.compare_got(program, last.unwrap_or(0), &format!("grad.{}", param.name), slot)?;
        }
        Ok(())
    }

    fn shared_results(&mut self, session: &mut Session, program: &Program, losses: &[f32]) -> Result<()> {
        let last = program.nodes().len().saturating_sub(1);
        let Some(weights) = session.gather_weights()? else { return Ok(()) };
        if let Some(mut want) = self.reference.read("losses")? {
            want.truncate(losses.len());
            let allowed = self.limits.of(self.reference, "losses", want.len());
            let comparison = compare(&losses[..want.len()], &want, &[want.len()], allowed);
            self.rows.push(Row::new("losses", program, last, comparison));
        }
        if losses.len() == self.reference.optimizer().steps {
            for param in program.params() {
                self.got = weights[param.elements()].to_vec();
                self.compare_got(program, last, &format!("after.{}", param.name), param.weight)?;
            }
        }
        Ok(())
    }
}
