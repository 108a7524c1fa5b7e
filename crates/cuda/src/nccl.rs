//! The ranks of a run on GPUs: NCCL's communicator, and the calls that ops become.
//!
//! The ranks' own communicator hands out NCCL's id, and watches: when a rank is lost, a thread aborts NCCL, whose kernels would
//! otherwise wait for ever, and the calls that wait fail with the rank's name. The same thread sees how the GPU gets on, and tells
//! the communicator.

use crate::device::{Device, Event, Stream};
use crate::ffi::nccl::{BFLOAT16, BYTES, FLOAT32, NcclLibrary, SUM, UniqueId, version_text};
use crate::launch::LibraryCall;
use crate::{Error, Result};
use ironhorse_core::ranks::RESUMABLE;
use ironhorse_core::{Communicator, DType, Place};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the watching thread looks.
const LOOK: Duration = Duration::from_millis(100);
/// How long an abort waits for calls of NCCL to return: one that waits for a lost rank does not.
const TO_RETURN: Duration = Duration::from_secs(1);
/// How long NCCL may take to abort.
const TO_ABORT: Duration = Duration::from_secs(5);
/// How long an error of the device or of NCCL waits for the word that a rank is lost, which may be its cause.
const WORD: Duration = Duration::from_secs(2);
/// Marks on the stream that the watching thread knows at a time.
const MARKS: usize = 64;

/// NCCL's communicator of this rank.
pub(crate) struct Nccl {
    library: Arc<NcclLibrary>,
    raw: *mut c_void,
    with: Arc<dyn Communicator>,
    /// Held by those who call NCCL: an abort frees what they use.
    calls: Mutex<()>,
    /// What was given to the stream and is not known to be done.
    marks: Mutex<VecDeque<Event>>,
    device: &'static Device,
    aborted: AtomicBool,
    done: AtomicBool,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// NCCL's communicator on its way from the thread that made it.
struct Made(*mut c_void);

// SAFETY: NCCL's communicators may be used by any thread, one at a time.
unsafe impl Send for Made {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: NCCL's communicators may be used by any thread, one at a time; besides the engine's thread only the watching one uses it,
// to abort it, which NCCL allows at any time.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Nccl {
    /// Joins the ranks of `with` with this device.
    pub fn join(with: Arc<dyn Communicator>, device: &'static Device) -> Result<Arc<Self>> {
        let rank = with.place().rank;
        let opened = NcclLibrary::open();
        let said =
            opened.as_ref().map_or_else(|error| format!("!{error}"), |nccl| version_text(nccl.version()));
        let all = with.share(said.as_bytes())?;
        for (other, text) in all.iter().enumerate() {
            let text = String::from_utf8_lossy(text);
            if let Some(error) = text.strip_prefix('!').filter(|_| other != rank) {
                return Err(Error::Unsupported(format!("rank {other}: {error}")));
            }
            if opened.is_ok() && text != said {
                let what =
                    format!("rank {other} has NCCL {text}, rank {rank} {said}: use the same everywhere");
                return Err(Error::Unsupported(what));
            }
        }
        let library = opened?;
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            // SAFETY: NCCL writes the 128 bytes of the id.
            library.check("ncclGetUniqueId", unsafe { (library.ncclGetUniqueId)(&mut id) })?;
        }
        let ids = with.share(&id.0)?;
        let of_leader = ids.first().and_then(|id| id.as_slice().try_into().ok());
        id.0 = of_leader.ok_or_else(|| Error::Input("rank 0 sent no id of NCCL".into()))?;
        let library = Arc::new(library);
        let Made(raw) = Self::meet(&library, id, with.as_ref(), device)?;
        tracing::info!("NCCL {said} from {}", library.path().display());
        let (calls, marks, watcher) = (Mutex::new(()), Mutex::default(), Mutex::new(None));
        let (aborted, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let nccl = Arc::new(Self { library, raw, with, calls, marks, device, aborted, done, watcher });
        let watched = nccl.clone();
        let spawned = std::thread::Builder::new().name("nccl".into()).spawn(move || watched.watch());
        let thread =
            spawned.map_err(|error| Error::Unsupported(format!("cannot start a thread: {error}")))?;
        *lock(&nccl.watcher) = Some(thread);
        Ok(nccl)
    }

    /// Makes the communicator in a thread of its own: it waits for all ranks and cannot be told that one is lost. It is then left
    /// behind, and ends with the process.
    fn meet(
        library: &Arc<NcclLibrary>,
        id: UniqueId,
        with: &dyn Communicator,
        device: &'static Device,
    ) -> Result<Made> {
        let Place { rank, world } = with.place();
        let (sender, made) = channel();
        let library = library.clone();
        let begin = move || {
            let begun = device.make_current().and_then(|()| {
                let mut raw = std::ptr::null_mut();
                // SAFETY: all ranks call this with the same id and different numbers; the device is current.
                let status = unsafe { (library.ncclCommInitRank)(&mut raw, world as i32, id, rank as i32) };
                library.check("ncclCommInitRank", status).map(|()| Made(raw))
            });
            drop(sender.send(begun));
        };
        let spawned = std::thread::Builder::new().name("nccl's start".into()).spawn(begin);
        spawned.map_err(|error| Error::Unsupported(format!("cannot start a thread: {error}")))?;
        let begun = Instant::now();
        loop {
            match made.recv_timeout(LOOK) {
                Ok(made) => return made,
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = with.failure() {
                        return Err(error.into());
                    }
                    if let Some(limit) = with.patience().filter(|&limit| begun.elapsed() > limit) {
                        return Err(Error::Unsupported(too_slow(limit, &with.whereabouts())));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Unsupported("NCCL's start ended without a result".into()));
                }
            }
        }
    }

    /// Tells how the GPU gets on, and aborts NCCL once a rank is lost.
    fn watch(&self) {
        let _ = self.device.make_current();
        while !self.done.load(Ordering::Relaxed) {
            if self.with.failure().is_some() {
                return self.abort();
            }
            // SAFETY: only this thread and `leave`, which comes after this one has ended, free the communicator.
            if let Err(error) = unsafe { self.library.check_async(self.raw) } {
                let began = Instant::now();
                while self.with.failure().is_none() && began.elapsed() < WORD {
                    std::thread::sleep(LOOK); // a lost rank is the likely cause, and is to be named
                }
                self.with.give_up(&error.to_string(), RESUMABLE);
                return self.abort();
            }
            self.look_at_marks();
            std::thread::park_timeout(LOOK);
        }
    }

    fn abort(&self) {
        if self.aborted.swap(true, Ordering::Relaxed) {
            return;
        }
        let until = Instant::now() + TO_RETURN;
        let mut held = self.calls.try_lock();
        while held.is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            held = self.calls.try_lock();
        }
        // In a thread of its own, which may be left behind: where another rank hangs, NCCL waits for it here, too.
        let (library, raw, device) = (self.library.clone(), Made(self.raw), self.device);
        let (sender, ended) = channel::<()>();
        let abort = move || {
            let Made(raw) = { raw };
            let _ = device.make_current();
            // SAFETY: the communicator is there: it is freed by nobody else once `aborted` is set. No call is under way, or one
            // that waits for a lost rank, which NCCL then lets return.
            unsafe { (library.ncclCommAbort)(raw) };
            drop(sender);
        };
        if std::thread::Builder::new().name("nccl's end".into()).spawn(abort).is_ok() {
            let _ = ended.recv_timeout(TO_ABORT);
        }
    }

    /// Marks what the stream has been given, so that it can be seen to be done.
    pub fn mark(&self, stream: &Stream) -> Result<()> {
        let mut marks = lock(&self.marks);
        if marks.len() < MARKS {
            let mark = Event::new(self.device, false)?;
            mark.record(stream)?;
            marks.push_back(mark);
        }
        Ok(())
    }

    fn look_at_marks(&self) {
        let mut marks = lock(&self.marks);
        while marks.front().is_some_and(Event::has_passed) {
            marks.pop_front();
            self.with.gets_on();
        }
    }

    /// Which rank this is.
    pub fn place(&self) -> Place {
        self.with.place()
    }

    /// Fails if a rank is lost: what was computed since is worth nothing.
    pub fn check(&self) -> Result<()> {
        self.with.failure().map_or(Ok(()), |error| Err(error.into()))
    }

    /// What an error of this device or of NCCL means: a lost rank, if there is one. NCCL may notice it before the ranks themselves do.
    pub fn explain(&self, error: Error) -> Error {
        let began = Instant::now();
        loop {
            match self.check() {
                Err(lost) => return lost,
                Ok(()) if began.elapsed() > WORD => return error,
                Ok(()) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Ends the thread that watches, which has the ranks' communicator too: that says goodbye to the others only once nobody has it.
    /// Gives whether the thread has aborted NCCL; from now on it does not.
    pub fn stop_watching(&self) -> bool {
        self.done.store(true, Ordering::Relaxed);
        let watcher = lock(&self.watcher).take();
        if let Some(watcher) = watcher {
            watcher.thread().unpark();
            let _ = watcher.join();
        }
        self.aborted.load(Ordering::Relaxed)
    }

    /// The engine has ended.
    pub fn leave(&self) {
        lock(&self.marks).clear();
        if !self.aborted.swap(true, Ordering::Relaxed) {
            // SAFETY: nothing is under way: the engine's stream is done.
            unsafe { (self.library.ncclCommDestroy)(self.raw) };
        }
    }
}

/// What to say where NCCL does not begin.
fn too_slow(limit: Duration, others: &[String]) -> String {
    format!(
        "NCCL has not connected this rank with the others in {} s (10 times --rank-timeout): {}; NCCL_SOCKET_IFNAME names the \
         interface that it is to use, NCCL_DEBUG=INFO shows what it tries, and a firewall must let its ports through",
        limit.as_secs_f64(),
        others.join(", ")
    )
}

/// One message, or a part of one that all get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Send {
        at: u64,
        bytes: usize,
        to: usize,
    },
    Receive {
        at: u64,
        bytes: usize,
        from: usize,
    },
    /// A copy from the memory of `from` to the same place in that of all others.
    Broadcast {
        at: u64,
        bytes: usize,
        from: usize,
    },
    /// The sum of what all ranks have, in an order that NCCL chooses, to rank `to`, or to all.
    Reduce {
        at: u64,
        out: u64,
        elements: usize,
        /// What NCCL calls their type.
        number: i32,
        to: Option<usize>,
    },
}

impl Transfer {
    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        match *self {
            Self::Send { bytes, .. } | Self::Receive { bytes, .. } | Self::Broadcast { bytes, .. } => {
                bytes == 0
            }
            Self::Reduce { elements, .. } => elements == 0,
        }
    }
}

/// What NCCL calls the element type of a sum.
pub(crate) fn number_type(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F32 => Ok(FLOAT32),
        DType::BF16 => Ok(BFLOAT16),
        other => Err(Error::Unsupported(format!("NCCL adds no {}; leave --fast out", other.name()))),
    }
}

/// Messages that go at the same time.
pub(crate) struct Transfers {
    pub nccl: Arc<Nccl>,
    pub all: Vec<Transfer>,
}

impl LibraryCall for Transfers {
    fn exchanges(&self) -> bool {
        true
    }

    fn enqueue(&self, stream: &Stream) -> Result<()> {
        let _call = lock(&self.nccl.calls);
        self.nccl.check()?;
        let (library, comm) = (&self.nccl.library, self.nccl.raw);
        // SAFETY: no arguments.
        library.check("ncclGroupStart", unsafe { (library.ncclGroupStart)() })?;
        let mut result = Ok(());
        for transfer in &self.all {
            // SAFETY: the addresses are memory of the engine, which it keeps as long as its launches; every rank has the
            // transfer that answers this one, because all run the same program.
            let (call, status) = unsafe {
                match *transfer {
                    Transfer::Send { at, bytes, to } => (
                        "ncclSend",
                        (library.ncclSend)(at as *const c_void, bytes, BYTES, to as i32, comm, stream.raw),
                    ),
                    Transfer::Receive { at, bytes, from } => (
                        "ncclRecv",
                        (library.ncclRecv)(at as *mut c_void, bytes, BYTES, from as i32, comm, stream.raw),
                    ),
                    Transfer::Broadcast { at, bytes, from } => {
                        let (inp, out) = (at as *const c_void, at as *mut c_void);
                        let status =
                            (library.ncclBroadcast)(inp, out, bytes, BYTES, from as i32, comm, stream.raw);
                        ("ncclBroadcast", status)
                    }
                    Transfer::Reduce { at, out, elements, number, to } => {
                        let (inp, out) = (at as *const c_void, out as *mut c_void);
                        match to {
                            Some(to) => (
                                "ncclReduce",
                                (library.ncclReduce)(
                                    inp, out, elements, number, SUM, to as i32, comm, stream.raw,
                                ),
                            ),
                            None => (
                                "ncclAllReduce",
                                (library.ncclAllReduce)(inp, out, elements, number, SUM, comm, stream.raw),
                            ),
                        }
                    }
                }
            };
            result = result.and_then(|()| library.check(call, status));
        }
        // SAFETY: no arguments.
        let ended = library.check("ncclGroupEnd", unsafe { (library.ncclGroupEnd)() });
        result.and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_hangs_says_what_to_look_at() {
        let others = ["rank 1 on b at 10.0.0.2".to_owned(), "rank 2 on c at 10.0.0.3".to_owned()];
        let text = too_slow(Duration::from_secs(600), &others);
        for part in ["600 s", "rank 1 on b at 10.0.0.2, rank 2 on c", "NCCL_SOCKET_IFNAME", "--rank-timeout"]
        {
            assert!(text.contains(part), "{text}");
        }
    }
}
