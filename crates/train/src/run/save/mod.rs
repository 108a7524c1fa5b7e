//! Writes checkpoints asynchronously: the step waits only for a copy to host memory, a thread writes it.

mod keep;
mod last;
mod memory;
mod plan;
mod together;

use self::memory::Memory;
use self::plan::Plan;
use self::together::RankPart;
use super::{Observer, RunFolder};
use crate::Result;
use crate::format::checkpoint::{PART_BYTES, TrainerState, Written};
use crate::format::tokenizer::KeptTokenizer;
use crate::session::Session;
use ironhorse_core::{HostMemory, Pool, Slot};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// When checkpoints are written and how many are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SaveSettings {
    /// Every so many steps; 0 turns it off.
    pub every: u64,
    /// Every so many minutes; 0 turns it off.
    pub minutes: f64,
    /// The newest that are kept, besides the best; 0 keeps all.
    pub keep: usize,
    /// Save every new lowest validation loss, whatever part of the time that takes.
    pub every_best: bool,
    /// Always wait until a checkpoint is written.
    pub sync: bool,
    /// The most bytes of tensors in one file.
    pub part_bytes: u64,
}

impl Default for SaveSettings {
    fn default() -> Self {
        Self { every: 0, minutes: 10.0, keep: 2, every_best: false, sync: false, part_bytes: PART_BYTES }
    }
}

/// What saving has cost so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SaveStats {
    /// Checkpoints written.
    pub count: u64,
    /// Those that failed and were tried again later.
    pub failed: u64,
    /// Bytes of the last one.
    pub bytes: u64,
    /// The longest wait of a step, in milliseconds: the copy to host memory, and the wait for that memory where it
    /// was still being allocated.
    pub held_up_ms: f64,
    /// All waits of steps together, in milliseconds, waiting for earlier saves included.
    pub held_up_total_ms: f64,
    /// Seconds the last one took from the copy to its rename.
    pub write_s: f64,
}

/// Why a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// `--save-every`: exactly at these steps, so it waits for the one before to be written.
    Steps,
    /// `--save-minutes`: put off while the one before is being written.
    Minutes,
    /// A signal or a file asked for it.
    Asked,
    /// The validation loss is the lowest so far; unless all of them are to be saved, only as long as saving takes a small share
    /// of the time.
    Best,
}

/// After a failed save the next try comes after this long, or when the next one is due.
const RETRY: Duration = Duration::from_secs(60);
/// How often to look for the file `SAVE`.
const LOOK: Duration = Duration::from_secs(1);
/// A new best is saved if saves take less than 1/BEST_SHARE of the time.
const BEST_SHARE: u32 = 20;
/// A checkpoint being written.
struct Writing {
    step: u64,
    began: Instant,
    thread: JoinHandle<(Returned, Result<Written>)>,
}

/// The memory of the copy, from a thread that had it.
type Returned = Option<Box<dyn HostMemory>>;

/// Writes the checkpoints of a run.
pub struct Saver {
    settings: SaveSettings,
    plan: Arc<Plan>,
    slots: Vec<Slot>,
    memory: Memory,
    writing: Option<Writing>,
    /// What this rank is writing of a checkpoint that all write together.
    parts: Option<RankPart>,
    /// Whether this rank has said that it writes while steps wait.
    said: bool,
    /// When the last one was begun, or the run.
    last: Instant,
    /// Steps of the last one that was begun.
    last_step: Option<u64>,
    retry_at: Option<Instant>,
    looked: Instant,
    asked: bool,
    stats: SaveStats,
}

impl Saver {
    /// For a run in this folder; `step` is where it starts.
    pub fn new(
        session: &Session,
        run: &Path,
        tokenizer: Option<KeptTokenizer>,
        settings: SaveSettings,
        step: u64,
    ) -> Result<Self> {
        let program = session.train_program()?;
        let slots = session.state_slots()?;
        let mut start = 0;
        let pools = slots
            .iter()
            .map(|slot| {
                let here = start;
                start += slot.bytes();
                (slot.pool, here)
            })
            .collect();
        let plan = Plan {
            run: run.to_owned(),
            config: *session.config(),
            adapter: session.base().cloned(),
            precision: program.precision(),
            params: program.params().to_vec(),
            pools,
            tokenizer,
            part_bytes: settings.part_bytes,
        };
        Ok(Self {
            settings,
            plan: Arc::new(plan),
            slots,
            memory: if settings.sync { Memory::None } else { Memory::Unmade },
            writing: None,
            parts: None,
            said: false,
            last: Instant::now(),
            last_step: (step > 0).then_some(step),
            retry_at: None,
            looked: Instant::now(),
            asked: false,
            stats: SaveStats::default(),
        })
    }

    /// What saving has cost so far.
    pub fn stats(&self) -> &SaveStats {
        &self.stats
    }

    /// The step of the newest checkpoint that was begun.
    pub(super) fn last_step(&self) -> Option<u64> {
        self.last_step
    }

    /// Begins to make the snapshot's memory, which can take seconds, unless there is too little for it.
    pub(super) fn prepare(&mut self, session: &mut Session, observer: &mut dyn Observer) {
        if !session.place().is_alone() && self.plan.adapter.is_some() {
            return; // small
        }
        if session.engine().memory().free.is_none() {
            return; // the engine works in host memory: how much of it is left shows once the first steps are made
        }
        if !matches!(self.memory, Memory::Unmade)
            || (self.settings.every == 0 && self.settings.minutes == 0.0)
        {
            return;
        }
        self.make_memory(session, observer);
    }

    /// Whether a checkpoint of this step is due, and why. `best`: the validation loss is the lowest so far.
    pub(super) fn due(&mut self, step: u64, best: bool, asked: bool, folder: &RunFolder) -> Option<Why> {
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            self.asked |= folder.take_save();
        }
        self.asked |= asked;
        if step == 0 || self.last_step == Some(step) {
            return None;
        }
        let busy = self.writing.is_some() || self.parts.is_some();
        let minutes = Duration::from_secs_f64(self.settings.minutes * 60.0);
        let cost = Duration::from_secs_f64(self.stats.write_s.max(0.0));
        if std::mem::take(&mut self.asked) {
            Some(Why::Asked)
        } else if self.settings.every > 0 && step.is_multiple_of(self.settings.every) {
            Some(Why::Steps)
        } else if best && self.settings.every_best {
            Some(Why::Best)
        } else if busy {
            None
        } else if self.retry_at.is_some_and(|at| Instant::now() >= at)
            || (self.settings.minutes > 0.0 && self.last.elapsed() >= minutes)
        {
            Some(Why::Minutes)
        } else if best && self.last.elapsed() >= cost * BEST_SHARE {
            Some(Why::Best)
        } else {
            None
        }
    }

    /// Saves on the way: holds up only for the copy, and for an earlier save that is still being written where this one
    /// must not be put off. A failure is reported and tried again later.
    pub(super) fn save(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) {
        let began = Instant::now();
        self.finish(session, folder, observer);
        if let Err(error) = self.begin(session, state, folder, observer) {
            self.failed(state.step, &error, observer);
        }
        if self.settings.sync {
            self.finish(session, folder, observer); // of several ranks: alone it is written by now
        }
        let held_up = began.elapsed().as_secs_f64() * 1e3;
        self.stats.held_up_total_ms += held_up;
    }

    fn begin(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let began = Instant::now();
        (self.last, self.last_step, self.retry_at) = (began, Some(state.step), None);
        if !session.place().is_alone() {
            return self.begin_together(session, state, folder, observer);
        }
        self.plan.check_space()?;
        if matches!(self.memory, Memory::Unmade) {
            self.make_memory(session, observer);
        }
        let Some(mut memory) = self.take_memory(observer) else {
            let written = self.plan.write(state, folder.log_handle(), |pool, index, bytes| {
                session.read_state(pool, index, bytes)
            })?;
            self.stats.held_up_ms = self.stats.held_up_ms.max(began.elapsed().as_secs_f64() * 1e3);
            self.written(state.step, &written, began, folder, observer);
            return Ok(());
        };
        let copy = Instant::now();
        let copied = session.engine().snapshot(&self.slots, memory.as_mut());
        if let Err(error) = copied {
            self.memory = Memory::Ready(memory);
            return Err(error.into());
        }
        observer.copied(state.step, memory.bytes().len() as u64, copy.elapsed());
        self.stats.held_up_ms = self.stats.held_up_ms.max(began.elapsed().as_secs_f64() * 1e3);
        self.write_copy(memory, began, state, folder);
        Ok(())
    }

    /// A thread writes what was copied.
    fn write_copy(
        &mut self,
        memory: Box<dyn HostMemory>,
        began: Instant,
        state: &TrainerState,
        folder: &RunFolder,
    ) {
        let (plan, state, log) = (self.plan.clone(), state.clone(), folder.log_handle());
        let step = state.step;
        let thread = std::thread::spawn(move || {
            let written =
                plan.write(&state, log, |pool, index, bytes| plan.tensor(memory.bytes(), pool, index, bytes));
            (Some(memory), written)
        });
        self.memory = Memory::Away;
        self.writing = Some(Writing { step, began, thread });
    }

    /// Finishes a save whose thread has ended.
    pub(super) fn poll(&mut self, folder: &RunFolder, observer: &mut dyn Observer) {
        if self.writing.as_ref().is_some_and(|writing| writing.thread.is_finished()) {
            self.finish_writing(folder, observer);
        }
    }

    /// Waits for the checkpoint that is being written, if one is. All ranks call this at the same time.
    pub(super) fn finish(&mut self, session: &Session, folder: &RunFolder, observer: &mut dyn Observer) {
        let step = self.last_step.unwrap_or(0);
        if let Err(error) = self.collect(session, observer) {
            self.failed(step, &error, observer);
        }
        self.finish_writing(folder, observer);
    }

    /// Waits for a checkpoint that needs nothing of other ranks any more, but no longer than `most`: after one of them is lost.
    pub(super) fn finish_alone(&mut self, most: Duration, folder: &RunFolder, observer: &mut dyn Observer) {
        let until = Instant::now() + most;
        while self.writing.as_ref().is_some_and(|writing| !writing.thread.is_finished()) {
            if Instant::now() > until {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.finish_writing(folder, observer);
    }

    fn finish_writing(&mut self, folder: &RunFolder, observer: &mut dyn Observer) {
        let Some(Writing { step, began, thread }) = self.writing.take() else { return };
        match thread.join() {
            Ok((memory, written)) => {
                if let Some(memory) = memory {
                    self.memory = Memory::Ready(memory);
                }
                match written {
                    Ok(written) => self.written(step, &written, began, folder, observer),
                    Err(error) => self.failed(step, &error, observer),
                }
            }
            Err(_) => {
                self.memory = Memory::Unmade;
                self.failed(step, &"the thread that wrote it ended unexpectedly", observer);
            }
        }
    }

    fn failed(&mut self, step: u64, error: &dyn std::fmt::Display, observer: &mut dyn Observer) {
        self.stats.failed += 1;
        self.retry_at = Some(Instant::now() + RETRY);
        if self.last_step == Some(step) {
            self.last_step = None;
        }
        observer.note(&format!("step {step:>5}  not saved, will retry in a minute: {error}"));
    }

    fn written(
        &mut self,
        step: u64,
        written: &Written,
        began: Instant,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) {
        self.stats.count += 1;
        self.stats.bytes = written.bytes;
        self.stats.write_s = began.elapsed().as_secs_f64();
        if let Some(first) = written.non_finite.first() {
            let more = written.non_finite.len() - 1;
            let more = if more > 0 { format!(" and {more} more tensors") } else { String::new() };
            observer.note(&format!("step {step:>5}  saved with NaN or infinity in `{first}`{more}"));
        }
        observer.saved(step, &self.stats);
        if let Err(error) = folder.forget_previous() {
            observer.note(&format!("step {step:>5}  the previous run cannot be removed: {error}"));
        }
        if let Err(error) = keep::tidy(&self.plan.run, self.settings.keep) {
            observer.note(&format!("step {step:>5}  an old checkpoint cannot be removed: {error}"));
        }
    }

    /// Writes the state to another folder, for a black box.
    pub(super) fn save_to(&self, place: &Path, session: &mut Session, state: &TrainerState) -> Result<()> {
        if !session.place().is_alone() {
            return self.write_together(session, &self.plan, |plan, memory| {
                plan.write_to(place, state, |pool, index, bytes| plan.tensor(memory, pool, index, bytes))
                    .map(drop)
            });
        }
        self.plan.check_space()?;
        let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
        self.plan.write_to(place, state, read).map(drop)
    }
}
