//! Compares any engine with the oracle: correct values, no output left unwritten, no other memory changed.

use crate::Case;
use crate::case::read;
use crate::report::{Fault, Mismatch, Report};
use crate::tolerance::{Terms, tolerance};
use crate::update;
use ironhorse_core::op::{Access, Arg};
use ironhorse_core::{DType, Engine, EngineExt, Error, Operands, Pool, Result, Shape, Slot};
use std::iter;
use std::ops::Range;

/// The value of all memory outside the slots of the case: large, so that reading it by mistake is noticed.
const SENTINEL: f32 = -1.5e30;

/// How a case is checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Check {
    /// What the engine may round the operands of products of f32 to.
    pub operands: Operands,
    /// Run the case a second time and require the same bits.
    pub twice: bool,
}

/// Runs a case on the oracle and on the engine and compares everything.
pub fn check_engine(engine: &mut dyn Engine, case: &Case) -> Result<Report, Mismatch> {
    check_against(engine, case, case.expected(), Check::default())
}

/// Runs a case on the engine and compares everything with the result of [`Case::expected`].
pub fn check_against(
    engine: &mut dyn Engine,
    case: &Case,
    expected: Result<Vec<Vec<f64>>>,
    check: Check,
) -> Result<Report, Mismatch> {
    let op = case.op();
    let mismatch = |fault| mismatch(case, fault);
    let refused = |error| mismatch(Fault::Refused(error));
    let expected = expected.map_err(refused)?;
    let before = prepare(engine, case).map_err(refused)?;
    let after = run(engine, case).map_err(refused)?;
    for (pool, (before, after)) in Pool::ALL.into_iter().zip(before.iter().zip(&after)) {
        check_untouched(case, pool, before, after).map_err(mismatch)?;
    }

    let terms = Terms { operands: check.operands, scores: case.scores, exact: case.exact };
    let mut report = Report {
        op: op.name(),
        case: case.name.clone(),
        precision: case.precision(),
        error: 0.0,
        slot: "",
        tolerance: 0.0,
    };
    let masters = update::masters(engine, case, &expected).map_err(refused)?;
    let written = op.args().into_iter().filter(|arg| arg.access.writes());
    for (arg, want) in written.zip(&expected) {
        let allowed = tolerance(op, &arg, want, terms);
        let got = read(engine, arg.slot).map_err(refused)?;
        let error = match (&masters, arg.name) {
            (Some(_), "params") => continue, // compared together with their residuals
            (Some((want, got)), "master") => compare(arg.name, want, got, case.floor, allowed),
            _ => compare(arg.name, want, &got, case.floor, allowed),
        };
        let error = error.map_err(mismatch)?;
        let now = Report { error, slot: arg.name, tolerance: allowed, ..report.clone() };
        if report.slot.is_empty() || now.share() > report.share() {
            report = now;
        }
    }
    update::check_rounding(engine, case, &expected).map_err(refused)?.map_err(mismatch)?;
    if check.twice {
        prepare(engine, case).map_err(refused)?;
        let again = run(engine, case).map_err(refused)?;
        for (pool, (first, second)) in Pool::ALL.into_iter().zip(after.iter().zip(&again)) {
            check_repeated(case, pool, first, second).map_err(mismatch)?;
        }
    }
    Ok(report)
}

fn mismatch(case: &Case, fault: Fault) -> Mismatch {
    Mismatch { op: case.op().name(), case: case.name.clone(), precision: case.precision(), fault }
}

/// Runs the op and returns every pool.
fn run(engine: &mut dyn Engine, case: &Case) -> Result<Vec<Vec<f32>>> {
    engine.run(&case.program, 0..1, &case.scalars)?;
    engine.synchronize()?;
    Pool::ALL.into_iter().map(|pool| read(engine, whole(case, pool))).collect()
}

/// Checks that the engine rejects the case's input with `Error::Input`, at the latest in `synchronize`.
pub fn check_refusal(engine: &mut dyn Engine, case: &Case) -> Result<(), Mismatch> {
    let mismatch = |fault| mismatch(case, fault);
    prepare(engine, case).map_err(|error| mismatch(Fault::Refused(error)))?;
    let run = engine.run(&case.program, 0..1, &case.scalars).and_then(|()| engine.synchronize());
    match run {
        Err(Error::Input(_)) => Ok(()),
        Err(error) => Err(mismatch(Fault::NotRefused(format!("said: {error}")))),
        Ok(()) => Err(mismatch(Fault::NotRefused("ran".into()))),
    }
}

/// Loads the case with guards around all slots; returns the contents of every pool before the run.
fn prepare(engine: &mut dyn Engine, case: &Case) -> Result<Vec<Vec<f32>>> {
    engine.reserve(&case.reserve)?;
    for pool in Pool::ALL {
        let all = whole(case, pool);
        engine.write_f32(all, &vec![SENTINEL; all.numel()])?;
    }
    case.load(engine)?;
    Pool::ALL.into_iter().map(|pool| read(engine, whole(case, pool))).collect()
}

/// A pool as one flat slot, in units of the smallest float type of the op, because a slot of smaller elements can end inside an f32.
/// Engines copy the bits of floats unchanged, so other element types survive too.
fn whole(case: &Case, pool: Pool) -> Slot {
    let dtype = unit(case);
    Slot { pool, offset: 0, shape: Shape::new([case.reserve.bytes(pool) / dtype.size()]), dtype }
}

fn unit(case: &Case) -> DType {
    let types = case.op().args().into_iter().map(|arg| arg.slot.dtype);
    let floats = types.filter(|dtype| matches!(dtype, DType::BF16 | DType::F8(_)));
    floats.min_by_key(|dtype| dtype.size()).unwrap_or(DType::F32)
}

/// Checks that every word of a pool outside the written slots has kept its bits.
fn check_untouched(case: &Case, pool: Pool, before: &[f32], after: &[f32]) -> Result<(), Fault> {
    let size = unit(case).size();
    let mut written: Vec<_> =
        case.op().writes().filter(|slot| slot.pool == pool).flat_map(|slot| parts(case, slot)).collect();
    written.iter_mut().for_each(|bytes| *bytes = bytes.start / size..bytes.end / size);
    for (word, (&want, &got)) in before.iter().zip(after).enumerate() {
        if want.to_bits() == got.to_bits() || written.iter().any(|range| range.contains(&word)) {
            continue;
        }
        let (place, index) = holder(case, pool, word);
        return Err(Fault::Touched { place, index, want, got });
    }
    Ok(())
}

/// The bytes of a written slot that may change: of the pools of an update only those of the parameters that it has.
fn parts(case: &Case, slot: Slot) -> Vec<Range<usize>> {
    let (size, params) = (slot.dtype.size(), case.program.params());
    let updates = case.op().updates(params);
    let in_bytes = |range: &Range<usize>| slot.offset + range.start * size..slot.offset + range.end * size;
    match slot.pool {
        _ if updates.is_empty() => iter::once(slot.offset..slot.end()).collect(),
        Pool::Moment2 => {
            params.iter().map(|param| param.in_pool(slot.pool)).map(|slot| slot.offset..slot.end()).collect()
        }
        Pool::Params | Pool::Master | Pool::Moment1 => updates.iter().map(in_bytes).collect(),
        _ => iter::once(slot.offset..slot.end()).collect(),
    }
}

/// Checks that two runs left the same bits.
fn check_repeated(case: &Case, pool: Pool, first: &[f32], second: &[f32]) -> Result<(), Fault> {
    let differ = |(_, (a, b)): &(usize, (&f32, &f32))| a.to_bits() != b.to_bits();
    let Some((word, (&first, &second))) = first.iter().zip(second).enumerate().find(differ) else {
        return Ok(());
    };
    let (place, index) = holder(case, pool, word);
    Err(Fault::NotRepeated { place, index, first, second })
}

/// The slot that contains this unit of a pool and the index in it, or the pool itself outside of any slot. If the op
/// works in place, the name of the written slot.
fn holder(case: &Case, pool: Pool, word: usize) -> (&'static str, usize) {
    let size = unit(case).size();
    let byte = word * size;
    let mut args = case.op().args();
    args.sort_by_key(|arg| arg.access == Access::Read);
    let holds = |arg: &Arg| arg.slot.pool == pool && (arg.slot.offset..arg.slot.end()).contains(&byte);
    let arg = args.into_iter().find(holds);
    arg.map_or((pool.name(), word), |arg| (arg.name, (byte - arg.slot.offset) / size))
}

/// The error of a slot, or the fault. Where the oracle has NaN (never written) or an infinity, the engine must have the
/// same.
fn compare(slot: &'static str, want: &[f64], got: &[f32], floor: f64, tolerance: f64) -> Result<f64, Fault> {
    let (mut size, mut off) = (0.0_f64, 0.0_f64);
    let (mut worst, mut at) = (0.0, 0);
    for (index, (&want, &got)) in want.iter().zip(got).enumerate() {
        let got = f64::from(got);
        if want.is_nan() && got.is_nan() || want.is_infinite() && got == want {
            continue;
        }
        if !want.is_finite() || !got.is_finite() {
            return Err(Fault::NotFinite { slot, index, want, got });
        }
        size += want * want;
        off += (got - want).powi(2);
        if (got - want).abs() > worst {
            (worst, at) = ((got - want).abs(), index);
        }
    }
    // If the oracle's slot is all 0, the error is absolute.
    let size = size.sqrt() + floor;
    let error = off.sqrt() / if size > 0.0 { size } else { 1.0 };
    if error <= tolerance {
        return Ok(error);
    }
    Err(Fault::Value { slot, index: at, want: want[at], got: f64::from(got[at]), error, tolerance })
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
