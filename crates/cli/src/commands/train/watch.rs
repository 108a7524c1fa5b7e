//! Who is told of a run and may stop it, and what is known of it when it is over.

use super::TrainArgs;
use super::ranks::Party;
use super::report::Times;
use crate::out;
use ironhorse::train::eval::Task;
use ironhorse::train::run::metrics::Metrics;
use ironhorse::train::run::{Control, Observer, SaveStats, Summary};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Who follows a run.
pub struct Watch<'a> {
    /// Requests to stop or to save.
    pub control: &'a Control,
    /// Is told of every step.
    pub observer: &'a mut dyn Observer,
    /// The processes that train together.
    pub party: &'a Party,
}

/// A run that is over: all steps made, or stopped.
pub struct Trained {
    /// Its settings.
    pub args: TrainArgs,
    /// Its folder.
    pub run: PathBuf,
    /// How it ended.
    pub summary: Summary,
    /// What was graded.
    pub tasks: Vec<Task>,
    /// How long it took.
    pub times: Times,
}

/// Passes on what it is told, and remembers when steps were done.
pub struct Timed<'a> {
    observer: &'a mut dyn Observer,
    started: Instant,
    /// Seconds from the start of the process to the first step that was done.
    first_step_s: Option<f64>,
    /// The same for the last.
    last_step_s: Option<f64>,
}

impl<'a> Timed<'a> {
    pub fn new(observer: &'a mut dyn Observer) -> Self {
        Self { observer, started: Instant::now(), first_step_s: None, last_step_s: None }
    }

    /// How long it took until now.
    pub fn times(&self) -> Times {
        let (first, last) = (self.first_step_s, self.last_step_s);
        let steps_s = first.zip(last).map(|(first, last)| last - first);
        Times { seconds: self.started.elapsed().as_secs_f64(), first_step_s: first, steps_s }
    }
}

impl Observer for Timed<'_> {
    fn begin(&mut self, made: u64, steps: u64) {
        self.observer.begin(made, steps);
    }

    fn step(&mut self, metrics: &Metrics) {
        let now = out::running().as_secs_f64();
        self.first_step_s.get_or_insert(now);
        self.last_step_s = Some(now);
        self.observer.step(metrics);
    }

    fn sample(&mut self, step: u64, text: &str) {
        self.observer.sample(step, text);
    }

    fn note(&mut self, text: &str) {
        self.observer.note(text);
    }

    fn copied(&mut self, step: u64, bytes: u64, took: Duration) {
        self.observer.copied(step, bytes, took);
    }

    fn saved(&mut self, step: u64, stats: &SaveStats) {
        self.observer.saved(step, stats);
    }
}
