//! Checkpoints of several ranks where one of them has no memory for a copy, or all are to wait.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::bad_run::job::{self, BATCH, SEQ, Spec, VOCAB};
use crate::odd_engine::Odd;
use ironhorse::core::{Communicator, Shard};
use ironhorse::train::model::{Gpt2Config, Sums};
use ironhorse::train::run::metrics::Metrics;
use ironhorse::train::run::{self, Control, Job, Observer, RunFolder, SaveSettings, SaveStats, Saver};
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse_testkit::thread_ranks;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Default)]
struct Watch {
    run: PathBuf,
    notes: Vec<String>,
    /// Steps that were made before the checkpoint of that step was there.
    early: Vec<u64>,
}

impl Observer for Watch {
    fn step(&mut self, metrics: &Metrics) {
        let place = self.run.join(format!("checkpoints/step-{:06}", metrics.step));
        if metrics.step > 0 && metrics.step.is_multiple_of(2) && !place.exists() {
            self.early.push(metrics.step);
        }
    }

    fn sample(&mut self, _step: u64, _text: &str) {}

    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
}

/// What a rank saw, what it saved, and how often it asked for memory.
struct Seen {
    watch: Watch,
    stats: SaveStats,
    asked: usize,
}

/// Trains six steps of two micro-steps on as many ranks as `without` says whether they have memory.
fn train(run: &Path, without: &[bool], sync: bool) -> Vec<Seen> {
    RunFolder::create(run, "steps = 1\n", false).unwrap();
    let spec = Spec { steps: 6, accumulate: 2, ..Spec::default() };
    std::thread::scope(|scope| {
        let rank = |(ranks, without): (Arc<dyn Communicator>, bool)| {
            let spec = spec.clone();
            scope.spawn(move || rank(run, &spec, &ranks, without, sync))
        };
        let ranks = thread_ranks(without.len()).into_iter().zip(without.iter().copied());
        let threads: Vec<_> = ranks.map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn rank(run: &Path, spec: &Spec, ranks: &Arc<dyn Communicator>, without: bool, sync: bool) -> Seen {
    let place = ranks.place();
    let sums = Sums { place, shard: Shard::State, accumulate: spec.accumulate, ..Sums::default() };
    let shape = Some((BATCH, SEQ));
    let of = SessionSpec { train: shape, eval: shape, sums: Some(sums), ..SessionSpec::default() };
    let mut engine = Odd::new(place.rank);
    engine.without_memory = without;
    let asked: Arc<AtomicUsize> = engine.asked.clone();
    // so large that every rank has a part of the state
    let config = Gpt2Config::new(SEQ, VOCAB, 2, 2, 80);
    let mut session = Session::new(Box::new(engine), config, &of).unwrap();
    session.join(ranks.clone()).unwrap();
    session.init(3).unwrap();
    let (settings, mut data, control) = (spec.settings(), spec.data(), Control::default());
    let mut folder = if place.leads() { RunFolder::open(run).unwrap() } else { RunFolder::follow(run) };
    let saves = SaveSettings { every: 2, minutes: 0.0, keep: 0, sync, ..SaveSettings::default() };
    let mut saver = Saver::new(&session, run, None, saves, 0).unwrap();
    let mut watch = Watch { run: run.to_owned(), ..Watch::default() };
    run::train(Job {
        session: &mut session,
        data: &mut data,
        settings: &settings,
        folder: &mut folder,
        saver: &mut saver,
        control: &control,
        observer: &mut watch,
        state: run::new_state(serde_json::json!({ "dtype": "f32" })),
    })
    .unwrap();
    Seen { watch, stats: saver.stats().clone(), asked: asked.load(Ordering::Relaxed) }
}

fn assert_equal(one: &Path, two: &Path) {
    assert_eq!(job::saved(one), [2, 4, 6]);
    assert_eq!(job::saved(two), [2, 4, 6]);
    for step in [2, 4, 6] {
        assert!(job::files(one, step) == job::files(two, step), "the files of step {step}");
    }
}

/// The rank writes its part while the steps wait, and the leading rank says so: no checkpoint is left out.
#[test]
fn a_rank_without_memory_for_a_copy_saves_its_part() {
    let top = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| top.path().join(name));
    train(&one, &[false], false);
    let seen = train(&two, &[false, true], false);
    assert_equal(&one, &two);
    let said = |seen: &Seen, text: &str| seen.watch.notes.iter().filter(|note| note.contains(text)).count();
    assert_eq!(said(&seen[0], "rank 1: has too little host memory"), 1, "{:?}", seen[0].watch.notes);
    assert_eq!(said(&seen[1], "bytes to copy to"), 1, "{:?}", seen[1].watch.notes);
    assert_eq!((seen[0].stats.count, seen[0].stats.failed), (3, 0));
}

#[test]
fn ranks_that_are_to_wait_for_a_save_do() {
    let top = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| top.path().join(name));
    train(&one, &[false], true);
    let seen = train(&two, &[false, false], true);
    assert_equal(&one, &two);
    for (rank, seen) in seen.iter().enumerate() {
        assert_eq!(seen.watch.early, [0; 0], "rank {rank} went on before the checkpoint was there");
        assert_eq!(seen.asked, 0, "rank {rank} makes no copy");
    }
}
