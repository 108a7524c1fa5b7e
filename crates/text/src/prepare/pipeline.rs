//! One thread reads, several encode, and the caller's writes in order. At most a fixed number of units is on its way.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::encode::{Encoded, Work};
use super::state::State;
use super::{Progress, Settings};
use crate::read::{Input, Unit, Units};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Units on their way for each thread.
const AHEAD: usize = 4;
/// How often `watch` is called at least.
const TICK: Duration = Duration::from_millis(100);

/// What is prepared and how.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub inputs: &'a [Input],
    pub tokenizer: &'a Tokenizer,
    pub settings: &'a Settings,
}

type Watch<'a> = &'a mut dyn FnMut(&Progress) -> ControlFlow<()>;

/// Does all that is left to do.
pub fn run(job: Job<'_>, state: &mut State<'_>, watch: Watch<'_>) -> Result<()> {
    let Job { inputs, tokenizer, settings } = job;
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if settings.threads == 0 { cores() } else { settings.threads };
    let window = threads * AHEAD;
    let cut = |text: &[u8]| tokenizer.safe_cut(text);
    let spool = settings.out.join(format!(".{}.stdin", settings.name));
    let (first, skip, crc) = state.position();
    let units = Units::new(inputs, &settings.read, &cut, first).with_spool(spool);
    let (work, to_do) = sync_channel::<(u64, Unit)>(window);
    let (done, results) = channel::<(u64, Result<Encoded>)>();
    let (permits, permitted) = sync_channel::<()>(window);
    for _ in 0..window {
        let _ = permits.send(()); // the other end is below
    }
    let to_do = Mutex::new(to_do);
    std::thread::scope(|scope| {
        let failed = done.clone();
        let resume = Resume { skip, crc, path: inputs.get(first).map(|input| input.path.as_path()) };
        let to = Outlets { permitted, work, failed };
        scope.spawn(move || read(units, resume, &to));
        for _ in 0..threads {
            let (done, to_do) = (done.clone(), &to_do);
            scope.spawn(move || encode(job, to_do, &done));
        }
        drop(done);
        let total = inputs.iter().map(|input| input.bytes).sum();
        let written = write(state, &results, &permits, &mut |state| watch(&state.progress(total)));
        // the reader waits for a permit, the others for the reader: this ends them all
        drop((permits, results));
        written
    })
}

/// Units of the first input that an earlier run has done, and the checksum of their contents.
struct Resume<'a> {
    skip: u64,
    crc: u32,
    path: Option<&'a Path>,
}

/// The channels by which the reader passes on its units and its errors.
struct Outlets {
    /// Receives one permit for each unit that may be begun.
    permitted: Receiver<()>,
    work: SyncSender<(u64, Unit)>,
    failed: Sender<(u64, Result<Encoded>)>,
}

fn read(units: Units<'_>, resume: Resume<'_>, to: &Outlets) {
    let mut skipped = 0;
    let mut next = 0;
    for unit in units {
        let unit = match unit {
            Ok(unit) if skipped < resume.skip => {
                skipped += 1;
                let same = unit.end.is_none() && (skipped < resume.skip || unit.crc == resume.crc);
                if same {
                    continue;
                }
                let path = resume.path.unwrap_or(Path::new(""));
                let problem = "has changed since the preparation was interrupted; --overwrite starts it over";
                Err(Error::input(path, problem))
            }
            other => other,
        };
        if to.permitted.recv().is_err() {
            return;
        }
        let sent = match unit {
            Ok(unit) => to.work.send((next, unit)).is_ok(),
            Err(error) => {
                let _ = to.failed.send((next, Err(error))); // the writer may have ended
                false
            }
        };
        if !sent {
            return;
        }
        next += 1;
    }
}

fn encode(job: Job<'_>, to_do: &Mutex<Receiver<(u64, Unit)>>, done: &Sender<(u64, Result<Encoded>)>) {
    let Job { inputs, tokenizer, settings } = job;
    let mut work = Work {
        encoder: tokenizer.encoder(),
        eot: tokenizer.eot().unwrap_or(0),
        field: &settings.read.field,
        skip_bad: settings.read.skip_bad,
    };
    loop {
        let next = to_do.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((index, unit)) = next else { return };
        let path = &inputs[unit.input].path;
        if done.send((index, Ok(work.encode(unit, path)))).is_err() {
            return;
        }
    }
}

fn write(
    state: &mut State<'_>,
    results: &Receiver<(u64, Result<Encoded>)>,
    permits: &SyncSender<()>,
    watch: &mut dyn FnMut(&State<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let (mut next, mut waiting) = (0, BTreeMap::new());
    loop {
        match results.recv_timeout(TICK) {
            Ok((index, result)) => {
                waiting.insert(index, result);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        while let Some(result) = waiting.remove(&next) {
            let unit = result.and_then(|mut unit| unit.failed.take().map_or(Ok(unit), Err));
            let unit = unit.inspect_err(|_| {
                // all units before this one are written, so that a run with --skip-bad goes on here; if the disk is
                // full, an earlier place is known
                let _ = state.save();
            })?;
            state.write(unit)?;
            next += 1;
            let _ = permits.send(()); // the reader may have ended
        }
        if watch(state).is_break() {
            state.save()?;
            return Err(Error::Stopped);
        }
    }
}
