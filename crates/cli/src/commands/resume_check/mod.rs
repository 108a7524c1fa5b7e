//! `ironhorse resume-check`: trains, interrupts, resumes and compares, with processes of its own.
//!
//! ```text
//! mod.rs      the flags, the check, its table        torture.rs  kills at random moments, many times over
//! child.rs    runs as processes that can be killed   compare.rs  byte by byte, field by field
//! ```

mod child;
mod compare;
mod torture;

use self::child::{Run, Start, Waited, World};
use self::compare::{Difference, compare};
use super::train::TrainArgs;
use crate::hardware::{MadeBy, human_bytes};
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Steps of a run, if not given: enough for saves, validations and samples between the interruptions.
const STEPS: u64 = 24;
/// Kills in the run that is killed.
const KILLS: u64 = 3;
/// How often to start a run that ends before it could be interrupted.
const TRIES: u32 = 5;

/// Checks that an interrupted and resumed training run equals the uninterrupted one, bit for bit, on this machine
#[derive(Args)]
#[command(
    about = "Checks that an interrupted and resumed training run equals the uninterrupted one, bit for bit, on this machine",
    after_help = "Examples:\n  ironhorse resume-check\n  \
    ironhorse resume-check --model d12 --device cuda --batch 8 --seq 1024 --json resume.json\n  \
    ironhorse resume-check --config runs/0001/config.toml --steps 40\n  \
    ironhorse resume-check --torture 100 --torture-seed 7\n  \
    ironhorse resume-check --torture 100 --ranks 4 --accumulate 4\n\n\
    Takes the flags of `ironhorse train`. The run is made three times, each by processes of its own: without interruption; stopped by\n\
    SIGTERM and resumed; killed by SIGKILL several times and resumed from its newest checkpoint each time. Resumed processes start\n\
    with an empty kernel cache. All bytes of the last checkpoints and of the samples must be equal, and all metrics but times.\n\
    With --ranks or --gpus one of the ranks is killed, and the run resumed by as many, by half as many, ... to one; the\n\
    uninterrupted run is made by one process.\n\n\
    Exit code: 0 equal, 1 different, 2 could not run."
)]
pub struct ResumeCheckArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Folder for the runs, new or empty; it is kept [default: a temporary folder, removed if the check passes]
    #[arg(long, value_name = "DIR", help_heading = "Check")]
    folder: Option<PathBuf>,
    /// Keep the temporary folder
    #[arg(long, help_heading = "Check")]
    keep_folder: bool,
    /// Instead: make N runs and kill each at random moments, every second one during a save
    #[arg(long, value_name = "N", value_parser = number::count::<u64>, help_heading = "Check")]
    torture: Option<u64>,
    /// Seed of the random moments
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = number::seed, help_heading = "Check")]
    torture_seed: u64,
}

/// A run that was interrupted, beside the one that was not.
#[derive(Serialize)]
struct Row {
    interrupted_by: &'static str,
    /// The last step in the log at each interruption.
    at_steps: Vec<u64>,
    resumed_from: Vec<u64>,
    #[serde(flatten)]
    difference: Difference,
    passed: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    made_by: MadeBy,
    settings: TrainArgs,
    passed: bool,
    runs: Vec<Row>,
}

pub fn run(args: &ResumeCheckArgs) -> Result<Outcome> {
    out::check_json(args.train.json.as_deref())?;
    refuse_flags(&args.train)?;
    let place = Place::new(args)?;
    let passed = match args.torture {
        Some(times) => torture::run(&args.train, times, args.torture_seed, &place.path),
        None => check(&args.train, &place.path),
    };
    place.leave(args.keep_folder || !matches!(passed, Ok(true)));
    Ok(if passed? { Outcome::Done } else { Outcome::Failed })
}

/// Refuses settings that the check chooses itself.
fn refuse_flags(args: &TrainArgs) -> Result<()> {
    let given = [
        ("--resume", args.resume.is_some()),
        ("--out", args.out.is_some()),
        ("--overwrite", args.overwrite),
        ("--save-batches", args.save_batches.is_some()),
        ("--max-time", args.max_time.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((flag, _)) => {
            bail!("{flag} cannot be used with resume-check, which creates its own runs (see --folder)")
        }
        None => Ok(()),
    }
}

/// The settings with saves, validations and samples between the interruptions, where the flags leave them open.
fn settle(mut args: TrainArgs) -> TrainArgs {
    let steps = *args.steps.get_or_insert(STEPS);
    if args.save_every == 0 {
        args.save_every = (steps / 8).max(1);
    }
    args.val_every.get_or_insert((steps / 5).max(1));
    args.sample_every.get_or_insert((steps / 4).max(1));
    args.sample_tokens.get_or_insert(32);
    args.json = None;
    args
}

/// The numbers of ranks that take turns in one run: the one given, and all its divisors.
fn worlds(args: &TrainArgs) -> Vec<World> {
    let flag = if args.rank.gpus.is_some() { "--gpus" } else { "--ranks" };
    let most = args.rank.gpus.or(args.rank.ranks).unwrap_or(1);
    let divides = |ranks: &usize| most.is_multiple_of(*ranks);
    (1..=most).rev().filter(divides).map(|ranks| World { flag, ranks }).collect()
}

/// Writes the settings to a file that the processes are given.
fn write_config(args: &TrainArgs, path: &Path) -> Result<()> {
    let text = toml::to_string_pretty(args).context("the settings are not TOML")?;
    std::fs::write(path, text).with_context(|| format!("{}: cannot write", path.display()))
}

/// The folder that the check works in.
struct Place {
    path: PathBuf,
    temporary: Option<tempfile::TempDir>,
}

impl Place {
    fn new(args: &ResumeCheckArgs) -> Result<Self> {
        let Some(path) = &args.folder else {
            let made = tempfile::Builder::new().prefix("ironhorse-resume-check-").tempdir();
            let temporary = made.context("cannot make a temporary folder; name one with --folder")?;
            return Ok(Self { path: temporary.path().to_owned(), temporary: Some(temporary) });
        };
        std::fs::create_dir_all(path).with_context(|| format!("{}: cannot create", path.display()))?;
        let mut entries =
            std::fs::read_dir(path).with_context(|| format!("{}: cannot read", path.display()))?;
        if entries.next().is_some() {
            bail!("{}: is not empty; choose another --folder", path.display());
        }
        Ok(Self { path: path.clone(), temporary: None })
    }

    /// Removes a temporary folder, or says where it is.
    fn leave(self, keep: bool) {
        let holds_runs = std::fs::read_dir(&self.path).is_ok_and(|mut entries| entries.next().is_some());
        match self.temporary {
            Some(temporary) if keep && holds_runs => {
                out::note(format_args!("the runs are kept in {}", temporary.keep().display()));
            }
            _ => {} // dropped, a temporary folder is removed
        }
    }
}

fn check(args: &TrainArgs, place: &Path) -> Result<bool> {
    let settings = settle(args.clone());
    let steps = settings.steps.unwrap_or(STEPS);
    if steps < KILLS + 2 {
        bail!("--steps is {steps}, expected at least {} to interrupt a run between", KILLS + 2);
    }
    if settings.save_every + KILLS >= steps {
        bail!(
            "--save-every is {}, expected at most {}: the runs are interrupted after their first checkpoint",
            settings.save_every,
            steps - KILLS - 1
        );
    }
    let config = place.join("settings.toml");
    write_config(&settings, &config)?;
    out::note(format_args!(
        "1/3 {steps} steps without interruption, a checkpoint every {}",
        settings.save_every
    ));
    let reference = Run::new(&config, &place.join("uninterrupted"));
    reference.complete(Start::New, World::ALONE, None)?;

    let worlds = worlds(args);
    let work = Work { place, config: &config, reference: &reference, settings: &settings, worlds: &worlds };
    let mut runs = Vec::new();
    if cfg!(unix) {
        out::note("2/3 stopped by SIGTERM and resumed");
        runs.push(work.interrupted("SIGTERM", &[steps / 2])?);
    }
    out::note(format_args!("3/3 killed by SIGKILL {KILLS} times and resumed"));
    let moments: Vec<u64> =
        (1..=KILLS).map(|kill| (steps * kill / (KILLS + 1)).max(settings.save_every)).collect();
    runs.push(work.interrupted("SIGKILL", &moments)?);

    let passed = runs.iter().all(|run| run.passed);
    out::line(table(&runs))?;
    for run in &runs {
        if let Some(first) = &run.difference.first {
            out::line(format!("{}: {first}", run.interrupted_by))?;
        }
    }
    let verdict = match passed {
        true => "PASS: the resumed runs equal the uninterrupted one in every byte and every metric",
        false => "FAIL: a resumed run is not the uninterrupted one",
    };
    out::line(verdict)?;
    let report = Report { made_by: MadeBy::detect(), settings, passed, runs };
    out::json(args.json.as_deref(), &report)?;
    Ok(passed)
}

/// What all interrupted runs of a check share.
struct Work<'a> {
    place: &'a Path,
    config: &'a Path,
    reference: &'a Run,
    settings: &'a TrainArgs,
    worlds: &'a [World],
}

impl Work<'_> {
    /// Interrupts a run at these steps, resumes it each time, and compares it in the end.
    fn interrupted(&self, by: &'static str, moments: &[u64]) -> Result<Row> {
        for attempt in 1..=TRIES {
            let run = Run::new(self.config, &self.place.join(format!("{by}-{attempt}")));
            let Some(at_steps) = self.interrupt(&run, by, moments)? else {
                out::note(format_args!("the run ended before {by} reached it; trying again"));
                continue;
            };
            let difference =
                compare(&self.reference.folder, &run.folder, self.settings.steps.unwrap_or(STEPS))?;
            let (passed, resumed_from) = (difference.is_none(), run.resumed_from()?);
            return Ok(Row { interrupted_by: by, at_steps, resumed_from, difference, passed });
        }
        bail!("the run ended before it could be interrupted, {TRIES} times: give more --steps")
    }

    /// The steps at which the run was interrupted; `None` if it ended before.
    fn interrupt(&self, run: &Run, by: &str, moments: &[u64]) -> Result<Option<Vec<u64>>> {
        let mut at_steps: Vec<u64> = Vec::new();
        for &moment in moments {
            // later than the last step that the process before has logged
            let moment = at_steps.last().map_or(moment, |&last| moment.max(last + 1));
            let start = if at_steps.is_empty() { Start::New } else { Start::Resume };
            let cache = run.empty_cache(at_steps.len() as u64);
            let world = self.worlds[at_steps.len() % self.worlds.len()];
            let mut process = run.start(start, world, (start == Start::Resume).then_some(cache.as_path()))?;
            // a kill before the first checkpoint would leave nothing to resume from
            let came = || run.logged() >= Some(moment) && run.next_start() == Start::Resume;
            let came_or_stops = || if by == "SIGTERM" { run.logged() >= Some(moment) } else { came() };
            if let Waited::Ended(status) = process.wait_for(came_or_stops)? {
                return run.check(status).map(|()| None);
            }
            let ended = match by {
                "SIGTERM" => {
                    process.terminate()?;
                    Some(process.wait()?).filter(|status| status.code() != Some(3))
                }
                _ => process.kill(at_steps.len() as u64)?,
            };
            match ended {
                None => at_steps.extend(run.logged()),
                Some(status) => return run.check(status).map(|()| None),
            }
        }
        let world = self.worlds[at_steps.len() % self.worlds.len()];
        run.complete(Start::Resume, world, Some(&run.empty_cache(at_steps.len() as u64)))?;
        Ok(Some(at_steps))
    }
}

fn table(runs: &[Row]) -> String {
    let list = |steps: &[u64]| steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "{:<14}{:<14}{:<14}{:>6}{:>12}{:>14}{:>9}{:>16}  verdict",
        "interrupted",
        "after step",
        "resumed from",
        "files",
        "size",
        "bytes differ",
        "metrics",
        "metrics differ"
    );
    for run in runs {
        let difference = &run.difference;
        text += &format!(
            "\n{:<14}{:<14}{:<14}{:>6}{:>12}{:>14}{:>9}{:>16}  {}",
            run.interrupted_by,
            list(&run.at_steps),
            list(&run.resumed_from),
            difference.files,
            human_bytes(difference.bytes),
            difference.bytes_differ,
            difference.fields,
            difference.fields_differ,
            if run.passed { "equal" } else { "DIFFERENT" }
        );
    }
    text
}
