//! Holds any engine against the oracle: right values, nothing left unwritten, nothing else touched.

use crate::{Case, all_cases, tolerance};
use ironhorse_core::op::{Access, Arg, Op};
use ironhorse_core::{DType, Engine, Error, Pool, Result, Shape, Slot};
use std::fmt;

/// Fills all memory that is no slot of the case: large, so that reading it by mistake shows.
const SENTINEL: f32 = -1.5e30;

/// A case passed.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The op's name.
    pub op: &'static str,
    /// The case's name.
    pub case: String,
    /// The largest ‖got−want‖/‖want‖ of any slot written.
    pub error: f64,
    /// The slot that has it.
    pub slot: &'static str,
    /// What was allowed.
    pub tolerance: f64,
}

/// A case failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// The op's name.
    pub op: &'static str,
    /// The case's name.
    pub case: String,
    /// What is wrong.
    pub fault: Fault,
}

/// What can be wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The engine or the oracle refused.
    Refused(Error),
    /// The engine accepted an input it must refuse with `Error::Input`, or refused with another error.
    NotRefused(String),
    /// A slot is too far off; `index` is where it is furthest.
    Value {
        /// Which slot.
        slot: &'static str,
        /// Which element.
        index: usize,
        /// The oracle's value there.
        want: f64,
        /// The engine's value there.
        got: f64,
        /// ‖got−want‖/‖want‖ over the slot.
        error: f64,
        /// What was allowed.
        tolerance: f64,
    },
    /// An element is NaN or infinite where the oracle's is not: left unwritten, or computed from what may not be read.
    NotFinite {
        /// Which slot.
        slot: &'static str,
        /// Which element.
        index: usize,
        /// The oracle's value there.
        want: f64,
        /// The engine's value there.
        got: f64,
    },
    /// A word outside the slots written has changed.
    Touched {
        /// Where: a slot's name, or a pool's where no slot is.
        place: &'static str,
        /// Which f32 of the slot or pool.
        index: usize,
        /// What was there.
        want: f32,
        /// What is there now.
        got: f32,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): ", self.op, self.case)?;
        match &self.fault {
            Fault::Refused(error) => write!(f, "{error}"),
            Fault::NotRefused(what) => write!(f, "should refuse with an input error, but {what}"),
            Fault::Value { slot, index, want, got, error, tolerance } => write!(
                f,
                "`{slot}` is off by {error:.2e}, allowed {tolerance:.2e}; worst at [{index}]: expected {want:e}, got {got:e}"
            ),
            Fault::NotFinite { slot, index, want, got } => {
                write!(f, "`{slot}`[{index}]: expected {want:e}, got {got}")
            }
            Fault::Touched { place, index, want, got } => {
                write!(f, "`{place}`[{index}] must not change: expected {want:e}, got {got:e}")
            }
        }
    }
}

impl std::error::Error for Mismatch {}

/// Runs a case on the oracle and on the engine and compares everything.
pub fn check_engine(engine: &mut dyn Engine, case: &Case) -> Result<Report, Mismatch> {
    let op = case.op();
    let mismatch = |fault| Mismatch { op: op.name(), case: case.name.clone(), fault };
    let refused = |error| mismatch(Fault::Refused(error));
    let oracle = case.oracle().map_err(refused)?;
    let before = prepare(engine, case).map_err(refused)?;
    engine.run(&case.program, 0..1, &case.scalars).map_err(refused)?;
    engine.synchronize().map_err(refused)?;
    for (pool, before) in Pool::ALL.into_iter().zip(&before) {
        let after = read(engine, whole(case, pool)).map_err(refused)?;
        check_untouched(op, pool, before, &after).map_err(mismatch)?;
    }

    let allowed = tolerance(op);
    let mut report =
        Report { op: op.name(), case: case.name.clone(), error: 0.0, slot: "", tolerance: allowed };
    for arg in op.args().into_iter().filter(|arg| arg.access.writes()) {
        let want = oracle.read_f64(arg.slot).map_err(refused)?;
        let got = read(engine, arg.slot).map_err(refused)?;
        let error = compare(arg.name, &want, &got, case.floor, allowed).map_err(mismatch)?;
        if error >= report.error {
            (report.error, report.slot) = (error, arg.name);
        }
    }
    Ok(report)
}

/// Checks that the engine refuses the case's input with `Error::Input`, at the latest when waited for.
pub fn check_refusal(engine: &mut dyn Engine, case: &Case) -> Result<(), Mismatch> {
    let mismatch = |fault| Mismatch { op: case.op().name(), case: case.name.clone(), fault };
    prepare(engine, case).map_err(|error| mismatch(Fault::Refused(error)))?;
    let run = engine.run(&case.program, 0..1, &case.scalars).and_then(|()| engine.synchronize());
    match run {
        Err(Error::Input(_)) => Ok(()),
        Err(error) => Err(mismatch(Fault::NotRefused(format!("said: {error}")))),
        Ok(()) => Err(mismatch(Fault::NotRefused("ran".into()))),
    }
}

/// Loads the case with guards all around; returns every pool as it is before the run.
fn prepare(engine: &mut dyn Engine, case: &Case) -> Result<Vec<Vec<f32>>> {
    engine.reserve(&case.reserve)?;
    for pool in Pool::ALL {
        let all = whole(case, pool);
        engine.write_f32(all, &vec![SENTINEL; all.numel()])?;
    }
    case.load(engine)?;
    Pool::ALL.into_iter().map(|pool| read(engine, whole(case, pool))).collect()
}

/// A pool as one flat slot.
fn whole(case: &Case, pool: Pool) -> Slot {
    let words = case.reserve.bytes(pool) / DType::F32.size();
    Slot { pool, offset: 0, shape: Shape::new([words]), dtype: DType::F32 }
}

fn read(engine: &mut dyn Engine, slot: Slot) -> Result<Vec<f32>> {
    let mut data = vec![0.0; slot.numel()];
    engine.read_f32(slot, &mut data)?;
    Ok(data)
}

/// Every word of a pool that no written slot covers has the bits it had.
fn check_untouched(op: &Op, pool: Pool, before: &[f32], after: &[f32]) -> Result<(), Fault> {
    let mut args: Vec<Arg> = op.args().into_iter().filter(|arg| arg.slot.pool == pool).collect();
    args.sort_by_key(|arg| arg.access == Access::Read); // in place, the written name of a slot counts
    for (word, (&want, &got)) in before.iter().zip(after).enumerate() {
        if want.to_bits() == got.to_bits() {
            continue;
        }
        let byte = word * DType::F32.size();
        let holder = args.iter().find(|arg| (arg.slot.offset..arg.slot.end()).contains(&byte));
        match holder {
            Some(arg) if arg.access.writes() => {}
            Some(arg) => {
                let index = word - arg.slot.offset / DType::F32.size();
                return Err(Fault::Touched { place: arg.name, index, want, got });
            }
            None => return Err(Fault::Touched { place: pool.name(), index: word, want, got }),
        }
    }
    Ok(())
}

/// The error of a slot, or what is wrong with it. Where the oracle has NaN (never written), NaN must still be.
fn compare(slot: &'static str, want: &[f64], got: &[f32], floor: f64, tolerance: f64) -> Result<f64, Fault> {
    let (mut size, mut off) = (0.0_f64, 0.0_f64);
    let (mut worst, mut at) = (0.0, 0);
    for (index, (&want, &got)) in want.iter().zip(got).enumerate() {
        let got = f64::from(got);
        if want.is_nan() && got.is_nan() {
            continue;
        }
        if want.is_nan() || !got.is_finite() {
            return Err(Fault::NotFinite { slot, index, want, got });
        }
        size += want * want;
        off += (got - want).powi(2);
        if (got - want).abs() > worst {
            (worst, at) = ((got - want).abs(), index);
        }
    }
    // Where everything is 0 the error is absolute.
    let size = size.sqrt() + floor;
    let error = off.sqrt() / if size > 0.0 { size } else { 1.0 };
    if error <= tolerance {
        return Ok(error);
    }
    Err(Fault::Value { slot, index: at, want: want[at], got: f64::from(got[at]), error, tolerance })
}

/// What [`run_all`] found; prints as a table of op, cases and worst error.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The engine's name.
    pub engine: String,
    /// The cases that passed.
    pub passed: Vec<Report>,
    /// The cases that failed.
    pub failed: Vec<Mismatch>,
}

impl Summary {
    /// Prints the table; panics if anything failed.
    pub fn assert_ok(&self) {
        eprintln!("{self}");
        assert!(self.failed.is_empty(), "{} cases failed on {}", self.failed.len(), self.engine);
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:24}{:>6}{:>8}  {:>9}  {:>9}  worst",
            self.engine, "cases", "failed", "error", "allowed"
        )?;
        for &op in Op::NAMES {
            let failed = self.failed.iter().filter(|mismatch| mismatch.op == op).count();
            let passed: Vec<&Report> = self.passed.iter().filter(|report| report.op == op).collect();
            let cases = passed.len() + failed;
            write!(f, "{op:24}{cases:>6}{failed:>8}")?;
            match passed.into_iter().max_by(|a, b| a.error.total_cmp(&b.error)) {
                Some(Report { error, tolerance, slot, case, .. }) => {
                    writeln!(f, "  {error:>9.2e}  {tolerance:>9.2e}  {slot}, {case}")?
                }
                None => writeln!(f)?,
            }
        }
        self.failed.iter().try_for_each(|mismatch| writeln!(f, "FAILED {mismatch}"))
    }
}

/// Runs every case and every refusal, on a fresh engine for each op.
pub fn run_all(make: &mut dyn FnMut() -> Box<dyn Engine>) -> Summary {
    let (cases, refusals) = (all_cases(), crate::refusals());
    let mut summary = Summary { engine: String::new(), passed: Vec::new(), failed: Vec::new() };
    for &op in Op::NAMES {
        let mut engine = make();
        summary.engine = engine.name().into();
        for case in cases.iter().filter(|case| case.op().name() == op) {
            match check_engine(engine.as_mut(), case) {
                Ok(report) => summary.passed.push(report),
                Err(mismatch) => summary.failed.push(mismatch),
            }
        }
        for case in refusals.iter().filter(|case| case.op().name() == op) {
            summary.failed.extend(check_refusal(engine.as_mut(), case).err());
        }
    }
    summary
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
