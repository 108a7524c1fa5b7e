//! How a run ends: all steps made, stopped, or by an error.

use super::bad_step::diverged;
use super::measure::Validated;
use super::{Ending, InFlight, Trainer};
use crate::Result;
use crate::run::StopReason;
use crate::run::metrics::{Ended, EndedBy, Graded, Metrics};

impl Trainer<'_> {
    /// Ends a run that is to stop: the step in flight is made, a checkpoint is written.
    pub(super) fn stop(&mut self, reason: StopReason) -> Result<()> {
        self.summary.ending = Ending::Stopped(reason);
        self.save_last()?;
        self.finish_folder();
        Ok(())
    }

    /// Ends a run whose steps are all made: last validation and grades, last checkpoint, sample.
    pub(super) fn end(&mut self) -> Result<()> {
        let steps = self.job.settings.steps;
        let Validated::Loss(loss) = self.validate(steps)? else { return self.stop_at_end() };
        let is_finite = loss.is_none_or(f32::is_finite);
        let Some(graded) = (if is_finite { self.grade(steps) } else { Some(Graded::new()) }) else {
            return self.stop_at_end();
        };
        self.summary.last_val_loss = loss;
        self.improves(steps, loss);
        if let Some(metrics) = self.unlogged.take() {
            let val_reward_accuracy = self.val_accuracy;
            self.log(&Metrics { val_loss: loss, val_reward_accuracy, eval: graded, ..metrics });
        }
        self.save_last()?;
        if let Some(loss) = self.summary.last_val_loss.filter(|loss| !loss.is_finite()) {
            self.finish_folder();
            let found = self.find_non_finite(steps.saturating_sub(1));
            return Err(diverged(steps, loss, f32::NAN, found));
        }
        self.sample(steps);
        self.finish_folder();
        Ok(())
    }

    /// What ends the run if the validation before `step` was one too many without a new lowest loss. The earlier ones are
    /// counted in the log, which a resumed run has cut back to its checkpoint, so that none is counted twice.
    pub(super) fn out_of_patience(&self, step: u64, loss: Option<f32>) -> Option<Ended> {
        let (val_loss, best) = (loss?, self.best?);
        let in_vain = match best.step == step {
            true => 0,
            false => self.job.folder.validations_after(best.step) + 1,
        };
        let patience = self.job.settings.patience;
        (patience > 0 && in_vain >= patience).then_some(Ended { by: EndedBy::Patience, val_loss, best })
    }

    /// Ends a run before its last step: its last line says why, then last checkpoint and sample.
    pub(super) fn give_up(&mut self, step: u64, ended: Ended) -> Result<()> {
        self.summary.ending = Ending::Patience;
        self.summary.last_val_loss = Some(ended.val_loss);
        if let Err(error) = self.job.folder.log_end(ended) {
            self.job.observer.note(&format!("the log does not say why the run ended: {error}"));
        }
        let _ = self.grade(step); // for the summary; a request to stop leaves it out
        self.save_last()?;
        self.sample(step);
        self.finish_folder();
        Ok(())
    }

    /// Ends a run that is to stop during its last measurements.
    fn stop_at_end(&mut self) -> Result<()> {
        if let Some(metrics) = self.unlogged.take() {
            self.log(&metrics); // written again with the measurements when the run is resumed
        }
        let reason = self.job.control.stop_reason().unwrap_or(StopReason::Asked(0));
        self.stop(reason)
    }

    fn save_last(&mut self) -> Result<()> {
        self.keep_choices();
        let state = self.state()?;
        let saved = self.job.saver.save_last(self.job.session, &state, self.job.folder, self.job.observer);
        self.unsaved = saved.is_err();
        self.summary.checkpoint = saved?;
        Ok(())
    }

    /// Writes the rest of the log and the loss curve; the run is complete without them.
    pub(super) fn finish_folder(&mut self) {
        if let Err(error) = self.job.folder.flush() {
            self.job.observer.note(&format!("the last lines of the log are not written: {error}"));
        }
        if let Err(error) = self.job.folder.curve() {
            self.job.observer.note(&format!("no loss curve: {error}"));
        }
    }

    /// After an error: saves the progress since the last checkpoint.
    pub(super) fn rescue(&mut self, in_flight: Option<InFlight>) {
        if let Some(step) = in_flight {
            // whether it was good or bad, the weights that it left are saved
            let landed = self.land(step, true);
            if !matches!(landed, Ok(None)) {
                let _ = self.job.session.clear_halt();
            }
        }
        if let Some(metrics) = self.unlogged.take() {
            self.log(&metrics); // its validation failed
        }
        self.finish_folder();
        let done = self.landed == 0 || self.unsaved || self.job.saver.last_step() == Some(self.landed);
        // all ranks do the same: what the leader must
        if self.together.of_leader(done).unwrap_or(true) {
            self.job.saver.finish(self.job.session, self.job.folder, self.job.observer);
            return;
        }
        // a resumed run may again skip as many bad steps
        (self.bad_in_a_row, self.rolled_back_from) = (0, None);
        match self.save_last() {
            Ok(()) => {
                let place = self.summary.checkpoint.display();
                self.job
                    .observer
                    .note(&format!("the run as it was after step {} is kept in {place}", self.landed));
            }
            Err(error) => {
                self.job.observer.note(&format!("the state of the run could not be saved: {error}"))
            }
        }
    }
}
