//! The loop of a run.
//!
//! ```text
//! mod.rs      one step after the other, one of them in flight    bad_step.rs  NaN or infinite steps, going back
//! measure.rs  validation, tasks, samples                         ending.rs    done, stopped or failed
//! tokens.rs   the tokens of a step
//! ```

mod bad_step;
mod ending;
mod measure;
mod tokens;

use self::bad_step::Bad;
use self::measure::Validated;
use self::tokens::StepTokens;
use super::balance::Balance;
use super::spikes::Spikes;
use super::together::{Together, Wish};
use super::{Ending, Job, Summary, nothing_counts, provenance};
use crate::Result;
use crate::data::LoaderState;
use crate::format::checkpoint::{Best, TrainerState};
use crate::run::Saver;
use crate::run::metrics::Metrics;
use crate::session::PendingUpdate;
use ironhorse_core::Scalars;
use ironhorse_core::ranks::Watched;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Steps between readings of the router's load where the engine is asynchronous: reading it waits for the device.
const ROUTING_EVERY: u64 = 10;

/// How long the leader has to complete a checkpoint that all have written, after another rank is lost. Launchers wait longer.
const TO_COMPLETE: Duration = Duration::from_secs(20);

/// A step in flight: given to the engine, its results not read yet.
struct InFlight {
    metrics: Metrics,
    scalars: Scalars,
    /// The position in the data after it.
    position: LoaderState,
    pending: PendingUpdate,
}

/// A run under way.
pub(super) struct Trainer<'a> {
    job: Job<'a>,
    together: Together,
    summary: Summary,
    /// Token buffers, for even and odd steps, with room for the largest step.
    batches: [StepTokens; 2],
    /// The step whose tokens were read last, and the position in the data after them.
    fetched: Option<(u64, LoaderState)>,
    /// Steps whose results are known, and the position in the data after them.
    landed: u64,
    position: LoaderState,
    best: Option<Best>,
    /// The last validation.
    validated: Option<Best>,
    bad_in_a_row: u32,
    rolled_back_from: Option<u64>,
    /// The last step's line, of a run that was stopped before its last validation.
    unlogged: Option<Metrics>,
    /// When the step before was done.
    mark: Instant,
    balance: Balance,
    spikes: Spikes,
    /// The share of validated pairs whose chosen text has the larger reward.
    val_accuracy: Option<f32>,
    /// Algorithms written to the folder so far.
    choices: usize,
    log_failed: bool,
    /// Another rank was asked to save.
    asked_to_save: bool,
    /// The last save failed everywhere, so it is not tried again.
    unsaved: bool,
}

impl<'a> Trainer<'a> {
    pub fn new(job: Job<'a>) -> Result<Self> {
        let tokens = job.session.train_program()?.io("x").map_or(0, |slot| slot.numel());
        let TrainerState { step, best, validated, bad_in_a_row, rolled_back_from, .. } = job.state;
        let summary = Summary {
            ending: Ending::Done,
            steps: step,
            checkpoint: PathBuf::new(),
            first_val_loss: None,
            last_val_loss: None,
            best,
            last_loss: f32::NAN,
            sample: String::new(),
            eval: Default::default(),
            bad_steps: 0,
            saves: Default::default(),
        };
        let together = Together::new(job.session.ranks());
        let mut trainer = Self {
            together,
            summary,
            batches: [(); 2]
                .map(|()| StepTokens::new(tokens, job.settings.accumulate as usize, &job.data.train)),
            fetched: None,
            landed: step,
            position: job.data.train.state(),
            best,
            validated,
            bad_in_a_row,
            rolled_back_from,
            unlogged: None,
            mark: Instant::now(),
            balance: Balance::default(),
            spikes: Spikes::default(),
            val_accuracy: None,
            choices: 0,
            log_failed: false,
            asked_to_save: false,
            unsaved: false,
            job,
        };
        if step > 0 {
            trainer.cut_back(step)?;
        }
        Ok(trainer)
    }

    /// Cuts the folder back to the steps before `step`, and what the run remembers of them.
    fn cut_back(&mut self, step: u64) -> Result<()> {
        if !self.together.leads() {
            self.together.meet()?; // the leader cuts first
        }
        let kept = self.job.folder.cut_back(step)?;
        if self.together.leads() {
            self.together.meet()?;
        }
        self.spikes = Spikes::default();
        for metrics in &kept {
            self.spikes.add(metrics.loss);
        }
        self.summary.first_val_loss = kept.first().and_then(|metrics| metrics.val_loss);
        if let Some(last) = kept.last() {
            self.summary.last_loss = last.loss;
            if step == self.job.settings.steps {
                self.unlogged = Some(last.clone()); // its line gets the last validation
            }
        }
        if self.unlogged.is_some() {
            self.job.folder.cut_back(step - 1)?;
        }
        Ok(())
    }

    pub fn run(mut self) -> Result<Summary> {
        let mut in_flight = None;
        let ended = self.steps(&mut in_flight);
        if let Err(error) = &ended {
            if self.together.is_common(error) {
                self.rescue(in_flight.take());
            } else {
                self.finish_folder(); // what others have of the state cannot be asked for any more
                self.job.saver.finish_alone(TO_COMPLETE, self.job.folder, self.job.observer);
            }
        }
        ended?;
        self.summary.steps = self.landed;
        self.summary.best = self.best;
        self.summary.saves = self.job.saver.stats().clone();
        Ok(self.summary)
    }

    /// All remaining steps, until the end or a request to stop.
    fn steps(&mut self, in_flight: &mut Option<InFlight>) -> Result<()> {
        let settings = self.job.settings;
        let mut step = self.landed;
        self.job.saver.prepare(self.job.session, self.job.observer);
        loop {
            self.together.in_step(None); // to remove an old checkpoint may take long
            self.job.saver.poll(self.job.folder, self.job.observer);
            let last = step == settings.steps;
            let wish = Wish {
                asked_to_save: self.job.control.take_save(),
                ..Wish::new(self.job.control.stop_reason())
            };
            let asked = self.asked_to_save || wish.asked_to_save;
            let save = !last && self.job.saver.due(step, false, asked, self.job.folder).is_some();
            let written = self.job.saver.has_written();
            let agreed = self.together.agree(Wish {
                save,
                samples: !last && self.samples_at(step),
                written,
                ..wish
            })?;
            if agreed.written {
                self.job.saver.collect(self.job.session, self.job.observer)?;
            }
            // a follower was asked: the leader saves before the next step
            self.asked_to_save = agreed.asked_to_save && !asked && self.together.leads();
            let (stop, save, samples) = (agreed.stop(), agreed.save, agreed.samples);
            let validates = !last && settings.validates_before(step);
            let grades = !last && settings.grades_before(step) && !self.job.data.tasks.is_empty();
            if (last || stop.is_some() || save || validates || samples || grades)
                && let Some(back) = self.settle(in_flight, last)?
            {
                step = back;
                continue;
            }
            if last {
                return self.end();
            }
            if let Some(reason) = stop {
                return self.stop(reason);
            }
            let mut metrics = Metrics { step, ..Metrics::default() };
            let mut improved = false;
            if validates {
                match self.validate(step)? {
                    Validated::Stopped => continue,
                    Validated::Loss(Some(loss)) if !loss.is_finite() => {
                        step = self.not_finite(step, loss)?;
                        continue;
                    }
                    Validated::Loss(loss) => {
                        (metrics.val_loss, metrics.val_reward_accuracy) = (loss, self.val_accuracy);
                    }
                }
                improved = self.improves(step, metrics.val_loss);
                self.summary.first_val_loss = self.summary.first_val_loss.or(metrics.val_loss);
                if let Some(ended) = self.out_of_patience(step, metrics.val_loss) {
                    return self.give_up(step, ended);
                }
                self.mark = Instant::now();
            }
            if grades {
                // to stop before this step, so that it is graded again when the run is resumed
                let Some(graded) = self.grade(step) else { continue };
                metrics.eval = graded;
            }
            let best = |saver: &mut Saver, folder| saver.due(step, improved, false, folder).is_some();
            let save =
                save || (improved && self.together.of_leader(best(self.job.saver, self.job.folder))?);
            if save {
                self.keep_choices(); // before the checkpoint: a run that is killed after it is resumed with them
                let state = self.state()?;
                self.job.saver.save(self.job.session, &state, self.job.folder, self.job.observer);
                self.mark = Instant::now();
            }
            if samples {
                if !self.sample(step) {
                    continue; // to stop before this step, so that the sample is drawn again when the run is resumed
                }
                self.mark = Instant::now();
            }
            step = self.make(step, metrics, in_flight)?;
        }
    }

    /// Starts a step on the engine and finishes the one before. Gives the next step: the one after, the same again if the
    /// one before was bad, or an earlier one if the run went back to a checkpoint.
    fn make(&mut self, step: u64, metrics: Metrics, in_flight: &mut Option<InFlight>) -> Result<u64> {
        let measured = (metrics.val_loss, metrics.eval.clone());
        let first = self.landed <= self.job.state.step + 1;
        self.together.in_step(Some(Watched { step, first }));
        let started = self.start(metrics);
        if let Some(previous) = in_flight.take()
            && let Some(bad) = self.land(previous, true)?
        {
            match started {
                // nothing of it was applied; it is made again
                Ok(started) => drop(self.job.session.finish_update(started.pending)),
                // the others wait for a step that is not made
                Err(error) if !self.together.place().is_alone() => return Err(error),
                Err(_) => {}
            }
            return Ok(self.skip(bad)?.unwrap_or(step));
        }
        match started {
            Ok(started) => *in_flight = Some(started),
            Err(error) => {
                let mut bad = self.bad_by_error(step, error)?;
                (bad.metrics.val_loss, bad.metrics.eval) = measured;
                return Ok(self.skip(bad)?.unwrap_or(step + 1));
            }
        }
        if in_flight.as_ref().is_some_and(|step| step.pending.is_ready()) {
            // the engine worked while it was asked to: nothing is in flight
            let last = step + 1 == self.job.settings.steps;
            return Ok(self.settle(in_flight, last)?.unwrap_or(step + 1));
        }
        Ok(step + 1)
    }

    /// The tokens of a step that was fetched, and whose results are not forgotten.
    fn tokens_of(&self, step: u64) -> &StepTokens {
        &self.batches[(step % 2) as usize]
    }

    /// Gives a step to the engine.
    fn start(&mut self, mut metrics: Metrics) -> Result<InFlight> {
        let step = metrics.step;
        let tokens = &mut self.batches[(step % 2) as usize];
        let reads = Instant::now();
        if self.fetched.is_none_or(|(fetched, _)| fetched != step) {
            tokens.fetch(&mut self.job.data.train, self.job.settings.micro_steps(step) as usize)?;
            self.fetched = Some((step, self.job.data.train.state()));
        }
        metrics.data_ms = Some(reads.elapsed().as_secs_f32() * 1e3);
        let scalars = tokens.scalars(self.job.settings, step);
        if let Some(note) = nothing_counts(step, &scalars, tokens.targets()) {
            self.job.observer.note(&note);
        }
        let mut refused = None;
        for number in self.job.session.begin_step(tokens.count()) {
            let scalars = Scalars { micro_step: number as u32, ..scalars };
            if let Err(error) = self.job.session.step(tokens.micro_step(number), &scalars) {
                refused = Some((error, scalars));
                break;
            }
        }
        if let Some((error, scalars)) = refused {
            self.make_bad(step, error, &scalars)?;
        }
        let tokens = &self.batches[(step % 2) as usize];
        (metrics.lr, metrics.tokens) = (scalars.lr, Some(tokens.real()));
        let pending = self.job.session.start_update(&scalars)?;
        if pending.is_ready() || step.is_multiple_of(ROUTING_EVERY) {
            metrics.router = match self.job.session.routing() {
                // what is wrong on one rank shows in the loss, by which all of them judge the step
                Err(_) if !self.together.place().is_alone() => Vec::new(),
                read => read?,
            };
        }
        let position = self.fetched.map_or(self.position, |(_, position)| position);
        Ok(InFlight { metrics, scalars, position, pending })
    }

    /// Waits for the step in flight, if one is; gives the next step if the run went back to a checkpoint. The last
    /// step's line waits for its validation.
    fn settle(&mut self, in_flight: &mut Option<InFlight>, last: bool) -> Result<Option<u64>> {
        let landed = in_flight.take().map(|step| self.land(step, !last)).transpose()?;
        self.together.in_step(None);
        match landed.flatten() {
            Some(bad) => self.skip(bad),
            None => Ok(None),
        }
    }

    /// Waits for a step and logs it; a NaN or infinite one is given back.
    fn land(&mut self, step: InFlight, log: bool) -> Result<Option<Bad>> {
        let InFlight { mut metrics, scalars, position, pending } = step;
        let rewards = self.job.session.finish_rewards(&pending);
        let finished = rewards.and_then(|rewards| Ok((rewards, self.job.session.finish_update(pending)?)));
        let (rewards, (loss, norm)) = match finished {
            Ok(results) => results,
            Err(error) => {
                let mut bad = self.bad_by_error(metrics.step, error)?;
                (bad.metrics.val_loss, bad.metrics.eval) = (metrics.val_loss, metrics.eval);
                return Ok(Some(bad));
            }
        };
        let now = Instant::now();
        let seconds = now.duration_since(self.mark).as_secs_f32();
        self.mark = now;
        (metrics.loss, metrics.grad_norm) = (loss, Some(norm));
        metrics.set_rewards(rewards);
        metrics.ms = seconds * 1e3;
        metrics.tokens_per_s = metrics.tokens.unwrap_or(0) as f32 / seconds;
        if !(loss.is_finite() && norm.is_finite()) {
            return Ok(Some(Bad { metrics, scalars, position }));
        }
        self.note_spike(&mut metrics, position);
        self.summary.last_loss = loss;
        (self.landed, self.position, self.bad_in_a_row) = (metrics.step + 1, position, 0);
        self.forget_rollback();
        if log {
            self.log(&metrics);
        } else {
            self.unlogged = Some(metrics.clone());
        }
        if let Some(warning) = self.balance.add(&metrics.router, !log) {
            self.job.observer.note(&format!("step {:>5}  {warning}", metrics.step));
        }
        if self.choices == 0 {
            self.keep_choices();
        }
        Ok(None)
    }

    /// Writes the algorithms that the engine chose, if there are new ones.
    fn keep_choices(&mut self) {
        let choices = self.job.session.engine().choices();
        if choices.len() == self.choices || !self.together.leads() {
            return;
        }
        match provenance::write_algorithms(self.job.folder.path(), &choices) {
            Ok(()) => self.choices = choices.len(),
            Err(error) => self.job.observer.note(&format!("the chosen algorithms are not kept: {error}")),
        }
    }

    /// Logs a step. Where the disk refuses, the line is kept and written with the next one.
    fn log(&mut self, metrics: &Metrics) {
        match self.job.folder.log(metrics) {
            Ok(()) => self.log_failed = false,
            Err(error) if !self.log_failed => {
                self.log_failed = true;
                let step = metrics.step;
                self.job.observer.note(&format!(
                    "step {step:>5}  the log cannot be written, its lines are kept in memory: {error}"
                ));
            }
            Err(_) => {}
        }
        self.job.observer.step(metrics);
    }

    /// The state of the run, for a checkpoint.
    fn state(&mut self) -> Result<TrainerState> {
        let scales = self.job.session.scales()?;
        Ok(TrainerState {
            step: self.landed,
            data: serde_json::to_value(self.position).unwrap_or_default(),
            rng: json!({ "seed": self.job.settings.seed, "kind": "counted by step and sample" }),
            best: self.best,
            validated: self.validated.filter(|validated| validated.step == self.landed),
            bad_in_a_row: self.bad_in_a_row,
            rolled_back_from: self.rolled_back_from,
            scale_bits: scales.into_iter().map(f32::to_bits).collect(),
            settings: self.job.state.settings.clone(),
        })
    }

    /// Whether a validation loss is the lowest so far, which is then remembered.
    fn improves(&mut self, step: u64, loss: Option<f32>) -> bool {
        let Some(val_loss) = loss.filter(|loss| loss.is_finite()) else { return false };
        self.validated = Some(Best { step, val_loss });
        // measured again after a resume it is the same value, and a best still
        let better = self.best.is_none_or(|best| val_loss < best.val_loss || best.step == step);
        if better {
            self.best = Some(Best { step, val_loss });
        }
        better && step > 0
    }
}
