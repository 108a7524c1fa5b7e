//! The result of running in lockstep, as a table and as JSON.

use crate::verify::compare::{Comparison, Worst};
use ironhorse_core::Program;
use serde::Serialize;
use std::fmt;

/// All ops of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct KindRow {
    /// The op's name.
    pub op: &'static str,
    /// How often it ran.
    pub count: usize,
    /// How many of its results are wrong.
    pub wrong: usize,
    /// The error that came closest to its tolerance, ‖got − want‖ / ‖want‖.
    pub worst: f64,
    /// The tolerance of that result.
    pub allowed: f64,
    /// `worst / allowed`.
    pub ratio: f64,
    /// The argument and the part of the model of that result.
    pub place: String,
}

/// One result on which the engines disagree.
#[derive(Clone, Debug, Serialize)]
pub struct Disagreement {
    /// The op's place in the program.
    pub index: usize,
    /// Which pass over the program, from 0.
    pub pass: u32,
    /// The op's name.
    pub op: &'static str,
    /// Where in the model it comes from.
    pub origin: String,
    /// `forward`, `backward` or `update`.
    pub section: &'static str,
    /// The argument it wrote.
    pub argument: &'static str,
    /// ‖got − want‖ / ‖want‖.
    pub rel_error: f64,
    /// The tolerance.
    pub allowed: f64,
    /// The first wrong element.
    pub element: Option<Worst>,
}

/// The result of running two engines in lockstep.
#[derive(Clone, Debug, Serialize)]
pub struct LockstepReport {
    /// `pass` or `fail`.
    pub verdict: &'static str,
    /// The engine that is checked.
    pub engine: String,
    /// The engine it is compared with.
    pub other: String,
    /// The first op on which they disagree.
    pub first_wrong: Option<Disagreement>,
    /// All results on which they disagree.
    pub wrong: usize,
    /// All results compared.
    pub compared: usize,
    /// By kind of op, in the order of their first use.
    pub kinds: Vec<KindRow>,
}

impl LockstepReport {
    pub(super) fn new(engine: &str, other: &str) -> Self {
        let (engine, other) = (engine.to_owned(), other.to_owned());
        Self { verdict: "fail", engine, other, first_wrong: None, wrong: 0, compared: 0, kinds: Vec::new() }
    }

    pub(super) fn add(
        &mut self,
        program: &Program,
        (pass, index): (u32, usize),
        argument: &'static str,
        c: Comparison,
    ) {
        let node = &program.nodes()[index];
        let origin = program.origin(node);
        self.compared += 1;
        let kind = self.kind(node.op.name());
        // NaN counts as the largest
        if c.ratio.total_cmp(&kind.ratio).is_gt() || kind.place.is_empty() {
            (kind.worst, kind.allowed, kind.ratio) = (c.rel_error, c.tolerance, c.ratio);
            kind.place = format!("`{argument}` at {origin}");
        }
        if c.pass {
            return;
        }
        kind.wrong += 1;
        self.wrong += 1;
        if self.first_wrong.is_none() {
            self.first_wrong = Some(Disagreement {
                index,
                pass,
                op: node.op.name(),
                origin: origin.to_owned(),
                section: node.section.name(),
                argument,
                rel_error: c.rel_error,
                allowed: c.tolerance,
                element: c.first_wrong,
            });
        }
    }

    /// One more op has run.
    pub(super) fn count(&mut self, program: &Program, index: usize) {
        self.kind(program.nodes()[index].op.name()).count += 1;
    }

    pub(super) fn judge(&mut self) {
        self.verdict = if self.wrong == 0 && self.compared > 0 { "pass" } else { "fail" };
    }

    fn kind(&mut self, op: &'static str) -> &mut KindRow {
        let at = self.kinds.iter().position(|kind| kind.op == op).unwrap_or_else(|| {
            let place = String::new();
            self.kinds.push(KindRow { op, count: 0, wrong: 0, worst: 0.0, allowed: 0.0, ratio: 0.0, place });
            self.kinds.len() - 1
        });
        &mut self.kinds[at]
    }

    /// Whether the engines agreed on everything (and something was compared).
    pub fn passed(&self) -> bool {
        self.verdict == "pass"
    }

    /// The verdict, and what is wrong first: the last lines of the table.
    pub fn verdict(&self) -> impl fmt::Display {
        Verdict(self)
    }
}

struct Verdict<'a>(&'a LockstepReport);

impl fmt::Display for LockstepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (op, count, error, allowed, place) = ("op", "count", "worst error", "allowed", "where");
        writeln!(f, "{op:<24}  {count:>6}  {error:>11}  {allowed:>8}  verdict  {place}")?;
        for kind in &self.kinds {
            let KindRow { op, count, worst, allowed, place, .. } = kind;
            let verdict = if kind.wrong == 0 { "ok" } else { "WRONG" };
            writeln!(f, "{op:<24}  {count:>6}  {worst:>11.2e}  {allowed:>8.1e}  {verdict:<7}  {place}")?;
        }
        write!(f, "\n{}", self.verdict())
    }
}

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LockstepReport { engine, other, wrong, compared, first_wrong, .. } = self.0;
        let Some(first) = first_wrong else {
            return match compared {
                0 => write!(f, "FAIL: nothing was compared"),
                _ => write!(f, "PASS: {engine} agrees with {other} in {compared} results"),
            };
        };
        writeln!(f, "FAIL: {engine} disagrees with {other} in {wrong} of {compared} results")?;
        let Disagreement { index, pass, op, origin, section, argument, rel_error, allowed, element } = first;
        write!(f, "first wrong op: {op} at {origin} ({section}, op {index}, pass {pass}), `{argument}`: ")?;
        write!(f, "relative error {rel_error:.2e}, allowed {allowed:.1e}")?;
        match element {
            Some(Worst { index, expected, got, .. }) => {
                write!(f, "\nfirst wrong element: {index:?} expected {expected:e}, got {got:e}")
            }
            None => Ok(()),
        }
    }
}
