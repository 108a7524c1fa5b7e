//! Writes checkpoints while the run goes on: the step waits for a copy to host memory, a thread writes it.

use super::save_plan::{Plan, available_memory, gib};
use super::{Observer, RunFolder};
use crate::format::atomic;
use crate::format::checkpoint::{Checkpoint, PART_BYTES, TrainerState, Written, checkpoints_of};
use crate::format::tokenizer::Tokenizer;
use crate::session::Session;
use crate::{Error, Result};
use ironhorse_core::{HostMemory, Pool, Slot};
use serde::Serialize;
use std::path::{Path, PathBuf};
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
    /// Always hold the step up until a checkpoint is written.
    pub sync: bool,
    /// The most bytes of tensors in one file.
    pub part_bytes: u64,
}

impl Default for SaveSettings {
    fn default() -> Self {
        Self { every: 0, minutes: 10.0, keep: 2, sync: false, part_bytes: PART_BYTES }
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
    /// The longest that a step was held up, in milliseconds: the copy to host memory, and the wait for that memory where it
    /// was still being allocated.
    pub held_up_ms: f64,
    /// How long the steps were held up together, in milliseconds, waiting for earlier saves included.
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
    /// Somebody asked.
    Asked,
    /// The validation loss is the lowest so far; only as long as saving takes a small share of the time.
    Best,
}

/// After a failed save the next try comes after this long, or when the next one is due.
const RETRY: Duration = Duration::from_secs(60);
/// How often the folder is looked at for a file that asks for a save.
const LOOK: Duration = Duration::from_secs(1);
/// A new best is saved if saves take less than one part in so many of the time.
const BEST_SHARE: u32 = 20;
/// Snapshots take at most this share of the memory that is free, in percent.
const MEMORY_PERCENT: u64 = 60;

/// Where the snapshot's memory is.
enum Memory {
    /// Nobody needed it yet.
    Unmade,
    /// A thread is making it.
    Making(JoinHandle<ironhorse_core::Result<Box<dyn HostMemory>>>),
    /// Ready for a copy.
    Ready(Box<dyn HostMemory>),
    /// With the thread that writes.
    Away,
    /// There is too little: the step waits for the disk.
    None,
}

/// A checkpoint being written.
struct Writing {
    step: u64,
    began: Instant,
    thread: JoinHandle<(Box<dyn HostMemory>, Result<Written>)>,
}

/// Writes the checkpoints of a run.
pub struct Saver {
    settings: SaveSettings,
    plan: Arc<Plan>,
    slots: Vec<Slot>,
    memory: Memory,
    writing: Option<Writing>,
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
        tokenizer: Option<&Tokenizer>,
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
            precision: program.precision(),
            params: program.params().to_vec(),
            pools,
            tokenizer: tokenizer.cloned(),
            part_bytes: settings.part_bytes,
        };
        Ok(Self {
            settings,
            plan: Arc::new(plan),
            slots,
            memory: if settings.sync { Memory::None } else { Memory::Unmade },
            writing: None,
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
        if session.engine().free_memory().is_none() {
            return; // the engine works in host memory: how much of it is left shows once the first steps are made
        }
        if !matches!(self.memory, Memory::Unmade)
            || (self.settings.every == 0 && self.settings.minutes == 0.0)
        {
            return;
        }
        self.make_memory(session, observer);
    }

    fn make_memory(&mut self, session: &mut Session, observer: &mut dyn Observer) {
        let bytes: usize = self.slots.iter().map(Slot::bytes).sum();
        let free = available_memory();
        if free.is_some_and(|free| bytes as u64 > free / 100 * MEMORY_PERCENT) {
            let (needs, has) = (gib(bytes as u64), gib(free.unwrap_or(0)));
            observer.note(&format!(
                "saving will hold the step up until the disk has it (as --save-sync does): a copy of the state needs {needs} \
                 of host memory and {has} are free"
            ));
            self.memory = Memory::None;
            return;
        }
        let make = session.engine().host_memory();
        self.memory = Memory::Making(std::thread::spawn(move || make(bytes)));
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
        let busy = self.writing.is_some();
        let minutes = Duration::from_secs_f64(self.settings.minutes * 60.0);
        let cost = Duration::from_secs_f64(self.stats.write_s.max(0.0));
        if std::mem::take(&mut self.asked) {
            Some(Why::Asked)
        } else if self.settings.every > 0 && step.is_multiple_of(self.settings.every) {
            Some(Why::Steps)
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
    /// must not be put off. What goes wrong is said and tried again later.
    pub(super) fn save(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) {
        let began = Instant::now();
        self.finish(folder, observer);
        if let Err(error) = self.begin(session, state, folder, observer) {
            self.failed(state.step, &error, observer);
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
        let (plan, state, log) = (self.plan.clone(), state.clone(), folder.log_handle());
        let step = state.step;
        let thread = std::thread::spawn(move || {
            let written =
                plan.write(&state, log, |pool, index, bytes| plan.tensor(memory.bytes(), pool, index, bytes));
            (memory, written)
        });
        self.memory = Memory::Away;
        self.writing = Some(Writing { step, began, thread });
        Ok(())
    }

    /// The snapshot's memory, waited for if it is being made; `None` where there is too little.
    fn take_memory(&mut self, observer: &mut dyn Observer) -> Option<Box<dyn HostMemory>> {
        match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::Ready(memory) => Some(memory),
            Memory::Making(thread) => match thread.join() {
                Ok(Ok(memory)) => Some(memory),
                Ok(Err(error)) => {
                    observer.note(&format!("saving will hold the step up until the disk has it: {error}"));
                    None
                }
                Err(_) => None,
            },
            Memory::Unmade | Memory::Away | Memory::None => None,
        }
    }

    /// Takes over a checkpoint that is written by now.
    pub(super) fn poll(&mut self, folder: &RunFolder, observer: &mut dyn Observer) {
        if self.writing.as_ref().is_some_and(|writing| writing.thread.is_finished()) {
            self.finish(folder, observer);
        }
    }

    /// Waits for the checkpoint that is being written, if one is.
    pub(super) fn finish(&mut self, folder: &RunFolder, observer: &mut dyn Observer) {
        let Some(Writing { step, began, thread }) = self.writing.take() else { return };
        match thread.join() {
            Ok((memory, written)) => {
                self.memory = Memory::Ready(memory);
                match written {
                    Ok(written) => self.written(step, &written, began, folder, observer),
                    Err(error) => self.failed(step, &error, observer),
                }
            }
            Err(_) => {
                self.memory = Memory::Unmade;
                let error = Error::Config("the thread that wrote it ended unexpectedly".into());
                self.failed(step, &error, observer);
            }
        }
    }

    fn failed(&mut self, step: u64, error: &Error, observer: &mut dyn Observer) {
        self.stats.failed += 1;
        self.retry_at = Some(Instant::now() + RETRY);
        if self.last_step == Some(step) {
            self.last_step = None;
        }
        observer.note(&format!("step {step:>5}  not saved, tried again in a minute: {error}"));
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
            observer
                .note(&format!("step {step:>5}  saved with numbers that are not finite in `{first}`{more}"));
        }
        observer.saved(step, &self.stats);
        if let Err(error) = folder.forget_previous() {
            observer.note(&format!("step {step:>5}  the run before cannot be removed: {error}"));
        }
        if let Err(error) = self.tidy() {
            observer.note(&format!("step {step:>5}  an old checkpoint cannot be removed: {error}"));
        }
    }

    /// Removes all checkpoints but the newest and the best.
    fn tidy(&self) -> Result<()> {
        if self.settings.keep == 0 {
            return Ok(());
        }
        let all = checkpoints_of(&self.plan.run);
        let manifest = |path: &PathBuf| Checkpoint::manifest(path).ok();
        let bests = all.iter().filter_map(|(step, path)| {
            let best = manifest(path)?.state.best.filter(|best| best.step == *step)?;
            Some((best.val_loss, *step))
        });
        let best = bests.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step)| step);
        let whole = all.iter().filter(|(_, path)| manifest(path).is_some()).map(|(step, _)| *step);
        let newest: Vec<u64> = whole.take(self.settings.keep).collect();
        for (_, path) in all.iter().filter(|(step, _)| !newest.contains(step) && best != Some(*step)) {
            atomic::remove_folder(path)?;
        }
        Ok(())
    }

    /// Removes the checkpoints after `step`: those of a past that the run went back from. The one of `step` has the weights
    /// of the run as it is now, but not its place in the data: it is due again.
    pub(super) fn forget_after(&mut self, step: u64) -> Result<()> {
        self.last_step = None;
        for (_, path) in checkpoints_of(&self.plan.run).into_iter().filter(|(at, _)| *at > step) {
            atomic::remove_folder(&path)?;
        }
        Ok(())
    }

    /// The last save of a run, which must not be lost: waits, tries twice, then elsewhere. Gives where it is.
    pub(super) fn save_last(
        &mut self,
        session: &mut Session,
        state: &TrainerState,
        folder: &RunFolder,
        observer: &mut dyn Observer,
    ) -> Result<PathBuf> {
        self.finish(folder, observer);
        let place = self.plan.place(state.step);
        // written on the way; one of a stop in the last validation does not have its loss yet
        let same = || Checkpoint::manifest(&place).is_ok_and(|manifest| manifest.state == *state);
        if self.last_step == Some(state.step) && same() {
            return Ok(place);
        }
        let mut first = None;
        for _ in 0..2 {
            let began = Instant::now();
            let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
            match self.plan.write(state, folder.log_handle(), read) {
                Ok(written) => {
                    self.written(state.step, &written, began, folder, observer);
                    return Ok(place);
                }
                Err(error) => {
                    self.stats.failed += 1;
                    first.get_or_insert(error);
                }
            }
        }
        let error = first.unwrap_or_else(|| Error::Config("the checkpoint was not written".into()));
        observer.note(&format!("step {:>5}  not saved: {error}", state.step));
        for place in self.plan.other_places(state.step) {
            let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
            if self.plan.write_to(&place, state, read).is_ok() {
                observer.note(&format!(
                    "the checkpoint is at {} instead; move it to {} to go on from it",
                    place.display(),
                    self.plan.place(state.step).display()
                ));
                return Ok(place);
            }
        }
        Err(error)
    }

    /// Writes the state to another folder, for a black box.
    pub(super) fn save_to(&self, place: &Path, session: &mut Session, state: &TrainerState) -> Result<()> {
        self.plan.check_space()?;
        let read = |pool: Pool, index: usize, bytes: &mut Vec<u8>| session.read_state(pool, index, bytes);
        self.plan.write_to(place, state, read).map(drop)
    }
}
