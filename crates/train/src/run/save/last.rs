//! The last save of a run, which must not be lost.

use super::{Observer, RunFolder, Saver};
use crate::Result;
use crate::format::checkpoint::{Checkpoint, TrainerState};
use crate::session::Session;
use ironhorse_core::Pool;
use std::path::PathBuf;
use std::time::Instant;

impl Saver {
    /// The last save of a run, which must not be lost: waits, tries twice, then elsewhere. Gives where it is.
    pub(in crate::run) fn save_last(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<PathBuf> {
        self.finish(session, folder, observer);
        let place = self.plan.place(state.step);
        // written on the way; one of a stop in the last validation does not have its loss yet
        let same = || Checkpoint::manifest(&place).is_ok_and(|manifest| manifest.state == *state);
        let here = session.place().leads() && self.last_step == Some(state.step) && same();
        let known = session.ranks().share(&[u8::from(here)])?;
        if known.first().is_some_and(|leader| leader == &[1]) {
            return Ok(place);
        }
        if !session.place().is_alone() {
            return self.save_last_together(session, state, folder, observer);
        }
        let mut attempt = |saver: &mut Self, observer: &mut dyn Observer| -> Result<()> {
            let began = Instant::now();
            let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
            let written = saver.plan.write(state, folder.log_handle(), read);
            let written = written.inspect_err(|_| saver.stats.failed += 1)?;
            saver.written(state.step, &written, began, folder, observer);
            Ok(())
        };
        let Err(error) = attempt(self, observer) else { return Ok(place) };
        if attempt(self, observer).is_ok() {
            return Ok(place);
        }
        observer.note(&format!("step {:>5}  not saved: {error}", state.step));
        for place in self.plan.other_places(state.step) {
            let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
            if self.plan.write_to(&place, state, read).is_ok() {
                observer.note(&format!(
                    "the checkpoint is at {} instead; move it to {} to resume from it",
                    place.display(),
                    self.plan.place(state.step).display()
                ));
                return Ok(place);
            }
        }
        Err(error)
    }
}
