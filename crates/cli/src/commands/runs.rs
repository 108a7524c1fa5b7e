//! The runs that a command looks at, and what it says of them.

use super::model::RUNS;
use crate::figures::{duration, short, whole};
use crate::hardware::human_bytes;
use anyhow::{Result, bail};
use ironhorse::train::run::host;
use ironhorse::train::run::view::{Life, Quantity, RunView};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The log of a run.
const METRICS: &str = "metrics.jsonl";

/// The folders named, or the run below `runs/` whose log was written last. A name of a folder below `runs/` is enough.
pub fn given_or_newest(given: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if given.is_empty() {
        let Some(newest) = newest_log(Path::new(RUNS)) else {
            bail!("no run below runs/; run `ironhorse train` first, or give the folder of a run");
        };
        return Ok(vec![newest]);
    }
    let found = given.iter().map(|name| {
        let below = Path::new(RUNS).join(name);
        if !name.exists() && below.join(METRICS).is_file() { below } else { name.clone() }
    });
    Ok(found.collect())
}

/// The run with the log that was written last.
fn newest_log(runs: &Path) -> Option<PathBuf> {
    let written = |run: &Path| std::fs::metadata(run.join(METRICS)).and_then(|meta| meta.modified()).ok();
    let entries = std::fs::read_dir(runs).ok()?.flatten().map(|entry| entry.path());
    entries.filter_map(|run| Some((written(&run)?, run))).max().map(|(_, run)| run)
}

/// Whether a run goes on, in words.
pub fn state(run: &RunView) -> String {
    let age = run.written.and_then(|time| SystemTime::now().duration_since(time).ok());
    match run.life {
        Life::Process(process) => format!("running, process {process}"),
        _ if run.table.ended.is_some() => "ended by --patience".into(),
        _ if run.is_complete() => "done".into(),
        Life::Nobody if run.origin.as_ref().is_none_or(|origin| origin.last_start().host == host()) => {
            "stopped, can be resumed".into()
        }
        _ => age
            .map_or_else(|| "unknown".into(), |age| format!("last step {} ago", duration(age.as_secs_f64()))),
    }
}

/// How far it is: `1,234 of 5,000`.
pub fn progress(run: &RunView) -> String {
    let made = whole(run.made() as f64);
    run.setting("steps").map_or(made.clone(), |steps| format!("{made} of {}", whole(steps as f64)))
}

/// What there is to say of a run, each under its name; what is not known is left out.
pub fn facts(run: &RunView) -> Vec<(&'static str, String)> {
    let table = &run.table;
    let last = |quantity| table.last(quantity).map(f64::from);
    let mut facts = vec![("state", state(run)), ("step", progress(run))];
    let mut add = |name, text: Option<String>| facts.extend(text.map(|text| (name, text)));
    add("time left", run.eta().filter(|_| !run.is_complete()).map(duration));
    add("training loss", last(Quantity::Loss).map(|loss| format!("{loss:.4}")));
    add("validation loss", last(Quantity::ValLoss).map(|loss| format!("{loss:.4}")));
    add("best", table.best().map(|(step, loss)| format!("{loss:.4} at step {}", whole(step as f64))));
    add("learning rate", last(Quantity::Lr).map(|lr| format!("{lr:.3e}")));
    add("gradient norm", last(Quantity::GradNorm).map(short));
    add("reward accuracy", last(Quantity::RewardAccuracy).map(|share| format!("{share:.3}")));
    add("speed", run.speed().map(|speed| format!("{} tokens/s", short(speed.into()))));
    add("MFU", run.mfu().map(|mfu| format!("{:.1} % of the datasheet", 100.0 * mfu)));
    add("step time", table.recent(Quantity::StepMs, 100).map(|ms| format!("{} ms", short(ms.into()))));
    add("reading data", table.data_share(100).map(|share| format!("{:.1} % of the time", 100.0 * share)));
    let steps = !table.is_empty();
    add("trained for", steps.then(|| duration(table.seconds())));
    add("tokens", steps.then(|| short(table.all_tokens())));
    add("busiest expert", last(Quantity::Busiest).map(|share| format!("{share:.2} × an even share")));
    for (name, accuracies) in table.evals.last().iter().flat_map(|(_, graded)| graded) {
        let text = format!("{name} {}", super::choices::figures(accuracies));
        add("graded", Some(text));
    }
    let planned = run.origin.as_ref().and_then(|origin| origin.last_start().work);
    add("planned memory", planned.map(|work| human_bytes(work.planned_bytes)));
    add(
        "checkpoints",
        run.checkpoints
            .first()
            .map(|newest| format!("{}, newest {}", run.checkpoints.len(), whole(*newest as f64))),
    );
    add("skipped steps", (!table.bad.is_empty()).then(|| format!("{}, NaN or infinite", table.bad.len())));
    add("spikes", (!table.spikes.is_empty()).then(|| table.spikes.len().to_string()));
    add("unreadable", run.unreadable.as_ref().map(|(count, first)| format!("{count} lines; {first}")));
    facts
}

/// The same, with what the machine says of its process after what the log says of the present.
#[cfg(any(feature = "serve", feature = "watch"))]
pub fn facts_with(run: &RunView, machine: &[(&'static str, String)]) -> Vec<(&'static str, String)> {
    let mut facts = facts(run);
    let at = facts.iter().position(|(name, _)| *name == "trained for").unwrap_or(facts.len());
    facts.splice(at..at, machine.iter().cloned());
    facts
}

/// How a run was started, and every setting.
#[cfg(any(feature = "serve", feature = "watch"))]
pub fn settings(run: &RunView) -> Vec<(String, String)> {
    let mut all = Vec::new();
    if let Some(origin) = &run.origin {
        let start = origin.last_start();
        for (name, text) in [
            ("command", start.command.join(" ")),
            ("started", format!("{} UTC, {} resumes since", origin.started.time, origin.resumes.len())),
            ("host, device", format!("{}, {}", start.host, start.device)),
            ("version", format!("{} {}", start.version, start.commit)),
        ] {
            all.push((name.to_owned(), text));
        }
    }
    all.extend(run.config.iter().map(|(name, value)| (name.clone(), value.to_string())));
    all
}
