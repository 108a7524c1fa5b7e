//! Runs many cases on one engine and prints a table of the results.

use crate::case::is_choice;
use crate::conformance::{Check, check_against, check_refusal};
use crate::report::{Fault, Mismatch, Report};
use crate::{Case, FP8_OPS, cases_in, refusals_in};
use ironhorse_core::op::Op;
use ironhorse_core::{Engine, EngineExt, Layout, Operands, Precision, Result};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many cases the oracle computes, and keeps in memory, at a time.
const BATCH: usize = 48;
/// A quick run uses this many cases per op and precision, each of at most this many elements.
const QUICK: usize = 6;
const QUICK_ELEMENTS: usize = 200_000;

/// bf16 with bf16 and with f32 gradients, each with every way to store master weights and moments.
const BF16: [Precision; 8] = {
    let (narrow, wide) = (Precision::BF16, Precision::BF16_F32_GRADS);
    [
        narrow,
        wide,
        narrow.with_residual(),
        narrow.with_bf16_moments(),
        narrow.with_residual().with_bf16_moments(),
        wide.with_residual(),
        wide.with_bf16_moments(),
        wide.with_residual().with_bf16_moments(),
    ]
};

/// What an engine computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// IEEE single precision.
    F32,
    /// f32 whose matrix products may round their operands to tf32.
    Tf32,
    /// f32 whose matrix products may round their operands to bf16.
    Bf16Products,
    /// bf16, with bf16 and with f32 gradients, and with every way to store master weights and moments.
    Bf16,
    /// The ops of 8-bit numbers, beside bf16 with bf16 and with f32 gradients. The other ops are those of bf16.
    Fp8,
}

impl Mode {
    /// The name in flags and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16Products => "bf16-products",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }

    /// What products of f32 may round their operands to.
    pub const fn operands(self) -> Operands {
        match self {
            Self::Tf32 => Operands::Tf32,
            Self::Bf16Products => Operands::Bf16,
            Self::F32 | Self::Bf16 | Self::Fp8 => Operands::F32,
        }
    }

    fn precisions(self) -> &'static [Precision] {
        match self {
            Self::F32 | Self::Tf32 | Self::Bf16Products => &[Precision::F32],
            Self::Bf16 => &BF16,
            Self::Fp8 => &[Precision::BF16, Precision::BF16_F32_GRADS],
        }
    }
}

/// Which cases to run.
#[derive(Clone, Debug)]
pub struct Suite {
    /// What the engine computes in.
    pub mode: Mode,
    /// The names of the ops; empty means all.
    pub ops: Vec<String>,
    /// Run only a few small cases of each op.
    pub quick: bool,
    /// Run the large cases too.
    pub large: bool,
    /// Run each case twice and require the same bits.
    pub twice: bool,
    /// Run the ops of 8-bit numbers in f32 too, in slots of f32. Only the CPU engine has them there.
    pub wide_fp8: bool,
}

impl Suite {
    /// Everything but the large cases, once.
    pub fn new(mode: Mode) -> Self {
        Self { mode, ops: Vec::new(), quick: false, large: false, twice: false, wide_fp8: true }
    }

    /// The cases to compute and the cases that must be rejected, op by op.
    fn cases(&self) -> (Vec<Case>, Vec<Case>) {
        // Ops without matrix products compute the same whatever these do to their operands.
        let has = |op: &str| {
            self.mode.operands() == Operands::F32
                || ["linear", "grouped", "attention"].iter().any(|s| op.starts_with(s))
        };
        let has_fp8 = |op: &str| match self.mode {
            Mode::Fp8 => FP8_OPS.contains(&op),
            Mode::F32 if self.wide_fp8 || op == "scale_update" => true,
            _ => !FP8_OPS.contains(&op),
        };
        let has = |op: &str| has(op) && has_fp8(op);
        let wanted = |op: &str| has(op) && (self.ops.is_empty() || self.ops.iter().any(|name| name == op));
        let (mut cases, mut refusals) = (Vec::new(), Vec::new());
        for &precision in self.mode.precisions() {
            let mut all = cases_in(precision, wanted);
            all.retain(|case| self.large || !case.large);
            cases.extend(if self.quick { quick(all) } else { all });
            if precision.weights == precision.grads && !is_choice(precision) {
                refusals.extend(refusals_in(precision));
            }
        }
        refusals.retain(|case| wanted(case.op().name()));
        (cases, refusals)
    }

    /// Runs all cases on one engine. `progress` is called with the number of cases done and the total. Stops if the
    /// device fails.
    pub fn run(&self, engine: &mut dyn Engine, progress: &mut dyn FnMut(usize, usize)) -> Summary {
        let mut summary = self.summary(engine);
        self.run_on(&mut [(engine, &mut summary)], progress);
        summary
    }

    /// As [`Self::run`], on several engines, one case on all of them after the other: the oracle computes each case once.
    pub fn run_each(&self, engines: &mut [Box<dyn Engine>]) -> Vec<Summary> {
        let mut summaries: Vec<Summary> =
            engines.iter().map(|engine| self.summary(engine.as_ref())).collect();
        let mut all: Vec<Run<'_>> =
            engines.iter_mut().map(|engine| engine.as_mut() as &mut dyn Engine).zip(&mut summaries).collect();
        self.run_on(&mut all, &mut |_, _| ());
        summaries
    }

    fn summary(&self, engine: &dyn Engine) -> Summary {
        let engine = engine.name().into();
        Summary { engine, mode: self.mode, passed: Vec::new(), failed: Vec::new(), stopped: None }
    }

    fn run_on(&self, runs: &mut [Run<'_>], progress: &mut dyn FnMut(usize, usize)) {
        let (cases, refusals) = self.cases();
        let total = runs.len() * (cases.len() + refusals.len());
        // Reserve once for all cases: growing a pool moves it, and an engine drops what it prepared for the old
        // address.
        let layout = cases.iter().chain(&refusals).fold(Layout::default(), |all, c| all.union(&c.reserve));
        for (engine, summary) in runs.iter_mut() {
            summary.stopped = engine.reserve(&layout).err().map(|error| error.to_string());
        }
        let check = Check { operands: self.mode.operands(), twice: self.twice };
        let mut on_each =
            |runs: &mut [Run<'_>], check: &dyn Fn(&mut dyn Engine) -> Result<Report, Mismatch>| {
                for (engine, summary) in runs.iter_mut().filter(|(_, summary)| summary.stopped.is_none()) {
                    match check(*engine) {
                        Ok(report) => summary.passed.push(report),
                        Err(mismatch) => summary.fail(*engine, mismatch),
                    }
                }
                progress(runs.iter().map(|(_, summary)| summary.count()).sum(), total);
                runs.iter().any(|(_, summary)| summary.stopped.is_none())
            };
        for batch in cases.chunks(BATCH) {
            for (case, expected) in batch.iter().zip(answers(batch)) {
                if !on_each(runs, &|engine| check_against(engine, case, expected.clone(), check)) {
                    return;
                }
            }
        }
        for case in &refusals {
            if !on_each(runs, &|engine| check_refusal(engine, case).map(|()| refused(case))) {
                return;
            }
        }
    }
}

/// An engine and what was found about it.
type Run<'a> = (&'a mut dyn Engine, &'a mut Summary);

/// The report of an input that was rejected as expected.
fn refused(case: &Case) -> Report {
    Report {
        op: case.op().name(),
        case: format!("refuses {}", case.name),
        precision: case.precision(),
        error: 0.0,
        slot: "",
        tolerance: 0.0,
    }
}

/// Some of the cases of each op that are not too big, spaced evenly by size.
fn quick(cases: Vec<Case>) -> Vec<Case> {
    let mut picked = Vec::new();
    for &op in Op::NAMES {
        let small = |case: &&Case| case.op().name() == op && case.elements() <= QUICK_ELEMENTS && !case.large;
        let mut of_op: Vec<&Case> = cases.iter().filter(small).collect();
        of_op.sort_by_key(|case| case.elements());
        let last = of_op.len().saturating_sub(1);
        let mut places: Vec<usize> = (0..QUICK).map(|i| i * last / (QUICK - 1)).collect();
        places.dedup();
        picked.extend(places.into_iter().filter_map(|i| of_op.get(i)).map(|&case| case.clone()));
    }
    picked
}

/// The oracle's result of each case, computed on all cores.
fn answers(cases: &[Case]) -> Vec<Result<Vec<Vec<f64>>>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(cases.len());
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((i, case)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(i).map(|case| (i, case))
                } {
                    let answer = case.expected();
                    found.lock().expect("no oracle panics").push((i, answer));
                }
            });
        }
    });
    let mut found = found.into_inner().expect("no oracle panics");
    found.sort_by_key(|(i, _)| *i);
    found.into_iter().map(|(_, answer)| answer).collect()
}

/// The results of a [`Suite`]; displayed as a table of op, cases and worst error.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The engine's name.
    pub engine: String,
    /// The number formats it computed in.
    pub mode: Mode,
    /// The cases that passed.
    pub passed: Vec<Report>,
    /// The cases that failed.
    pub failed: Vec<Mismatch>,
    /// Why the remaining cases were not run, if the device failed.
    pub stopped: Option<String>,
}

/// A line of the table.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// The op's name.
    pub op: &'static str,
    /// Cases run.
    pub cases: usize,
    /// Cases failed.
    pub failed: usize,
    /// The passed case that came closest to its tolerance.
    pub worst: Option<&'a Report>,
}

impl Summary {
    /// Whether everything ran and passed.
    pub fn ok(&self) -> bool {
        self.failed.is_empty() && self.stopped.is_none()
    }

    /// Prints the table; panics if anything failed.
    pub fn assert_ok(&self) {
        eprintln!("{self}");
        assert!(self.ok(), "{} cases failed on {}", self.failed.len(), self.engine);
    }

    /// Cases run.
    pub fn count(&self) -> usize {
        self.passed.len() + self.failed.len()
    }

    /// The lines of the table: all ops that had cases, in the order of `Op::NAMES`.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let row = |&op: &&'static str| {
            let failed = self.failed.iter().filter(|mismatch| mismatch.op == op).count();
            let passed = self.passed.iter().filter(|report| report.op == op);
            let cases = failed + passed.clone().count();
            Row { op, cases, failed, worst: passed.max_by(|a, b| a.share().total_cmp(&b.share())) }
        };
        Op::NAMES.iter().map(row).filter(|row| row.cases > 0).collect()
    }

    /// Records a failure and checks whether the engine still works: after a fault a GPU does not respond any more.
    fn fail(&mut self, engine: &mut dyn Engine, mismatch: Mismatch) {
        let refused = matches!(mismatch.fault, Fault::Refused(_) | Fault::NotRefused(_));
        if let (true, Err(error)) = (refused, engine.synchronize())
            && error.is_device_lost()
        {
            self.stopped = Some(format!("{error}; last was {} ({})", mismatch.op, mismatch.case));
        }
        self.failed.push(mismatch);
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = format!("{} {}", self.engine, self.mode.name());
        writeln!(f, "{title:24}{:>6}{:>8}  {:>9}  {:>9}  worst", "cases", "failed", "error", "allowed")?;
        for Row { op, cases, failed, worst } in self.rows() {
            write!(f, "{op:24}{cases:>6}{failed:>8}")?;
            match worst {
                Some(Report { error, tolerance, slot, case, .. }) => {
                    writeln!(f, "  {error:>9.2e}  {tolerance:>9.2e}  {slot}, {case}")?
                }
                None => writeln!(f)?,
            }
        }
        self.failed.iter().try_for_each(|mismatch| writeln!(f, "FAILED {mismatch}"))?;
        match &self.stopped {
            Some(why) => writeln!(f, "STOPPED {why}"),
            None => Ok(()),
        }
    }
}
