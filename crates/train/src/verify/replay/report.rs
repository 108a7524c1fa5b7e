//! The conclusion from the replays of a bad step.

use super::super::diagnose::NonFinite;
use super::{Rerun, Role};
use crate::format::black_box::BadStep;
use serde::Serialize;
use std::fmt;

/// The cause of a bad step, as far as its replays tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Not finite in f64 either: a NaN or infinite weight, or unbounded values.
    DataOrWeights,
    /// Finite in f64, not in the precision of the run.
    Overflow,
    /// It repeats; which of the two it is was not determined.
    DataOrNumerics,
    /// Engines disagree in the same precision.
    Engine,
    /// It did not repeat on the same kind of device in the same precision.
    HardwareOrRace,
    /// Finite wherever it was run, but the device of the run was not available.
    Unknown,
}

/// All runs of a bad step, and the conclusion.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// What was known about the step.
    pub step: BadStep,
    /// The results of all runs.
    pub reruns: Vec<Rerun>,
    /// The runs that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// Whether the step was finite everywhere.
    pub finite: bool,
    /// The cause.
    pub cause: Cause,
    /// The conclusion in words.
    pub verdict: String,
}

impl ReplayReport {
    /// Draws the conclusion.
    pub fn new(step: BadStep, reruns: Vec<Rerun>, left_out: Vec<(String, String)>) -> Self {
        let (cause, verdict) = judge(&step, &reruns);
        let finite = reruns.iter().all(|rerun| rerun.finite);
        Self { step, reruns, left_out, finite, cause, verdict }
    }
}

fn judge(step: &BadStep, reruns: &[Rerun]) -> (Cause, String) {
    let of = |role: Role| reruns.iter().find(|rerun| rerun.role == role);
    let (same, in_f64) = (of(Role::Same), of(Role::F64));
    let on_cpu = of(Role::F32).or(same.filter(|same| same.engine == "cpu"));
    let ran = format!("{} in {}", step.device, step.dtype);
    let start = match same {
        Some(same) if same.finite => return did_not_repeat(step, &ran, reruns),
        Some(_) => format!("it repeats on {ran}, so it is the data or the numerics, not the hardware"),
        None if reruns.iter().all(|rerun| rerun.finite) => {
            return (Cause::Unknown, not_here(step, &ran, reruns));
        }
        None => format!("it is not finite here either, though {ran} was not run"),
    };
    if let Some(NonFinite::Weight { name, .. }) =
        reruns.iter().filter(|rerun| rerun.role != Role::Other).find_map(|rerun| rerun.found.as_ref())
    {
        let text = format!(
            "{start}: the weights are not finite before the step (`{name}`); resume from an earlier checkpoint"
        );
        return (Cause::DataOrWeights, text);
    }
    match (on_cpu.map(|run| run.finite), in_f64.map(|run| run.finite)) {
        (_, Some(false)) => {
            let text =
                "not finite in f64 either, so no precision would help: look at the weights and at the data";
            (Cause::DataOrWeights, format!("{start}; {text}"))
        }
        (Some(false), Some(true)) => {
            (Cause::Overflow, format!("{start}; finite in f64, so the numbers go beyond what f32 holds"))
        }
        (Some(true), _) if step.dtype != "f32" => {
            let also = if in_f64.is_some() { " and in f64" } else { "" };
            let text =
                format!("finite in f32 on the CPU{also}, so the numbers go beyond what {} holds", step.dtype);
            (Cause::Overflow, format!("{start}; {text}"))
        }
        (Some(true), _) => {
            let text = format!(
                "finite in the same precision on the CPU: the engines disagree; ironhorse verify --lockstep --device {} finds \
                 the op",
                step.device.split(':').next().unwrap_or_default()
            );
            (Cause::Engine, format!("{start}; {text}"))
        }
        (_, Some(true)) => (Cause::Overflow, format!("{start}; finite in f64, so the precision is at fault")),
        _ => (Cause::DataOrNumerics, format!("{start}; a run in f64 (without --no-oracle) would tell which")),
    }
}

fn did_not_repeat(step: &BadStep, ran: &str, reruns: &[Rerun]) -> (Cause, String) {
    let mut text = format!(
        "it did not repeat on {ran}: the same weights and tokens are finite there, which points to hardware (memory, heat, \
         power) or a race"
    );
    if !step.found.is_empty() {
        text += "; right after it happened a second run was not finite either, so the fault was there then and is gone now";
    }
    if let Some(other) = reruns.iter().find(|rerun| !rerun.finite) {
        text += &format!("; {} in {} is not finite, though", other.engine, other.dtype);
    }
    (Cause::HardwareOrRace, text)
}

fn not_here(step: &BadStep, ran: &str, reruns: &[Rerun]) -> String {
    let places: Vec<String> = reruns.iter().map(|run| format!("{} in {}", run.engine, run.dtype)).collect();
    let likely = match (step.looked, step.found.is_empty()) {
        (false, _) => "",
        (true, true) => {
            "; right after it happened a second run was finite, which points to hardware or a race"
        }
        (true, false) => {
            "; right after it happened a second run was not finite, which points to an overflow of that precision"
        }
    };
    format!(
        "finite wherever it was run ({}), so weights and data are not at fault; it ran on {ran}, which was not run here, so \
         whether it repeats there (overflow) or not (hardware) cannot be told{likely}",
        places.join(", ")
    )
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadStep { loss, norm, device, dtype, accumulate, .. } = &self.step;
        writeln!(
            f,
            "{:<14} {:<6} {:>11} {:>10} {:>10}  first not finite",
            "ran on", "dtype", "micro-steps", "loss", "norm"
        )?;
        let found = match (self.step.looked, self.step.found.as_str()) {
            (false, _) => "not looked for",
            (true, "") => "finite in an immediate second run",
            (true, found) => found,
        };
        let (all, run) = (format!("all {accumulate}"), format!("{device}, then"));
        let (loss, norm) = (short(loss), short(norm));
        writeln!(f, "{run:<14} {dtype:<6} {all:>11} {loss:>10} {norm:>10}  {found}")?;
        for run in &self.reruns {
            let (first, after) = run.micro_steps;
            let which = match after - first {
                1 if *accumulate > 1 => format!("number {first}"),
                count => format!("all {count}"),
            };
            let found = match (&run.found, run.finite) {
                (Some(found), _) => found.to_string(),
                (None, true) => "all is finite".into(),
                (None, false) if *accumulate > 1 => {
                    "each op by itself is finite: the sum over the micro-steps is not".into()
                }
                (None, false) => "each op run by itself is finite".into(),
            };
            let (loss, norm) = (short(&run.loss), short(&run.norm));
            let Rerun { engine, dtype, .. } = run;
            writeln!(f, "{engine:<14} {dtype:<6} {which:>11} {loss:>10} {norm:>10}  {found}")?;
        }
        for (place, why) in &self.left_out {
            writeln!(f, "{place:<21} not run: {why}")?;
        }
        write!(f, "{}", self.verdict)
    }
}

/// A number for a narrow column. An f64 result outside the range of f32 was read as the largest f32.
fn short(number: &str) -> String {
    match number.parse::<f32>() {
        Ok(value) if value.is_finite() && value.abs() == f32::MAX => ">3.4e38".into(),
        Ok(value) if value.is_finite() && !(1e-3..1e5).contains(&value.abs()) && value != 0.0 => {
            format!("{value:.3e}")
        }
        Ok(value) if value.is_finite() => format!("{value:.5}"),
        _ => number.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Recompute;
    use ironhorse_core::Scalars;

    fn step(device: &str, dtype: &str, found: &str) -> BadStep {
        BadStep {
            step: 7,
            loss: "NaN".into(),
            norm: "inf".into(),
            looked: true,
            found: found.into(),
            micro_step: None,
            device: device.into(),
            dtype: dtype.into(),
            recompute: Recompute::None,
            head_chunks: 1,
            dropout: 0.0,
            preference: None,
            batch: 2,
            seq: 3,
            accumulate: 1,
            samples: (14, 16),
            scalars: Scalars::default(),
            weights: "weights".into(),
            weights_crc32: 5,
        }
    }

    fn rerun(role: Role, engine: &str, dtype: &str, finite: bool) -> Rerun {
        let (loss, norm) = if finite { ("3", "1") } else { ("NaN", "NaN") };
        Rerun {
            role,
            engine: engine.into(),
            dtype: dtype.into(),
            micro_steps: (0, 1),
            finite,
            loss: loss.into(),
            norm: norm.into(),
            found: None,
            seconds: 0.0,
        }
    }

    #[test]
    fn numbers_fit_their_columns() {
        let long = f32::MAX.to_string();
        let numbers = ["NaN", "-inf", "0", "5.5349646", "0.00012", "123456.7", &long];
        let want = ["NaN", "-inf", "0.00000", "5.53496", "1.200e-4", "1.235e5", ">3.4e38"];
        assert_eq!(numbers.map(short), want);
    }

    #[test]
    fn every_outcome_has_its_cause() {
        let cuda = |finite| rerun(Role::Same, "cuda:0", "bf16", finite);
        let f32 = |finite| rerun(Role::F32, "cpu", "f32", finite);
        let f64 = |finite| rerun(Role::F64, "oracle", "f64", finite);
        let cpu = |finite| rerun(Role::Same, "cpu", "f32", finite);
        let bf16 = step("cuda:0", "bf16", "");
        for (step, reruns, cause, says) in [
            (&bf16, vec![cuda(false), f32(true), f64(true)], Cause::Overflow, "beyond what bf16 holds"),
            (&bf16, vec![cuda(false), f32(false), f64(true)], Cause::Overflow, "beyond what f32 holds"),
            (
                &bf16,
                vec![cuda(false), f32(false), f64(false)],
                Cause::DataOrWeights,
                "not finite in f64 either",
            ),
            (&bf16, vec![cuda(false), f32(false)], Cause::DataOrNumerics, "it repeats on cuda:0 in bf16"),
            (&bf16, vec![cuda(true), f32(true), f64(true)], Cause::HardwareOrRace, "did not repeat"),
            (&bf16, vec![f32(true), f64(true)], Cause::Unknown, "cannot be told"),
            (&bf16, vec![f32(false), f64(false)], Cause::DataOrWeights, "was not run"),
            (&step("cpu", "f32", ""), vec![cpu(false), f64(true)], Cause::Overflow, "beyond what f32 holds"),
            (&step("cpu", "f32", "x"), vec![cpu(true), f64(true)], Cause::HardwareOrRace, "is gone now"),
            (
                &step("cuda:0", "f32", ""),
                vec![rerun(Role::Same, "cuda:0", "f32", false), f32(true), f64(true)],
                Cause::Engine,
                "--lockstep --device cuda finds",
            ),
        ] {
            let report =
                ReplayReport::new(step.clone(), reruns, vec![("oracle in f64".into(), "--no-oracle".into())]);
            assert_eq!(report.cause, cause, "{report}");
            assert!(report.verdict.contains(says), "{report}");
            assert!(report.to_string().contains("not run: --no-oracle"), "{report}");
        }
        let weight = NonFinite::Weight {
            name: "wte".into(),
            pool: "params",
            element: vec![0, 1],
            value: "NaN".into(),
        };
        let report = ReplayReport::new(bf16, vec![Rerun { found: Some(weight), ..cuda(false) }], vec![]);
        assert_eq!(report.cause, Cause::DataOrWeights);
        assert!(report.verdict.contains("`wte`"), "{report}");
    }
}
