//! Kills training runs at random moments, during saves on purpose too, lets them finish and compares.

use super::child::{Process, Run, Start, Waited, World};
use super::compare::{Difference, compare};
use super::{STEPS, TrainArgs, settle, worlds, write_config};
use crate::out;
use crate::progress::LINE_EVERY;
use anyhow::{Context, Result};
use ironhorse::train::rng::Rng;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The models that take turns where the flags name none.
const DENSE: &str = "n_layer=1,n_head=2,n_embd=64,vocab_size=256,max_seq_len=32";
const EXPERTS: &str = "hidden=64,layers=1,heads=2,experts=4,top_k=2,ffn=64,vocab=256,context=32";
/// The most kills of one run.
const MOST_KILLS: u64 = 4;
/// One round in so many resumes with an empty kernel cache.
const EMPTY_CACHE: u64 = 4;

/// Settings, and the uninterrupted run with them; rounds use them in turn.
struct Kind {
    name: &'static str,
    settings: TrainArgs,
    config: PathBuf,
    worlds: Vec<World>,
    reference: Option<Reference>,
}

struct Reference {
    folder: PathBuf,
    /// How long the whole run took.
    time: Duration,
    /// How long one save took, from the creation of its temporary folder to its rename.
    save: Duration,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Tally {
    rounds: u64,
    kills: u64,
    kills_during_a_save: u64,
    resumes: u64,
    /// Starts from the beginning, because the run was killed before its first checkpoint.
    restarts: u64,
    passed: u64,
    failed: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    seed: u64,
    #[serde(flatten)]
    tally: Tally,
    seconds: f64,
    failures: &'a [String],
}

/// Runs this many rounds; returns whether all passed.
pub fn run(args: &TrainArgs, times: u64, seed: u64, place: &Path) -> Result<bool> {
    let began = Instant::now();
    let mut kinds = kinds(args, place)?;
    let (mut tally, mut failures, mut said) = (Tally::default(), Vec::new(), Instant::now());
    for number in 0..times {
        let kind = (number % kinds.len() as u64) as usize;
        let kind = &mut kinds[kind];
        kind.train(place)?;
        let name = kind.name;
        let mut round = Round {
            number,
            rng: rng_of(seed, number),
            run: Run::new(&kind.config, &place.join(format!("round-{number:04}"))),
            kind,
            tally: &mut tally,
        };
        let outcome = round.play();
        let folder = round.run.folder.clone();
        tally.rounds += 1;
        let text = match outcome {
            Ok(difference) if difference.is_none() => {
                tally.passed += 1;
                tidy(place, &folder)?;
                None
            }
            Ok(difference) => Some(difference.first.unwrap_or_else(|| "nothing to compare".into())),
            Err(error) => Some(format!("{error:#}")),
        };
        if let Some(text) = text {
            tally.failed += 1;
            failures.push(format!("round {number} ({name}): {text}"));
            out::note(format_args!("FAILED {}", failures.last().map_or("", String::as_str)));
        }
        if said.elapsed() >= LINE_EVERY {
            said = Instant::now();
            out::note(format_args!(
                "{} of {times} rounds, {} kills, {} failed",
                tally.rounds, tally.kills, tally.failed
            ));
        }
    }
    for failure in &failures {
        out::line(format!("FAILED {failure}"))?;
    }
    let seconds = began.elapsed().as_secs_f64();
    out::line(format!(
        "{} rounds in {seconds:.0} s: {} kills ({} during a save), {} resumes, {} restarts, {} differences",
        tally.rounds, tally.kills, tally.kills_during_a_save, tally.resumes, tally.restarts, tally.failed
    ))?;
    out::json(args.json.as_deref(), &Report { seed, tally, seconds, failures: &failures })?;
    out::line(format!("{} passed, {} failed", tally.passed, tally.failed))?;
    Ok(failures.is_empty())
}

/// Removes what a round left that passed.
fn tidy(place: &Path, folder: &Path) -> Result<()> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for entry in
        std::fs::read_dir(place).with_context(|| format!("{}: cannot read", place.display()))?.flatten()
    {
        if entry.file_name().to_string_lossy().starts_with(&name) {
            let path = entry.path();
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.with_context(|| format!("{}: cannot remove", path.display()))?;
        }
    }
    Ok(())
}

/// The flags as they are, or small models in turn if they name none.
fn kinds(args: &TrainArgs, place: &Path) -> Result<Vec<Kind>> {
    let make = |name: &'static str, model: Option<&str>, accumulate: Option<u32>| -> Result<Kind> {
        let mut settings = args.clone();
        if let Some(model) = model {
            settings.model = model.to_owned();
            settings.batch.get_or_insert(2);
            settings.seq.get_or_insert(16);
            settings.val_batches = settings.val_batches.min(4);
        }
        let (worlds, given) = (worlds(args), settings.accumulate);
        let most = worlds.first().map_or(1, |world| world.ranks) as u32;
        settings.accumulate = accumulate.map_or(given, |times| (times * most).max(given));
        let config = place.join(format!("{name}.toml"));
        let settings = settle(settings);
        write_config(&settings, &config)?;
        Ok(Kind { name, settings, config, worlds, reference: None })
    };
    if args.model != super::super::train::BUILTIN || args.init.is_some() {
        return Ok(vec![make("run", None, None)?]);
    }
    Ok(vec![
        make("dense", Some(DENSE), Some(1))?,
        make("experts", Some(EXPERTS), Some(1))?,
        make("accumulated", Some(DENSE), Some(2))?,
    ])
}

impl Kind {
    /// Makes the uninterrupted run, once.
    fn train(&mut self, place: &Path) -> Result<()> {
        if self.reference.is_some() {
            return Ok(());
        }
        let run = Run::new(&self.config, &place.join(format!("{}-uninterrupted", self.name)));
        let began = Instant::now();
        let mut process = run.start(Start::New, World::ALONE, None)?;
        let (mut since, mut save) = (None, Duration::ZERO);
        let ended = process.wait_for(|| {
            match (run.hidden().is_empty(), since) {
                (false, None) => since = Some(Instant::now()),
                (true, Some(from)) => {
                    save = save.max(from.elapsed());
                    since = None;
                }
                _ => {}
            }
            false
        })?;
        let time = began.elapsed();
        if let Waited::Ended(status) = ended {
            run.check(status)?;
        }
        let (ms, save_ms) = (time.as_millis(), save.as_millis());
        out::note(format_args!("{}: a run takes {ms} ms, a save {save_ms} ms at most", self.name));
        self.reference = Some(Reference { folder: run.folder, time, save });
        Ok(())
    }
}

/// A run that is killed, and killed again.
struct Round<'a> {
    number: u64,
    rng: Rng,
    run: Run,
    kind: &'a Kind,
    tally: &'a mut Tally,
}

impl Round<'_> {
    fn play(&mut self) -> Result<Difference> {
        let Some(reference) = &self.kind.reference else { return Ok(Difference::default()) };
        let kills = 1 + self.rng.below(MOST_KILLS);
        for kill in 0..kills {
            let before = self.run.hidden();
            let mut process = self.start(kill)?;
            if let Waited::Ended(status) = self.wait(&mut process, reference)? {
                self.run.check(status)?;
                break;
            }
            let victim = self.rng.below(u64::from(u32::MAX));
            match process.kill(victim)? {
                None => {
                    self.tally.kills += 1;
                    let saving = self.run.hidden().iter().any(|name| !before.contains(name));
                    self.tally.kills_during_a_save += u64::from(saving);
                }
                Some(status) => {
                    self.run.check(status)?;
                    break;
                }
            }
        }
        let status = self.start(kills)?.wait()?;
        self.run.check(status)?;
        compare(&reference.folder, &self.run.folder, self.kind.settings.steps.unwrap_or(STEPS))
    }

    fn start(&mut self, number: u64) -> Result<Process> {
        let start = self.run.next_start();
        self.tally.resumes += u64::from(start == Start::Resume);
        self.tally.restarts += u64::from(start == Start::Again);
        let empty = start == Start::Resume && self.number.is_multiple_of(EMPTY_CACHE);
        let cache = self.run.empty_cache(number);
        let worlds = &self.kind.worlds;
        let world = worlds[self.rng.below(worlds.len() as u64) as usize];
        self.run.start(start, world, empty.then_some(cache.as_path()))
    }

    /// Waits for the moment to kill: in every second round while a checkpoint is being written, else at any time or
    /// shortly after a step.
    fn wait(&mut self, process: &mut Process, reference: &Reference) -> Result<Waited> {
        let steps = self.kind.settings.steps.unwrap_or(STEPS);
        if !self.number.is_multiple_of(2) {
            let mut skip = self.rng.below(3);
            let mut seen: BTreeSet<_> = self.run.hidden().into_iter().collect(); // of the process before
            let came = process.wait_for(|| {
                match self.run.hidden().into_iter().find(|name| !seen.contains(name)) {
                    Some(name) if skip > 0 => {
                        skip -= 1;
                        seen.insert(name);
                        false
                    }
                    new => new.is_some(),
                }
            })?;
            if let Waited::Ended(_) = came {
                return Ok(came);
            }
            return process.wait_until(Instant::now() + part_of(reference.save, &mut self.rng));
        }
        let next = self.run.logged().map_or(0, |step| step + 1);
        if next >= steps || self.rng.below(2) == 0 {
            return process.wait_until(Instant::now() + part_of(reference.time, &mut self.rng));
        }
        let step = next + self.rng.below(steps - next);
        match process.wait_for(|| self.run.logged() >= Some(step))? {
            Waited::Came => process.wait_until(Instant::now() + part_of(reference.save, &mut self.rng)),
            ended => Ok(ended),
        }
    }
}

/// The random numbers of a round.
fn rng_of(seed: u64, round: u64) -> Rng {
    Rng::new(seed).fork(round)
}

/// A random time, shorter than this one.
fn part_of(time: Duration, rng: &mut Rng) -> Duration {
    time.mul_f64(rng.uniform_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_the_same_for_the_same_seed_and_another_for_another() {
        let draw = |seed, round| {
            let mut rng = rng_of(seed, round);
            (0..8).map(|_| rng.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 5), draw(1, 5));
        assert!(draw(1, 5) != draw(2, 5) && draw(1, 5) != draw(1, 6));
        let mut rng = rng_of(3, 0);
        assert!((0..100).all(|_| part_of(Duration::from_millis(9), &mut rng) < Duration::from_millis(9)));
    }
}
