//! Two training logs side by side: how far apart their losses are, and since when.

use crate::picture::{Series, Style, smoothed};
use crate::run::folder::METRICS;
use crate::run::metrics::{Metrics, read_metrics};
use crate::{Error, Result};
use serde::Serialize;
use std::fs;
use std::path::Path;

/// The losses of a run, by step, tokens and time.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Training losses.
    pub train: Vec<Reading>,
    /// Validation losses.
    pub val: Vec<Reading>,
}

/// A loss, and how far the run was when it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Steps.
    pub step: f64,
    /// Tokens trained on, as far as the log says them.
    pub tokens: f64,
    /// Seconds of training, without validation, samples and saves, as far as the log says them.
    pub seconds: f64,
    /// In nats per token.
    pub loss: f64,
}

/// What puts two logs side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// The same number of steps.
    Steps,
    /// The same number of tokens.
    Tokens,
    /// The same time.
    Seconds,
}

/// Which losses are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Losses of validation data.
    Validation,
    /// Losses of the training steps, each the mean of its neighbourhood.
    Training,
}

/// Both losses at one place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Steps, tokens or seconds.
    pub at: f64,
    /// The run's loss.
    pub run: f64,
    /// The reference's, between its two nearest readings.
    pub reference: f64,
    /// By how much the run's is higher.
    pub difference: f64,
}

/// How the run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Lower than the reference by more than the tolerance.
    Ahead,
    /// Within the tolerance.
    Equal,
    /// Higher than the reference by more than the tolerance, or NaN.
    Behind,
}

/// What a comparison found.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// What puts the logs side by side.
    pub by: Axis,
    /// Which losses.
    pub losses: Kind,
    /// Every reading of the run that the reference covers.
    pub rows: Vec<Row>,
    /// The difference that still counts as equal, in nats.
    pub tolerance: f64,
    /// Whether the last row is below the reference, equal to it or above it.
    pub verdict: Verdict,
    /// The place from which on all rows have the verdict of the last one.
    pub since: f64,
    /// The place where the reference had the run's last loss; `None` if it never had it.
    pub reference_had_it_at: Option<f64>,
    /// The reference's lowest loss, and its place.
    pub reference_best: (f64, f64),
    /// The place where the run was as low for the first time; `None` if it never was.
    pub run_had_it_at: Option<f64>,
}

impl Log {
    /// Reads a run folder, a `metrics.jsonl` (every line, or only some of them) or a `main.log` of llm.c.
    pub fn open(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join(METRICS) } else { path.to_owned() };
        if path.is_dir() && !file.is_file() {
            return Err(Error::field(path, "folder", "without metrics.jsonl", "a run folder"));
        }
        let log = match file.extension().is_some_and(|end| end == "log") {
            true => Self::of_llmc(&file)?,
            false => Self::of_metrics(&read_metrics(&file)?),
        };
        if log.train.is_empty() && log.val.is_empty() {
            return Err(Error::field(&file, "log", "without a loss", "at least one step"));
        }
        Ok(log)
    }

    /// The log of a run. Steps that are left out count as the next one that is there.
    pub fn of_metrics(all: &[Metrics]) -> Self {
        let (mut log, mut tokens, mut seconds, mut before) = (Self::default(), 0.0, 0.0, 0.0);
        let mut last_tokens = None;
        for metrics in all {
            let (step, time) = (metrics.step as f64, f64::from(metrics.ms) / 1e3);
            let steps = step - before;
            let of_step = match metrics.tokens {
                Some(tokens) => tokens as f64,
                None => (f64::from(metrics.tokens_per_s) * time).round(), // of a version that did not log them
            };
            // the step before is known, those that are left out are not
            tokens += last_tokens.map_or(steps * of_step, |last| last + (steps - 1.0) * of_step);
            last_tokens = Some(of_step);
            seconds += steps * time;
            before = step;
            let reading = |loss: f32| Reading { step, tokens, seconds, loss: f64::from(loss) };
            log.train.push(reading(metrics.loss));
            log.val.extend(metrics.val_loss.map(reading));
            log.val.extend(metrics.ended.map(|ended| Reading {
                step: step + 1.0,
                tokens: tokens + of_step,
                seconds: seconds + time,
                loss: f64::from(ended.val_loss),
            }));
        }
        log
    }

    /// Lines such as `s:250 tel:6.4616` (validation) and `s:250 trl:6.5 lr:0.0002 norm:1.1`.
    fn of_llmc(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|error| Error::io(path, "read", error))?;
        let mut log = Self::default();
        for (at, line) in text.lines().enumerate() {
            let field = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name));
            let number = |name: &str| field(name).map(str::parse::<f64>);
            let bad = |_| {
                Error::field(
                    path,
                    format!("line {}", at + 1),
                    line,
                    "a line of llm.c, such as s:250 tel:6.4616",
                )
            };
            let Some(step) = number("s:").transpose().map_err(bad)? else { continue };
            let reading = |loss| Reading { step, tokens: f64::NAN, seconds: f64::NAN, loss };
            log.train.extend(number("trl:").transpose().map_err(bad)?.map(reading));
            log.val.extend(number("tel:").transpose().map_err(bad)?.map(reading));
        }
        Ok(log)
    }

    /// The losses as a curve.
    fn points(&self, kind: Kind, by: Axis) -> Vec<(f64, f64)> {
        let readings = if kind == Kind::Validation { &self.val } else { &self.train };
        let at = |reading: &Reading| match by {
            Axis::Steps => reading.step,
            Axis::Tokens => reading.tokens,
            Axis::Seconds => reading.seconds,
        };
        let points: Vec<_> = readings.iter().map(|reading| (at(reading), reading.loss)).collect();
        let finite = points.iter().all(|point| point.1.is_finite());
        if kind == Kind::Training && finite { smoothed(&points) } else { points }
    }

    /// The curve for a picture.
    pub fn series(&self, name: &str, kind: Kind, by: Axis) -> Series {
        let style = if kind == Kind::Validation { Style::Dots } else { Style::Line };
        Series { name: name.into(), points: self.points(kind, by), style }
    }
}

/// Puts a run beside a reference. Validation losses are compared where both logs have them, unless `kind` says otherwise.
pub fn compare(
    run: &Log,
    reference: &Log,
    by: Axis,
    kind: Option<Kind>,
    tolerance: f64,
) -> Result<Comparison> {
    let both_validate = !run.val.is_empty() && !reference.val.is_empty();
    let losses = kind.unwrap_or(if both_validate { Kind::Validation } else { Kind::Training });
    let ours = run.points(losses, by);
    let mut theirs = reference.points(losses, by);
    theirs.retain(|point| point.0.is_finite() && point.1.is_finite());
    let rows: Vec<Row> = ours.iter().filter_map(|&(at, loss)| Row::new(at, loss, &theirs)).collect();
    let (Some(last), Some(best)) = (rows.last(), theirs.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)))
    else {
        let what = format!("comparison by {}", by.unit());
        let found = "logs without a common stretch";
        return Err(Error::input(
            what,
            found,
            "a reference that was measured where the run was, with the same kind of loss",
        ));
    };
    let verdict = last.verdict(tolerance);
    let streak = rows.iter().rev().take_while(|row| row.verdict(tolerance) == verdict).count();
    let first_at_most = |points: &[(f64, f64)], loss: f64| points.iter().find(|p| p.1 <= loss).map(|p| p.0);
    Ok(Comparison {
        by,
        losses,
        tolerance,
        verdict,
        since: rows[rows.len() - streak].at,
        reference_had_it_at: first_at_most(&theirs, last.run),
        reference_best: best,
        run_had_it_at: first_at_most(&ours, best.1),
        rows,
    })
}

impl Row {
    /// `None` where the reference has no reading before or none after.
    fn new(at: f64, run: f64, reference: &[(f64, f64)]) -> Option<Self> {
        // Seconds are sums: equal ones may differ in their last bits.
        let slack = 1e-9 * at.abs();
        let next = reference.iter().position(|point| point.0 >= at - slack)?;
        let (x1, y1) = reference[next];
        let reference = match next.checked_sub(1).map(|before| reference[before]) {
            _ if x1 <= at + slack => y1,
            Some((x0, y0)) => y0 + (y1 - y0) * (at - x0) / (x1 - x0),
            None => return None,
        };
        Some(Self { at, run, reference, difference: run - reference })
    }

    fn verdict(&self, tolerance: f64) -> Verdict {
        match self.difference {
            less if less < -tolerance => Verdict::Ahead,
            little if little <= tolerance => Verdict::Equal,
            _ => Verdict::Behind, // also NaN
        }
    }
}

impl Axis {
    /// One of it.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Steps => "step",
            Self::Tokens => "tokens",
            Self::Seconds => "seconds",
        }
    }
}

impl Comparison {
    /// The last row.
    pub fn last(&self) -> &Row {
        &self.rows[self.rows.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of `steps` steps with a validation every 10.
    fn log(steps: u64, loss: impl Fn(f64) -> f64) -> Log {
        let metrics = |step: u64| Metrics {
            step,
            loss: loss(step as f64) as f32,
            val_loss: step.is_multiple_of(10).then_some(loss(step as f64) as f32),
            ms: 20.0,
            tokens_per_s: 1e4,
            ..Metrics::default()
        };
        Log::of_metrics(&(0..=steps).map(metrics).collect::<Vec<_>>())
    }

    fn by_steps(run: &Log, reference: &Log) -> Comparison {
        compare(run, reference, Axis::Steps, None, 0.02).unwrap()
    }

    #[test]
    fn a_run_equals_itself() {
        let run = log(100, |step| 5.0 - step / 50.0);
        let found = by_steps(&run, &run);
        assert_eq!((found.verdict, found.losses, found.rows.len()), (Verdict::Equal, Kind::Validation, 11));
        assert!(found.rows.iter().all(|row| row.difference == 0.0));
        assert_eq!((found.since, found.run_had_it_at), (0.0, Some(100.0)));
    }

    #[test]
    fn says_how_far_behind_and_since_when() {
        let reference = log(200, |step| 5.0 - step / 50.0);
        let run = log(100, |step| if step < 55.0 { 5.0 - step / 50.0 } else { 3.95 });
        let found = by_steps(&run, &reference);
        assert_eq!((found.verdict, found.since, found.run_had_it_at), (Verdict::Behind, 60.0, None));
        assert!((found.last().difference - 0.95).abs() < 1e-6, "{:?}", found.last());
        assert_eq!(found.reference_had_it_at, Some(60.0)); // 3.8, the first at most 3.95
        // the other way round
        let found = by_steps(&reference, &run);
        assert_eq!((found.verdict, found.since, found.rows.len()), (Verdict::Ahead, 60.0, 11));
        assert_eq!(found.run_had_it_at, Some(60.0));
    }

    #[test]
    fn nan_is_behind() {
        let reference = log(100, |step| 5.0 - step / 50.0);
        let run = log(50, |step| if step < 30.0 { 5.0 - step / 50.0 } else { f64::NAN });
        let found = by_steps(&run, &reference);
        assert_eq!((found.verdict, found.since), (Verdict::Behind, 30.0));
    }

    #[test]
    fn readings_lie_between_those_of_a_thinned_reference() {
        let run = log(100, |step| 5.0 - step / 50.0);
        let whole: Vec<Metrics> = (0..=100)
            .map(|step| Metrics {
                step,
                loss: 1.0,
                val_loss: Some(5.0 - step as f32 / 50.0),
                ms: 20.0,
                tokens_per_s: 1e4,
                ..Metrics::default()
            })
            .collect();
        let thin: Vec<Metrics> = whole.iter().filter(|m| m.step % 25 == 0).cloned().collect();
        for by in [Axis::Steps, Axis::Tokens, Axis::Seconds] {
            let found = compare(&run, &Log::of_metrics(&thin), by, None, 1e-3).unwrap();
            assert_eq!((found.verdict, found.rows.len()), (Verdict::Equal, 11), "{by:?}");
        }
        let log = Log::of_metrics(&thin);
        assert_eq!((log.val[4].tokens, log.val[4].step), (100.0 * 200.0, 100.0));
    }

    #[test]
    fn without_a_common_stretch_it_is_an_error() {
        let shift = |log: Log| {
            let later = |r: &Reading| Reading { step: r.step + 500.0, ..*r };
            Log { train: log.train.iter().map(later).collect(), val: log.val.iter().map(later).collect() }
        };
        let run = log(100, |_| 3.0);
        let text = compare(&run, &shift(run.clone()), Axis::Steps, None, 0.1).unwrap_err().to_string();
        assert!(text.contains("without a common stretch"), "{text}");
    }

    #[test]
    fn reads_the_log_of_llmc() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("main.log");
        fs::write(&path, "s:0 tel:11.0\ns:0 trl:11.1 lr:0.001 norm:20.1\ns:0 eval:0.25\ns:1 trl:10.5 lr:0.002 norm:9\ns:2 tel:9.5\n").unwrap();
        let log = Log::open(&path).unwrap();
        let pairs = |all: &[Reading]| all.iter().map(|r| (r.step, r.loss)).collect::<Vec<_>>();
        assert_eq!(pairs(&log.val), [(0.0, 11.0), (2.0, 9.5)]);
        assert_eq!(pairs(&log.train), [(0.0, 11.1), (1.0, 10.5)]);
        fs::write(&path, "s:0 tel:eleven\n").unwrap();
        assert!(Log::open(&path).unwrap_err().to_string().contains("line 1"));
        fs::write(&path, "nothing\n").unwrap();
        assert!(Log::open(&path).unwrap_err().to_string().contains("without a loss"));
        assert!(Log::open(place.path()).unwrap_err().to_string().contains("a run folder"));
    }
}
