//! Two engines in lockstep: every op runs on both with the same inputs, so the first op on which they disagree is
//! itself wrong, not just its inputs.

mod report;
mod tolerance;

pub use report::{Disagreement, KindRow, LockstepReport};

use super::compare::compare;
use super::rounding::{round_bf16, run_with_rounded_sum};
use crate::Result;
use crate::session::master::{is_residual, read_master};
use crate::session::{Batch, Session};
use ironhorse_core::op::{Arg, Op};
use ironhorse_core::{DType, Engine, EngineExt, Operands, Program, Scalars, Section, Slot, Widening};

/// What both engines compute.
#[derive(Clone, Copy, Debug)]
pub struct Lockstep<'a> {
    /// What the step is of.
    pub batch: Batch<'a>,
    /// The optimizer's numbers; the loss is the mean over the targets that count.
    pub scalars: Scalars,
    /// How often to run the whole step. The second run adds its gradients to those of the first, and its moments are
    /// not 0.
    pub passes: u32,
    /// What the session's engine rounds the operands of f32 products to.
    pub operands: Operands,
}

impl Lockstep<'_> {
    /// Runs the session's engine and `other`, an engine that computes in f32, op by op. The session continues with its
    /// own results.
    pub fn run(&self, session: &mut Session, other: Box<dyn Engine>) -> Result<LockstepReport> {
        let program = session.train_program()?.clone();
        let mut twin = Twin::new(&program, other)?;
        self.batch.write(session.engine(), &program)?;
        let mut report = LockstepReport::new(session.engine().name(), twin.engine.name());
        for pass in 0..self.passes {
            let scalars =
                self.batch.counting(Scalars { step: pass + 1, micro_step: pass.min(1), ..self.scalars });
            for i in 0..program.range(Section::Update).end {
                twin.give_inputs(session.engine(), &program.nodes()[i].op)?;
                let rounded = twin.with_rounded_operands(i, self.operands, &scalars)?;
                session.engine().run(&program, i..i + 1, &scalars)?;
                twin.run(i, &scalars)?;
                for arg in program.nodes()[i].op.args().iter().filter(|arg| arg.access.writes()) {
                    let mut allowed = tolerance::tolerance(&program.nodes()[i].op, arg, self.operands);
                    twin.read_both(session.engine(), &program.nodes()[i].op, arg)?;
                    if let Some((_, rounded)) = rounded.iter().find(|(name, _)| *name == arg.name) {
                        let error = compare(rounded, &twin.want, arg.slot.shape.dims(), 0.0).rel_error;
                        allowed = allowed.max(tolerance::simulated(error));
                    }
                    let comparison = compare(&twin.got, &twin.want, arg.slot.shape.dims(), allowed);
                    report.add(&program, (pass, i), arg.name, comparison);
                }
                report.count(&program, i);
            }
        }
        report.judge();
        Ok(report)
    }
}

/// The same program on the other engine, in f32.
struct Twin {
    program: Program,
    engine: Box<dyn Engine>,
    wide: Option<Widening>,
    got: Vec<f32>,
    want: Vec<f32>,
    ints: Vec<i32>,
}

impl Twin {
    fn new(program: &Program, mut engine: Box<dyn Engine>) -> Result<Self> {
        let wide = program.precision().has_master().then(|| program.widening());
        let program = wide.map_or_else(|| Ok(program.clone()), |by| program.widened(by))?;
        engine.reserve(program.layout())?;
        Ok(Self { program, engine, wide, got: Vec::new(), want: Vec::new(), ints: Vec::new() })
    }

    fn place(&self, slot: Slot) -> Slot {
        self.wide.map_or(slot, |by| slot.widened(by))
    }

    /// Copies everything that an op reads.
    fn give_inputs(&mut self, from: &mut dyn Engine, op: &Op) -> Result<()> {
        for arg in op.args().iter().filter(|arg| arg.access.reads()) {
            let to = self.place(arg.slot);
            if let Some(pair) = residual(op, arg) {
                read_master(from, pair, true, &mut self.got)?;
                self.engine.write_f32(to, &self.got)?;
            } else if arg.slot.dtype == DType::I32 {
                self.ints.resize(arg.slot.numel(), 0);
                from.read_i32(arg.slot, &mut self.ints)?;
                self.engine.write_i32(to, &self.ints)?;
            } else {
                self.got.resize(arg.slot.numel(), 0.0);
                from.read_f32(arg.slot, &mut self.got)?;
                self.engine.write_f32(to, &self.got)?;
            }
        }
        Ok(())
    }

    fn run(&mut self, i: usize, scalars: &Scalars) -> Result<()> {
        let (engine, program) = (self.engine.as_mut(), &self.program);
        if self.wide.is_some() {
            run_with_rounded_sum(engine, program, i, scalars)?;
        } else {
            engine.run(program, i..i + 1, scalars)?;
        }
        Ok(())
    }

    /// What an op of attention writes if its operands are rounded to bf16, by name; nothing for other ops. Its inputs stay as they are.
    fn with_rounded_operands(
        &mut self,
        i: usize,
        operands: Operands,
        scalars: &Scalars,
    ) -> Result<Vec<(&'static str, Vec<f32>)>> {
        let op = self.program.nodes()[i].op;
        if !tolerance::is_simulated(&op, operands) {
            return Ok(Vec::new());
        }
        let mut exact = Vec::new();
        for arg in op.args().iter().filter(|arg| op.operands().contains(&arg.name)) {
            read(self.engine.as_mut(), arg.slot, &mut self.got, &mut self.ints)?;
            let rounded: Vec<f32> = self.got.iter().map(|&x| round_bf16(x)).collect();
            self.engine.write_f32(arg.slot, &rounded)?;
            exact.push((arg.slot, std::mem::take(&mut self.got)));
        }
        self.run(i, scalars)?;
        let mut written = Vec::new();
        for arg in op.args().iter().filter(|arg| arg.access.writes() && arg.slot.dtype != DType::I32) {
            read(self.engine.as_mut(), arg.slot, &mut self.got, &mut self.ints)?;
            written.push((arg.name, std::mem::take(&mut self.got)));
        }
        exact.iter().try_for_each(|(slot, values)| self.engine.write_f32(*slot, values))?;
        Ok(written)
    }

    /// The results that both engines have written to an argument.
    fn read_both(&mut self, from: &mut dyn Engine, op: &Op, arg: &Arg) -> Result<()> {
        // the twin has only one copy of the weights, the master
        let master = op.masters().filter(|_| arg.name == "params");
        let wanted = master.map_or(arg.slot, |[_, master]| master);
        let place = self.place(wanted);
        match residual(op, arg) {
            Some(pair) => read_master(from, pair, true, &mut self.got)?,
            None => read(from, arg.slot, &mut self.got, &mut self.ints)?,
        }
        read(self.engine.as_mut(), place, &mut self.want, &mut self.ints)
    }
}

/// The parameters and their residuals, if the argument is a residual.
fn residual(op: &Op, arg: &Arg) -> Option<[Slot; 2]> {
    op.masters().filter(|[_, master]| arg.name == "master" && is_residual(master))
}

/// Fills `values` with a tensor; the integers of a program are small enough to be exact in f32.
pub(super) fn read(
    engine: &mut dyn Engine,
    slot: Slot,
    values: &mut Vec<f32>,
    ints: &mut Vec<i32>,
) -> Result<()> {
    values.clear();
    if slot.dtype == DType::I32 {
        ints.resize(slot.numel(), 0);
        engine.read_i32(slot, ints)?;
        values.extend(ints.iter().map(|&int| int as f32));
        return Ok(());
    }
    values.resize(slot.numel(), 0.0);
    Ok(engine.read_f32(slot, values)?)
}
