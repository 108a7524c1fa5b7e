//! Saves of a run with several ranks: the one that leads gets what the others have, and writes it.

use super::memory::Memory;
use super::plan::Plan;
use super::{Observer, RunFolder, Saver};
use crate::format::checkpoint::TrainerState;
use crate::session::Session;
use crate::{Error, Result};
use ironhorse_core::{HostMemory, Slot};
use std::path::PathBuf;
use std::time::Instant;

impl Saver {
    /// [`Saver::begin`](super::Saver::save) of all ranks: a thread of the leader writes while they go on.
    pub(super) fn begin_together(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let began = Instant::now();
        let room = if session.place().leads() { self.plan.check_space() } else { Ok(()) };
        let ready = room.and_then(|()| self.copy_memory(session, observer));
        let Some(mut memory) = agreed(session, ready)? else { return Ok(()) };
        let copied = session.snapshot(memory.as_mut());
        if copied.is_err() || !session.place().leads() {
            self.memory = Memory::Ready(memory);
            return copied;
        }
        observer.copied(state.step, memory.bytes().len() as u64, began.elapsed());
        self.stats.held_up_ms = self.stats.held_up_ms.max(began.elapsed().as_secs_f64() * 1e3);
        self.write_copy(memory, began, state, folder);
        Ok(())
    }

    /// [`Saver::save_last`] of all ranks: nobody ends before the leader has written, because launchers take the first process that
    /// ends for a reason to end the others.
    pub(super) fn save_last_together(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<PathBuf> {
        let began = Instant::now();
        let (mut written, mut place, mut copied) = (None, self.plan.place(state.step), false);
        let saved = self.write_together(session, &self.plan, |plan, memory| {
            copied = true;
            let read = |pool, index, bytes: &mut Vec<u8>| plan.tensor(memory, pool, index, bytes);
            let write = || plan.write(state, folder.log_handle(), read);
            let tried = write().or_else(|_| write());
            let Err(error) = tried.map(|done| written = Some(done)) else { return Ok(()) };
            let other = plan.other_places(state.step).into_iter();
            place = other
                .map(|other| plan.write_to(&other, state, read).map(|_| other))
                .find_map(Result::ok)
                .ok_or(error)?;
            Ok(())
        });
        let done = saved.is_ok() && (copied || !session.place().leads());
        let all = session.ranks().share(&[u8::from(done)])?;
        saved?;
        if all.first().is_none_or(|leader| leader != &[1]) {
            let what = "the last checkpoint of rank 0";
            return Err(Error::input(what, "not written", "a disk with room for it"));
        }
        self.last_step = Some(state.step);
        if let Some(written) = written {
            self.written(state.step, &written, began, folder, observer);
        } else if session.place().leads() {
            let meant = self.plan.place(state.step);
            let text = format!(
                "the checkpoint is at {} instead; move it to {} to resume from it",
                place.display(),
                meant.display()
            );
            observer.note(&text);
        }
        Ok(place)
    }

    /// Writes a copy of the state that all ranks give, and waits for it.
    pub(super) fn write_together(
        &self,
        session: &mut Session,
        plan: &Plan,
        write: impl FnOnce(&Plan, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let ready = self.new_memory(session);
        let Some(mut memory) = agreed(session, ready)? else { return Ok(()) };
        session.snapshot(memory.as_mut())?;
        if session.place().leads() { write(plan, memory.bytes()) } else { Ok(()) }
    }

    /// Memory for a copy: the leader's has room for all.
    fn new_memory(&self, session: &mut Session) -> Result<Box<dyn HostMemory>> {
        let bytes: usize = self.slots.iter().map(Slot::bytes).sum();
        Ok(session.engine().host_memory()(if session.place().leads() { bytes } else { 0 })?)
    }

    fn copy_memory(
        &mut self,
        session: &mut Session,
        observer: &mut dyn Observer,
    ) -> Result<Box<dyn HostMemory>> {
        match self.take_memory(observer) {
            Some(memory) => Ok(memory),
            None => self.new_memory(session),
        }
    }
}

/// Goes on if the leader can; its failure is an error here, and nothing to the others.
fn agreed(session: &Session, ready: Result<Box<dyn HostMemory>>) -> Result<Option<Box<dyn HostMemory>>> {
    let all = session.ranks().share(&[u8::from(ready.is_ok())])?;
    match all.iter().all(|one| one.first() == Some(&1)) {
        true => ready.map(Some),
        false => ready.map(|_| None),
    }
}
