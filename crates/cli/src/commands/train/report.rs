//! What is printed at the end of a run, and its provenance.

use super::super::choices;
use super::super::workload::Inputs;
use super::args::ScheduleArg;
use super::{TrainArgs, Trained};
use crate::hardware::{COMMIT, Hardware, VERSION};
use crate::{Outcome, out, signals};
use anyhow::Result;
use ironhorse::core::{Engine, EngineExt};
use ironhorse::text::tokenizer::TEMPLATE_NAME;
use ironhorse::train::eval::{Accuracies, Task};
use ironhorse::train::format::checkpoint::{BEST, Best, best_checkpoint};
use ironhorse::train::model::Adapted;
use ironhorse::train::run::{Ending, SaveStats, Started, StopReason, Summary, Work, host, utc};
use ironhorse::train::session::Session;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// How long a run took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Times {
    /// The whole run.
    pub seconds: f64,
    /// From the start of the process to the end of the first step.
    pub first_step_s: Option<f64>,
    /// From the end of the first step to the end of the last, saves and validations on the way included.
    pub steps_s: Option<f64>,
}

/// What `--json` writes.
#[derive(Serialize)]
pub struct TrainReport<'a> {
    #[serde(serialize_with = "out::lossy_path")]
    run: &'a Path,
    #[serde(serialize_with = "out::lossy_path")]
    checkpoint: &'a Path,
    ending: &'static str,
    stopped_by: Option<String>,
    steps: u64,
    #[serde(flatten)]
    times: Times,
    first_val_loss: Option<f32>,
    last_val_loss: Option<f32>,
    best: Option<Best>,
    /// The best that was saved.
    best_checkpoint: Option<String>,
    last_loss: f32,
    bad_steps: u64,
    saves: &'a SaveStats,
    sample: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    eval: BTreeMap<&'a str, TaskReport<'a>>,
}

/// The accuracies of a task after the last step, and what they are.
#[derive(Serialize)]
struct TaskReport<'a> {
    #[serde(flatten)]
    accuracies: Accuracies,
    definition: &'a str,
}

impl<'a> TrainReport<'a> {
    /// The report of a run that is over.
    pub fn of(trained: &'a Trained) -> Self {
        let Trained { run, summary, tasks, times, .. } = trained;
        Self {
            run,
            checkpoint: &summary.checkpoint,
            ending: match summary.ending {
                Ending::Done => "done",
                Ending::Patience => "patience",
                Ending::Stopped(_) => "stopped",
            },
            stopped_by: stopped_by(summary),
            steps: summary.steps,
            times: *times,
            first_val_loss: summary.first_val_loss,
            last_val_loss: summary.last_val_loss,
            best: summary.best,
            best_checkpoint: best_checkpoint(run).map(|(_, path)| path.to_string_lossy().into_owned()),
            last_loss: summary.last_loss,
            bad_steps: summary.bad_steps,
            saves: &summary.saves,
            sample: &summary.sample,
            eval: tasks.iter().filter_map(|task| graded(task, summary)).collect(),
        }
    }
}

/// What stopped a run before its last step.
fn stopped_by(summary: &Summary) -> Option<String> {
    match summary.ending {
        Ending::Done | Ending::Patience => None,
        Ending::Stopped(StopReason::Asked(signal)) => Some(signals::name(signal)),
        Ending::Stopped(StopReason::Time(_)) => Some("--max-time".to_owned()),
    }
}

/// Prints how a run ended, and what to do with it.
pub fn print(trained: &Trained) -> Result<Outcome> {
    let Trained { args, run, summary, .. } = trained;
    let seconds = trained.times.seconds;
    let ended = !matches!(summary.ending, Ending::Stopped(_));
    if !summary.sample.is_empty() && ended {
        out::line(format!("\n{}\n", summary.sample.trim_end()))?;
    }
    let stopped_by = stopped_by(summary);
    match (&stopped_by, summary.first_val_loss, summary.last_val_loss) {
        (Some(by), _, _) => {
            let all = args.steps.unwrap_or(0);
            out::line(format!("stopped by {by} after {} of {all} steps; everything is kept", summary.steps))?;
        }
        (None, Some(first), Some(last)) => {
            out::line(format!("validation loss {first:.4} → {last:.4} in {seconds:.0} s"))?
        }
        _ => out::line(format!("last training loss {:.4} after {seconds:.0} s", summary.last_loss))?,
    }
    if summary.ending == Ending::Patience {
        out::line(format!(
            "ended      after {} of {} steps: no new lowest validation loss in {} validations (--patience)",
            summary.steps,
            args.steps.unwrap_or(0),
            args.patience
        ))?;
    }
    for (name, accuracies) in &summary.eval {
        let questions = accuracies.questions;
        out::line(format!("{name:<10} {}  ({questions} questions)", choices::figures(accuracies)))?;
    }
    if summary.bad_steps > 0 {
        out::line(format!(
            "skipped    {} steps with a NaN or infinite loss or gradient norm (bad/)",
            summary.bad_steps
        ))?;
    }
    let pictures = if run.join("experts.svg").exists() { "loss.svg, experts.svg" } else { "loss.svg" };
    out::line(format!("run        {}   ({pictures}, metrics.jsonl, samples, checkpoints)", run.display()))?;
    out::line(format!(
        "look at it ironhorse watch {0}; ironhorse report {0}; tensorboard --logdir {0}",
        quoted(run)
    ))?;
    let best = best_checkpoint(run);
    say_best(summary.best, best.as_ref())?;
    match stopped_by {
        Some(_) => out::line(format!("resume     ironhorse train --resume {}", quoted(run)))?,
        None => {
            // the newest is taken where it is the best
            let last = best.as_ref().is_none_or(|(best, _)| best.step == summary.steps);
            let model = if last { run.to_owned() } else { run.join(BEST) };
            let chat = match summary.checkpoint.join(TEMPLATE_NAME).is_file() {
                true => " --chat --prompt 'Hello'",
                false => "",
            };
            out::line(format!("write text ironhorse generate --model {}{chat}", quoted(&model)))?;
            out::line(format!("train on   ironhorse train {}", train_on(args, run, summary)))?;
        }
    }
    out::json(args.json.as_deref(), &TrainReport::of(trained))?;
    Ok(if ended { Outcome::Done } else { Outcome::Stopped })
}

/// Says which checkpoint is the best, and if the lowest validation loss was not saved.
fn say_best(lowest: Option<Best>, saved: Option<&(Best, PathBuf)>) -> Result<()> {
    match (lowest, saved) {
        (Some(Best { step: 0, val_loss }), _) => {
            out::line(format!("best       validation loss {val_loss:.4} before the first step"))
        }
        (Some(lowest), Some((best, path))) => {
            let more = match lowest.step == best.step {
                true => String::new(),
                false => {
                    format!(" ({:.4} after {} was not saved)", lowest.val_loss, lowest.step)
                }
            };
            let (loss, step, path) = (best.val_loss, best.step, path.display());
            out::line(format!("best       validation loss {loss:.4} after {step} steps{more}: {path}"))
        }
        _ => Ok(()),
    }
}

/// The flags that train a run for longer.
fn train_on(args: &TrainArgs, run: &Path, summary: &Summary) -> String {
    let config = run.join("config.toml");
    let (run, more) = (quoted(run), args.steps.unwrap_or(1).saturating_mul(2));
    match summary.ending {
        Ending::Patience => format!("--resume {run} --patience {}", args.patience.saturating_mul(2)),
        // its decay is over, and cannot be taken back
        _ if args.schedule == ScheduleArg::Wsd => format!("--config {} --init {run}", quoted(&config)),
        _ => format!("--resume {run} --steps {more}"),
    }
}

/// What a run's report says of a task, if it was graded.
fn graded<'a>(task: &'a Task, summary: &Summary) -> Option<(&'a str, TaskReport<'a>)> {
    let accuracies = *summary.eval.get(&task.name)?;
    Some((&task.name, TaskReport { accuracies, definition: &task.definition }))
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// One start of a run, for `run.json`.
pub fn started(line: &[OsString], session: &mut Session, step: u64) -> Started {
    let work = work(session).ok();
    let engine = session.engine();
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let folder = std::env::current_dir().unwrap_or_default();
    Started {
        unix_s,
        time: utc(unix_s),
        command: line.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        folder: folder.to_string_lossy().into_owned(),
        version: VERSION.to_owned(),
        commit: COMMIT.to_owned(),
        host: host(),
        device: engine.name().to_owned(),
        hardware: hardware(engine),
        step,
        changes: Vec::new(),
        work,
    }
}

/// What the steps of a run ask of the device.
fn work(session: &mut Session) -> Result<Work> {
    let program = session.train_program()?;
    let tokens = program.io("x").map_or(0, |slot| slot.numel());
    let (planned_bytes, weights) = (program.layout().total() as u64, program.precision().weights);
    let flops = Inputs::plain(Default::default()).model_flops(session)?;
    Ok(Work {
        parameters: session.config().told_params() as u64,
        planned_bytes,
        flops_per_token: (tokens > 0).then(|| flops / tokens as f64),
        datasheet_flops: session.engine().device().datasheet_flops(weights),
    })
}

/// The machine and, of a GPU, the libraries in use.
fn hardware(engine: &mut dyn Engine) -> serde_json::Value {
    let mut json = serde_json::to_value(Hardware::detect()).unwrap_or_default();
    if let Some(name) = &engine.device().product {
        let libraries = ironhorse::cuda::report::libraries().into_iter();
        let libraries = libraries.filter_map(|library| {
            let (version, path) = library.found.ok()?;
            Some((library.name.to_owned(), serde_json::json!({ "version": version, "path": path })))
        });
        json["gpu"] = name.as_str().into();
        json["libraries"] = serde_json::Value::Object(libraries.collect());
    }
    json
}

/// How many parameters adapters have, where only those are trained.
pub fn trained_text(model: &Adapted) -> String {
    let lora = model.lora.map(|lora| (lora, model.trained_params()));
    lora.map_or_else(String::new, |(lora, count)| {
        format!(" frozen, {count} in adapters of rank {} on {} trained", lora.rank, lora.targets)
    })
}
