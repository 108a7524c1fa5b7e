//! What a run measures between steps: the validation loss, the accuracy on tasks, and samples.

use super::{Ending, Trainer};
use crate::eval::{Scorer, multiple_choice};
use crate::generate::{Request, generate};
use crate::run::metrics::Graded;
use crate::session::{Batch, BatchPairs, Session};
use crate::{Error, Result};
use ironhorse_core::Scalars;
use std::ops::ControlFlow;
use std::time::Instant;

/// What stands between the samples of several prompts.
const BETWEEN_SAMPLES: &str = "\n\n--------\n\n";

/// What a validation gave.
pub(super) enum Validated {
    /// The loss; `None` if there is nothing to validate on.
    Loss(Option<f32>),
    /// The run is to stop.
    Stopped,
}

/// The loss of a batch and, of pairs, the share whose chosen text has the larger reward.
fn evaluated(session: &mut Session, batch: Batch<'_>) -> Result<(f32, f32)> {
    match batch.pairs {
        Some(_) => session.evaluate_pairs(batch).map(|(loss, rewards)| (loss, rewards.accuracy)),
        None => session.evaluate_batch(batch).map(|loss| (loss, 0.0)),
    }
}

impl Trainer<'_> {
    /// The first NaN or infinity of a step, without asking other ranks.
    fn search_alone(&mut self, step: u64) -> Option<String> {
        self.search_own(step).map(|(_, found)| found)
    }

    /// The mean loss over what counts in the first batches of the validation data; the same batches every time.
    pub(super) fn validate(&mut self, step: u64) -> Result<Validated> {
        let Some(val) = &mut self.job.data.val else { return Ok(Validated::Loss(None)) };
        let batches = self.job.settings.val_batches.min(val.len_batches());
        if batches == 0 {
            return Ok(Validated::Loss(None));
        }
        val.rewind();
        let tokens = self.job.session.eval_tokens()?;
        let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; tokens]);
        let packed = val.is_packed();
        let (mut measured, mut refused, mut stopped) = (Vec::new(), None, false);
        let ironhorse_core::Place { rank, world } = self.together.place();
        for number in 0..batches {
            if self.job.control.stop_reason().is_some() {
                stopped = true;
                break;
            }
            val.next_batch([&mut x, &mut y, &mut positions])?;
            if number % world as u64 != rank as u64 {
                continue;
            }
            let pairs = val.pairs().map(|(bounds, reference)| BatchPairs { bounds, reference });
            let batch = Batch { x: &x, y: &y, positions: packed.then_some(&positions[..]), pairs };
            match evaluated(self.job.session, batch) {
                Ok((loss, accuracy)) => {
                    let share = f64::from(batch.counting(Scalars::default()).counted);
                    measured.push([f64::from(loss), f64::from(accuracy), share].map(f64::to_bits));
                }
                // a router refuses NaN or infinite logits: this is how a diverged mixture of experts shows
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let (packed, failed) = (val.is_pairs(), refused.is_some());
        if let Some(error) = refused
            && self.search_alone(step.saturating_sub(1)).is_none()
        {
            return Err(error);
        }
        let all = self.together.share(&(stopped, failed, measured))?;
        if all.iter().any(|(stopped, ..)| *stopped) {
            return Ok(Validated::Stopped);
        }
        if all.iter().any(|(_, failed, _)| *failed) {
            return Ok(Validated::Loss(Some(f32::NAN)));
        }
        let (mut sum, mut right, mut counted) = (0.0_f64, 0.0_f64, 0.0_f64);
        for number in 0..batches as usize {
            let Some(measured) = all[number % world].2.get(number / world) else { continue };
            let [loss, accuracy, share] = measured.map(f64::from_bits);
            sum += loss * share;
            right += accuracy * share;
            counted += share;
        }
        if counted == 0.0 {
            self.job
                .observer
                .note(&format!("step {step:>5}  no target of the validation data counts: no loss"));
            return Ok(Validated::Loss(None));
        }
        self.val_accuracy = packed.then_some((right / counted) as f32);
        Ok(Validated::Loss(Some((sum / counted) as f32)))
    }

    /// Grades the tasks with the weights as they are; if that fails, the run continues without. `None` if the run is to
    /// stop.
    pub(super) fn grade(&mut self, step: u64) -> Option<Graded> {
        let graded = if self.together.leads() { self.graded() } else { Ok(Graded::new()) };
        let graded = match self.of_leader(graded) {
            Err(Error::Stopped) => return None,
            Err(error) => {
                self.job.observer.note(&format!("step {step:>5}  not graded: {error}"));
                Graded::new()
            }
            Ok(graded) => graded,
        };
        self.summary.eval.clone_from(&graded);
        self.mark = Instant::now();
        Some(graded)
    }

    fn graded(&mut self) -> Result<Graded> {
        if self.job.data.tasks.is_empty() {
            return Ok(Graded::new());
        }
        let control = self.job.control;
        let mut scorer = Scorer::new(self.job.session)?;
        let mut graded = Graded::new();
        for task in &self.job.data.tasks {
            let go_on = &mut |_: usize| match control.stop_reason() {
                Some(_) => ControlFlow::Break(()),
                None => ControlFlow::Continue(()),
            };
            let (accuracies, _) = multiple_choice(&mut scorer, &task.examples, go_on)?;
            graded.insert(task.name.clone(), accuracies);
        }
        Ok(graded)
    }

    /// Whether a sample is to be drawn before this step.
    pub(super) fn samples_at(&self, step: u64) -> bool {
        let every = self.job.settings.sample_every;
        every > 0 && step > 0 && step.is_multiple_of(every) && !self.job.folder.has_sample(step)
    }

    /// Writes a sample and the loss curve; if that fails, the run continues without. False if the run is to stop.
    pub(super) fn sample(&mut self, step: u64) -> bool {
        let drawn = if self.together.leads() { self.draw() } else { Ok(Some(String::new())) };
        match self.of_leader(drawn.and_then(|text| text.ok_or(Error::Stopped))) {
            Err(Error::Stopped) => return false,
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                if let Err(error) = self.job.folder.sample(step, &text) {
                    self.job.observer.note(&format!("the sample after step {step} is not kept: {error}"));
                }
                self.job.observer.sample(step, &text);
                self.summary.sample = text;
            }
            Err(error) => self.job.observer.note(&format!("no sample after step {step}: {error}")),
        }
        if let Err(error) = self.job.folder.curve() {
            self.job.observer.note(&format!("no loss curve after step {step}: {error}"));
        }
        true
    }

    /// What the leader measured; the others only learn whether it stopped.
    fn of_leader<T: Default>(&mut self, measured: Result<T>) -> Result<T> {
        let stopped = matches!(measured, Err(Error::Stopped));
        match self.together.of_leader(stopped)? {
            true if !self.together.leads() => Err(Error::Stopped),
            _ => measured,
        }
    }

    /// Draws a sample of every prompt; empty when none is wanted, `None` if the run is to stop.
    pub(super) fn draw(&mut self) -> Result<Option<String>> {
        let mut drawn = Vec::new();
        if self.job.settings.sample_tokens > 0 {
            for index in 0..self.job.data.prompts.len() {
                match self.continued(index)? {
                    Some(text) => drawn.push(text),
                    None => return Ok(None),
                }
            }
        }
        Ok(Some(drawn.join(BETWEEN_SAMPLES)))
    }

    /// A prompt with what follows it; `None` if the run is to stop.
    fn continued(&mut self, index: usize) -> Result<Option<String>> {
        let (settings, data, control) = (self.job.settings, &*self.job.data, self.job.control);
        let (Some(tokenizer), Some(prompt)) = (data.tokenizer.as_ref(), data.prompts.get(index)) else {
            return Ok(Some(String::new()));
        };
        let request = Request {
            prompt: &prompt.ids,
            vocab: tokenizer.vocab_size(),
            tokens: settings.sample_tokens,
            context: Some(data.train.seq()),
            stop: &data.stop,
            sampler: settings.sampler,
        };
        // nothing waits for the end of the last sample
        let done = self.landed == settings.steps || self.summary.ending == Ending::Patience;
        let drawn = generate(self.job.session, &request, |_| match control.stop_reason() {
            Some(_) if !done => Err(Error::Stopped),
            _ => Ok(()),
        });
        match drawn {
            Ok(tokens) => Ok(Some(prompt.text.clone() + &tokenizer.decode_lossy(&tokens)?)),
            Err(Error::Stopped) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
