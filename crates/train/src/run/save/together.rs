//! Saves of a run with several ranks: all of them write, each what it has, and the one that leads completes the checkpoint. Adapters,
//! which are small, black boxes and what cannot be written to the run's folder are gathered and written by the one that leads.

use super::memory::Memory;
use super::plan::Plan;
use super::{Observer, RunFolder, Saver, Writing};
use crate::format::atomic::NewFolder;
use crate::format::checkpoint::{Report, Share, TrainerState, Written};
use crate::session::Session;
use crate::{Error, Result};
use ironhorse_core::{EngineExt, HostMemory, Slot};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Instant;

/// What this rank is writing of a checkpoint.
pub(super) struct RankPart {
    began: Instant,
    state: TrainerState,
    /// On the rank that leads, the folder that all write into; `None` on the others.
    folder: Option<NewFolder>,
    work: Work,
}

/// How a rank writes its part.
enum Work {
    /// A thread writes it, from a copy.
    Thread(JoinHandle<(Box<dyn HostMemory>, Result<Report>)>),
    /// It was written while the step waited.
    Done(Result<Report>),
}

/// What a rank says before all of them write.
#[derive(Serialize, Deserialize)]
struct Ready {
    /// The folder that all write into; empty unless this rank leads.
    at: PathBuf,
    /// Why this rank cannot write.
    error: Option<String>,
    /// It writes while the step waits although it was not asked to; said once.
    waits: bool,
}

impl Saver {
    /// [`Saver::begin`](super::Saver::save) of all ranks: threads write while they go on.
    pub(super) fn begin_together(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        if self.plan.adapter.is_some() {
            return self.begin_gathered(session, state, folder, observer);
        }
        let began = Instant::now();
        let leads = session.place().leads();
        let (shares, slots): (Vec<Share>, Vec<Slot>) = session.shares()?.into_iter().unzip();
        let place = self.plan.place(state.step);
        let made = if leads { self.plan.begin_shared(&place).map(Some) } else { Ok(None) };
        let memory = self.own_memory(session, &slots, observer);
        let at = made.as_ref().ok().and_then(|made| made.as_ref()).map(|made| made.at().to_owned());
        let error = made.as_ref().err().map(ToString::to_string);
        let waits = memory.is_none() && !self.settings.sync && !std::mem::replace(&mut self.said, true);
        let all = shared(session, &Ready { at: at.unwrap_or_default(), error, waits })?;
        for (rank, _) in all.iter().enumerate().filter(|(_, ready)| leads && ready.waits) {
            observer.note(&format!(
                "rank {rank}: has too little host memory for a copy of its part, so steps wait until it is written (as with \
                 --save-sync); ranks/rank-{rank}.log says how much"
            ));
        }
        if let Some(error) = said_by(all.iter().map(|ready| ready.error.as_deref())) {
            self.memory = memory.map_or(Memory::None, Memory::Ready);
            return if leads { Err(made.err().unwrap_or(Error::Unsupported(error))) } else { Ok(()) };
        }
        let (made, at) = (made?, all.into_iter().next().map_or_else(PathBuf::new, |ready| ready.at));
        let (plan, of_step, log) = (self.plan.clone(), state.clone(), folder.log_handle());
        let sync_log = move || {
            if let Some(log) = log {
                let _ = log.sync_data(); // the steps before a checkpoint must not be missing from the log after a power cut
            }
        };
        let work = match memory {
            Some(mut memory) => {
                let copied = session.engine().snapshot(&slots, memory.as_mut());
                observer.copied(state.step, memory.bytes().len() as u64, began.elapsed());
                self.memory = Memory::Away;
                Work::Thread(std::thread::spawn(move || {
                    sync_log();
                    // what could not be copied must reach the leader as such
                    let written = copied.map_err(Error::from);
                    let written =
                        written.and_then(|()| plan.write_copied(&at, &of_step, &shares, memory.bytes()));
                    (memory, written)
                }))
            }
            None => {
                sync_log();
                Work::Done(plan.write_shares(&at, &of_step, &shares, |number| {
                    let mut bytes = vec![0; slots[number].bytes()];
                    session.engine().read_bytes(slots[number], &mut bytes)?;
                    Ok(Cow::Owned(bytes))
                }))
            }
        };
        self.stats.held_up_ms = self.stats.held_up_ms.max(began.elapsed().as_secs_f64() * 1e3);
        self.parts = Some(RankPart { began, state: state.clone(), folder: made, work });
        Ok(())
    }

    /// Whether what this rank writes of a checkpoint is written.
    pub(in crate::run) fn has_written(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| match &parts.work {
            Work::Thread(thread) => thread.is_finished(),
            Work::Done(_) => true,
        })
    }

    /// Tells the leader what each rank has written, once all have; a thread of the leader completes the checkpoint. All ranks call
    /// this at the same time; without a save under way it does nothing.
    pub(in crate::run) fn collect(&mut self, session: &Session, observer: &mut dyn Observer) -> Result<()> {
        let Some(RankPart { began, state, folder, work }) = self.parts.take() else { return Ok(()) };
        let report = match work {
            Work::Done(report) => report.map_err(|error| error.to_string()),
            Work::Thread(thread) => match thread.join() {
                Ok((memory, report)) => {
                    self.memory = Memory::Ready(memory);
                    report.map_err(|error| error.to_string())
                }
                Err(_) => {
                    self.memory = Memory::Unmade;
                    Err("the thread that wrote it ended unexpectedly".to_owned())
                }
            },
        };
        let all = shared(session, &report)?;
        let of_rank = |(rank, report): (usize, std::result::Result<Report, String>)| {
            report.map_err(|error| format!("rank {rank}: {error}"))
        };
        let reports: std::result::Result<Vec<Report>, String> =
            all.into_iter().enumerate().map(of_rank).collect();
        let step = state.step;
        match (reports, folder) {
            (Ok(reports), Some(folder)) => {
                let plan = self.plan.clone();
                let thread = std::thread::spawn(move || (None, plan.finish_shared(folder, &state, &reports)));
                self.writing = Some(Writing { step, began, thread });
            }
            (Err(error), Some(_)) => self.failed(step, &error, observer),
            // the leader tries again, and tells this one
            (_, None) => {}
        }
        Ok(())
    }

    /// The same where the leader alone writes: adapters.
    fn begin_gathered(
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

    /// [`Saver::save_last`] of all ranks: nobody ends before everything is written, because launchers take the first process that
    /// ends for a reason to end the others.
    pub(super) fn save_last_together(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<PathBuf> {
        for _ in 0..2 {
            if self.plan.adapter.is_some() {
                break; // gathered below
            }
            let began = Instant::now();
            let begun = self.begin_together(session, state, folder, observer);
            if let Err(error) = begun.and_then(|()| self.collect(session, observer))
                && matches!(error, Error::Core(ironhorse_core::Error::RankLost { .. }))
            {
                return Err(error);
            }
            let written = self.writing.take().and_then(|writing| writing.thread.join().ok());
            let written: Option<Written> = written.and_then(|(_, written)| written.ok());
            let done = session.ranks().share(&[u8::from(written.is_some())])?;
            if done.first().is_some_and(|leader| leader == &[1]) {
                self.last_step = Some(state.step);
                if let Some(written) = written {
                    self.written(state.step, &written, began, folder, observer);
                }
                return Ok(self.plan.place(state.step));
            }
        }
        self.save_last_gathered(session, state, folder, observer)
    }

    /// The same where the leader alone writes, elsewhere if it must.
    fn save_last_gathered(
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
            let text = "rank 0 could not write the last checkpoint; make room on its disk";
            return Err(Error::Unsupported(text.into()));
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

    /// Memory for what this rank has; `None` where it writes while the step waits.
    fn own_memory(
        &mut self,
        session: &mut Session,
        slots: &[Slot],
        observer: &mut dyn Observer,
    ) -> Option<Box<dyn HostMemory>> {
        if matches!(self.memory, Memory::Unmade) {
            self.make_memory(session, observer);
        }
        let bytes: usize = slots.iter().map(Slot::bytes).sum();
        self.take_memory(observer).filter(|memory| memory.bytes().len() == bytes)
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

/// What each rank says, in the order of ranks.
fn shared<T: serde::Serialize + serde::de::DeserializeOwned>(session: &Session, mine: &T) -> Result<Vec<T>> {
    let unreadable = |error: serde_json::Error| {
        Error::from(ironhorse_core::Error::Program(format!("a message between ranks: {error}")))
    };
    let text = serde_json::to_vec(mine).map_err(unreadable)?;
    let all = session.ranks().share(&text)?;
    all.iter().map(|text| serde_json::from_slice(text).map_err(unreadable)).collect()
}

/// Goes on if all can; what keeps a rank from it is an error of the one that leads, and nothing to the others.
fn agreed(session: &Session, ready: Result<Box<dyn HostMemory>>) -> Result<Option<Box<dyn HostMemory>>> {
    let all = shared(session, &ready.as_ref().err().map(ToString::to_string))?;
    match said_by(all.iter().map(Option::as_deref)) {
        None => ready.map(Some),
        Some(error) if session.place().leads() => Err(ready.err().unwrap_or(Error::Unsupported(error))),
        Some(_) => Ok(None),
    }
}

/// The first error of a rank, with the rank.
fn said_by<'a>(errors: impl Iterator<Item = Option<&'a str>>) -> Option<String> {
    errors.enumerate().find_map(|(rank, error)| Some(format!("rank {rank}: {}", error?)))
}
