//! The result of a verification, as a table and as JSON.

use super::Tolerance;
use super::compare::{Comparison, Worst};
use super::limits::{Basis, Reason};
use super::reference::Damage;
use ironhorse_core::Program;
use serde::Serialize;
use std::fmt;

/// What kind of tensor a row compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RowKind {
    /// A weight in a file.
    Param,
    /// An activation.
    Act,
    /// The gradient of an activation.
    Dact,
    /// The logits.
    Logits,
    /// The loss.
    Loss,
    /// The gradient of a weight.
    Grad,
    /// The losses of the optimizer steps.
    Losses,
    /// A weight after the optimizer steps.
    After,
    /// Inputs and anything else a file holds.
    Other,
}

impl RowKind {
    fn of(name: &str) -> Self {
        match name.split('.').next() {
            Some("param") => Self::Param,
            Some("act") => Self::Act,
            Some("dact") => Self::Dact,
            Some("logits") => Self::Logits,
            Some("loss") => Self::Loss,
            Some("grad") => Self::Grad,
            Some("losses") => Self::Losses,
            Some("after") => Self::After,
            _ => Self::Other,
        }
    }
}

/// One tensor of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `act.h.0.ln_1`, `grad.wte.weight`, `logits`, ...
    pub name: String,
    /// What kind of tensor.
    pub kind: RowKind,
    /// How it compares.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// The reason for its tolerance.
    pub reason: Reason,
    /// The op that completes it.
    pub op: String,
    /// Where in the model that op comes from.
    pub origin: String,
    /// `forward`, `backward`, `update`, or `file` when a file contradicts itself or another.
    pub section: String,
    /// What is wrong with the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Place in the execution order; files come before everything.
    #[serde(skip)]
    order: usize,
}

impl Row {
    pub(super) fn new(name: &str, program: &Program, op: usize, comparison: Comparison) -> Self {
        let node = &program.nodes()[op];
        Self {
            name: name.to_owned(),
            kind: RowKind::of(name),
            comparison,
            reason: Reason::Fixed,
            op: node.op.name().to_owned(),
            origin: program.origin(node).to_owned(),
            section: node.section.name().to_owned(),
            note: None,
            order: op + 1,
        }
    }

    pub(super) fn damaged(damage: Damage) -> Self {
        Self {
            kind: RowKind::of(&damage.tensor),
            comparison: damage.comparison,
            reason: Reason::Bits,
            op: "file".into(),
            origin: damage.tensor.trim_start_matches("param.").to_owned(),
            section: "file".into(),
            note: Some(damage.what),
            name: damage.tensor,
            order: 0,
        }
    }

    /// The tolerance of such a tensor after one step in f32.
    fn base(&self, tolerance: Tolerance) -> f64 {
        match self.kind {
            RowKind::Loss | RowKind::Losses => tolerance.loss,
            _ => tolerance.tensor,
        }
    }

    /// Marks this answer as damaged in the file: the engine is not at fault.
    pub(super) fn blame_file(&mut self, what: String) {
        self.section = "file".into();
        self.note = Some(what);
        self.comparison.pass = false;
        self.order = 0;
    }
}

/// The first thing that is wrong, in execution order.
#[derive(Clone, Debug, Serialize)]
pub struct FirstWrong {
    /// The op that made it, or `file`.
    pub op: String,
    /// Where in the model it comes from.
    pub origin: String,
    /// `forward`, `backward`, `update` or `file`.
    pub section: String,
    /// The tensor.
    pub tensor: String,
    /// The first wrong element; absent when a checksum tells only that something changed.
    pub index: Option<Vec<usize>>,
    /// The reference's value there.
    pub expected: Option<f32>,
    /// The engine's value there.
    pub got: Option<f32>,
    /// What is wrong with the file, or why nothing need be wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What to think of other experts than those of the answers, where numbers are rounded.
const NEAR_TIE: &str = "note: where two experts are nearly equal rounding may decide between them, and everything after that differs; \
    --dtype f32 tells whether it did, and a key of fewer tokens or layers has fewer such places (docs/verify.md)";

/// The result of a verification.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `pass` or `fail`.
    pub verdict: &'static str,
    /// The first thing that is wrong.
    pub first_wrong: Option<FirstWrong>,
    /// Every tensor compared: activations in execution order, then parameters in model order.
    pub tensors: Vec<Row>,
    /// The engine's loss at each optimizer step.
    pub losses: Vec<f32>,
    /// Where the tolerances come from.
    pub tolerances: Basis,
    /// The tolerances of one step in f32.
    #[serde(skip)]
    tolerance: Tolerance,
}

impl Report {
    /// The report of these comparisons; [`Report::add_damage`] then judges.
    pub(super) fn new(
        mut tensors: Vec<Row>,
        losses: Vec<f32>,
        tolerances: Basis,
        tolerance: Tolerance,
    ) -> Self {
        for row in &mut tensors {
            row.reason = Reason::of(tolerances, &row.name, row.comparison.tolerance, row.base(tolerance));
        }
        Self { verdict: "", first_wrong: None, tensors, losses, tolerances, tolerance }
    }

    /// Adds the tensors that are damaged or contradict another file, and updates the verdict.
    pub fn add_damage(&mut self, damage: Vec<Damage>) {
        for damage in damage {
            // An answer has been compared already, and its row shows the element.
            match self.tensors.iter_mut().find(|row| row.name == damage.tensor) {
                Some(row) => row.blame_file(damage.what),
                None => self.tensors.push(Row::damaged(damage)),
            }
        }
        // A file that contradicts itself comes first; then the op that ran first.
        let first = self.tensors.iter().filter(|row| !row.comparison.pass).min_by_key(|row| row.order);
        let rounds = self.tolerances != Basis::Fixed;
        self.first_wrong = first.map(|row| {
            let is_choice = row.kind == RowKind::Act && row.name.ends_with(".experts");
            let element = row.comparison.first_wrong.as_ref();
            FirstWrong {
                op: row.op.clone(),
                origin: row.origin.clone(),
                section: row.section.clone(),
                tensor: row.name.clone(),
                index: element.map(|e| e.index.clone()),
                expected: element.map(|e| e.expected),
                got: element.map(|e| e.got),
                note: row.note.clone().or_else(|| (rounds && is_choice).then(|| NEAR_TIE.to_owned())),
            }
        });
        let agree = self.first_wrong.is_none() && !self.tensors.is_empty();
        self.verdict = if agree { "pass" } else { "fail" };
    }

    /// Whether everything agreed (and something was compared).
    pub fn passed(&self) -> bool {
        self.verdict == "pass"
    }

    /// The largest relative error and its tensor.
    pub fn worst(&self) -> Option<&Row> {
        self.tensors.iter().max_by(|a, b| a.comparison.rel_error.total_cmp(&b.comparison.rel_error))
    }

    /// The tensor that comes closest to its tolerance, or is furthest beyond it.
    pub fn closest(&self) -> Option<&Row> {
        self.tensors.iter().max_by(|a, b| a.comparison.ratio.total_cmp(&b.comparison.ratio))
    }
}

impl Report {
    /// Explains the words of the column "because" that occur.
    fn reasons(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for reason in Reason::ALL {
            if self.tensors.iter().any(|row| row.reason == reason) {
                write!(f, "\nallowed, {}: {}", reason.word(), reason.text(self.tolerance))?;
            }
        }
        Ok(())
    }

    /// The verdict, and what is wrong first: the last lines of the table.
    pub fn verdict(&self) -> impl fmt::Display {
        Verdict(self)
    }
}

struct Verdict<'a>(&'a Report);

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.tensors.iter().map(|row| row.name.len()).max().unwrap_or(6).max(6);
        writeln!(
            f,
            "{:width$}  {:>18}  {:>9}  {:>8}  {:<9}  {:<52}  verdict",
            "tensor", "shape", "rel error", "allowed", "because", "worst element"
        )?;
        for row in &self.tensors {
            let c = &row.comparison;
            let worst = c.worst.as_ref().map(element_text).or_else(|| row.note.clone()).unwrap_or_default();
            let verdict = if c.pass { "ok" } else { "WRONG" };
            let (shape, because) = (format!("{:?}", c.shape), row.reason.word());
            writeln!(
                f,
                "{:width$}  {shape:>18}  {:>9.2e}  {:>8.1e}  {because:<9}  {worst:<52}  {verdict}",
                row.name, c.rel_error, c.tolerance
            )?;
        }
        write!(f, "\n{}", self.verdict())
    }
}

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        let bad = report.tensors.iter().filter(|row| !row.comparison.pass).count();
        match &report.first_wrong {
            None if report.tensors.is_empty() => write!(f, "FAIL: nothing was compared"),
            None => {
                write!(f, "PASS: {} tensors agree", report.tensors.len())?;
                if let Some(row) = report.worst() {
                    let Row { comparison: c, reason, name, .. } = row;
                    let (error, allowed, because) = (c.rel_error, c.tolerance, reason.word());
                    write!(
                        f,
                        "; largest relative error {error:.2e} in {name}, allowed {allowed:.1e} ({because})"
                    )?;
                }
                if let Some(row) = report.closest() {
                    let (ratio, name) = (100.0 * row.comparison.ratio, &row.name);
                    write!(f, "; at most {ratio:.0} % of what is allowed used, in {name}")?;
                }
                report.reasons(f)
            }
            Some(first) => {
                writeln!(f, "FAIL: {bad} of {} tensors are wrong", report.tensors.len())?;
                let FirstWrong { op, origin, section, tensor, .. } = first;
                if op == "file" {
                    write!(f, "first wrong: {tensor} in the file")?;
                } else {
                    write!(f, "first wrong op: {op} at {origin} ({section}), tensor {tensor}")?;
                }
                if let (Some(index), Some(expected), Some(got)) = (&first.index, first.expected, first.got) {
                    write!(f, "\nfirst wrong element: {index:?} expected {expected:e}, got {got:e}")?;
                }
                if let Some(note) = &first.note {
                    write!(f, "\n{note}")?;
                }
                report.reasons(f)
            }
        }
    }
}

fn element_text(worst: &Worst) -> String {
    let Worst { index, expected, got, ulps } = worst;
    let ulps = if *ulps == u64::MAX { "NaN".into() } else { format!("{ulps} ulp") };
    format!("{index:?} {expected:e} got {got:e} ({ulps})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_choice_of_experts_is_explained_where_numbers_are_rounded() {
        let row = |name: &str| Row {
            name: name.to_owned(),
            kind: RowKind::of(name),
            comparison: Comparison::unknown(),
            reason: Reason::Fixed,
            op: "router_fwd".into(),
            origin: "layers.1.router".into(),
            section: "forward".into(),
            note: None,
            order: 1,
        };
        let text = |name: &str, basis| {
            let tolerance = Tolerance { tensor: 1e-5, loss: 1e-6 };
            let mut report = Report::new(vec![row(name)], Vec::new(), basis, tolerance);
            report.add_damage(Vec::new());
            report.verdict().to_string()
        };
        assert!(text("act.layers.1.experts", Basis::PyTorch).contains("nearly equal"));
        assert!(
            !text("act.layers.1.experts", Basis::Fixed).contains("nearly equal"),
            "f32 decides as PyTorch does"
        );
        assert!(!text("act.layers.1.moe", Basis::PyTorch).contains("nearly equal"));
    }
}
