//! A fixed team of threads that runs numbered tasks.
//!
//! A training step calls [`Team::run`] some hundreds of times, with a few microseconds of work between the
//! calls. So the threads live as long as the team, a call allocates nothing, and a thread that has nothing to do spins for a
//! moment before it sleeps.
//!
//! Tasks are handed out by atomic counters. Each worker begins with a share of tasks with adjacent numbers and takes those of
//! others when it is done. So it usually gets the same rows in one op and in the next, which are still in its caches then, and its
//! counter is changed by few others; nothing may depend on it.
//!
//! Which thread runs which task is not fixed. Results that must not depend on it need tasks that write disjoint
//! memory and a partition into tasks that does not depend on the number of threads, or does not matter.

mod per_worker;
mod share;

pub use per_worker::PerWorker;

use crate::isa::Isa;
use share::Share;
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker, or a caller waiting for the last task, spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// A task: (number of the task, number of the worker that runs it).
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A task panicked. The other tasks of that run were completed and the team can be used further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPanic(String);

impl fmt::Display for TaskPanic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a parallel task panicked: {}", self.0)
    }
}

impl std::error::Error for TaskPanic {}

thread_local! {
    /// Which team's task this thread is inside of (0: none), and as which worker.
    static INSIDE: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

/// What a run of tasks returns.
pub(crate) type Done = Result<(), TaskPanic>;

/// How the rows or elements of an op become tasks, and which instructions the tasks use. The engine runs them on its team,
/// eager ops on the team of the process where they are large enough. The pieces never depend on the number of threads.
pub(crate) trait Split: Sync {
    /// The instructions to use.
    fn isa(&self) -> Isa;

    /// Runs `task` on pieces of `0..len`. `weight`: the work of an element, counted in loads, stores and operations.
    fn pieces(&self, len: usize, chunk: usize, weight: usize, task: impl Fn(Range<usize>) + Sync) -> Done;

    /// Runs `task` on each of `count` rows of `width` elements, several rows in a task if they are short.
    fn rows(&self, count: usize, width: usize, weight: usize, task: impl Fn(usize) + Sync) -> Done;
}

/// State word: bit 0 the gate is open; bits 1..=15 workers inside; bit 16 shut down; bits 17.. number of the run.
const OPEN: u64 = 1;
const ONE_INSIDE: u64 = 2;
const INSIDE_MASK: u64 = 0xfffe;
const SHUT_DOWN: u64 = 1 << 16;
const ONE_RUN: u64 = 1 << 17;
const MAX_THREADS: usize = 1 << 14;

/// Shares at most: with more threads some have one in common, so that nobody has to look at many in the end of a run.
const MOST_SHARES: usize = 16;

/// The run in progress. Written by the caller while the gate is shut and nobody is inside.
struct Job {
    task: Option<&'static Task<'static>>,
}

struct Shared {
    id: u64,
    spin: bool,
    state: AtomicU64,
    /// Those that workers begin with, one after the other.
    shares: Box<[Share]>,
    job: UnsafeCell<Job>,
    /// First panic message of the run.
    panic: Mutex<Option<String>>,
    panicked: AtomicBool,
    /// Workers asleep, and the caller asleep: both under `sleep`.
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    done: Condvar,
}

// SAFETY: `job` is the only field that is not Sync. It is written by the caller only while the gate is shut and no
// worker is inside (checked in `Team::run_parallel`), and read only by workers that passed the gate.
unsafe impl Sync for Shared {}

/// Persistent threads that run tasks together with the caller. See the module text.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run: two threads that share a team take turns.
    turn: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "unknown reason".to_owned()
    }
}

/// Spins until `ready` or for [`SPIN`]; says whether it became ready.
fn spin_until(ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= SPIN {
            return false;
        }
    }
}

impl Shared {
    /// Takes tasks until none is left: those of the worker's share first.
    fn work(&self, task: &Task<'_>, worker: usize) {
        let before = INSIDE.replace((self.id, worker));
        let (others, own) = self.shares.split_at(worker % self.shares.len());
        for share in own.iter().chain(others) {
            while let Some(number) = share.take() {
                self.guarded(task, number, worker);
            }
        }
        INSIDE.set(before);
    }

    fn guarded(&self, task: &Task<'_>, number: usize, worker: usize) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(number, worker))) {
            let text = message(payload.as_ref());
            lock(&self.panic).get_or_insert(text);
            self.panicked.store(true, Ordering::Release);
        }
    }

    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if state & SHUT_DOWN != 0 {
                return;
            }
            let run = state / ONE_RUN;
            if state & OPEN == 0 || run == seen {
                self.wait_for_change(state);
                continue;
            }
            let inside = state + ONE_INSIDE;
            if self.state.compare_exchange(state, inside, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                continue;
            }
            seen = run;
            // SAFETY: this worker passed the open gate, so the caller wrote `job` before (the exchange acquires it)
            // and waits, without touching it, until this worker has left.
            let task = unsafe { (*self.job.get()).task };
            if let Some(task) = task {
                self.work(task, worker);
            }
            let left = self.state.fetch_sub(ONE_INSIDE, Ordering::SeqCst) - ONE_INSIDE;
            if left & INSIDE_MASK == 0 && self.caller_sleeps.load(Ordering::SeqCst) {
                let _guard = lock(&self.sleep);
                self.done.notify_all();
            }
        }
    }

    /// Waits, as an idle worker, until the state word may have changed.
    fn wait_for_change(&self, old: u64) {
        // The count of workers inside may change; only the run, the gate and shut-down matter.
        let news = |state: u64| (state ^ old) & !INSIDE_MASK != 0;
        if self.spin && spin_until(|| news(self.state.load(Ordering::Relaxed))) {
            return;
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !news(self.state.load(Ordering::SeqCst)) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_workers(&self, wanted: usize) {
        if self.sleepers.load(Ordering::SeqCst) == 0 {
            return;
        }
        let guard = lock(&self.sleep);
        let asleep = self.sleepers.load(Ordering::SeqCst);
        drop(guard);
        if wanted >= asleep {
            self.wake.notify_all();
        } else {
            (0..wanted).for_each(|_| self.wake.notify_one());
        }
    }

    /// The caller waits until every worker has left.
    fn wait_until_left(&self) {
        let left = || self.state.load(Ordering::SeqCst) & INSIDE_MASK == 0;
        if left() || (self.spin && spin_until(left)) {
            return;
        }
        let mut guard = lock(&self.sleep);
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !left() {
            guard = self.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    fn verdict(&self) -> Result<(), TaskPanic> {
        if self.panicked.swap(false, Ordering::AcqRel) {
            return Err(TaskPanic(lock(&self.panic).take().unwrap_or_default()));
        }
        Ok(())
    }
}

impl Team {
    /// A team of `threads` threads, the caller of [`Team::run`] among them; 0 means one for each core.
    ///
    /// Threads the system refuses to start are left out: [`Team::threads`] says how many there are.
    pub fn new(threads: usize) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads.min(MAX_THREADS) };
        let shared = Arc::new(Shared {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            // With more threads than cores a spinning thread takes the core from one that has work.
            spin: threads <= cores,
            state: AtomicU64::new(0),
            shares: (0..threads.clamp(1, MOST_SHARES)).map(|_| Share::default()).collect(),
            job: UnsafeCell::new(Job { task: None }),
            panic: Mutex::new(None),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
        });
        let mut workers = Vec::with_capacity(threads - 1);
        for worker in 1..threads {
            let shared = Arc::clone(&shared);
            let named = std::thread::Builder::new().name(format!("ironhorse-{worker}"));
            match named.spawn(move || shared.serve(worker)) {
                Ok(handle) => workers.push(handle),
                Err(_) => break,
            }
        }
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// How many threads run tasks, the caller included. Worker numbers are below this.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(number, worker)` for every number below `tasks` and returns when all are done.
    ///
    /// No two tasks of a run have the same worker number at the same time. Called from inside a task, it runs everything
    /// on the calling thread: as the same worker inside this team, as worker 0 inside another team. In the latter case
    /// runs of this team may overlap, so what belongs to a worker must belong to the run too (an engine's scratch does:
    /// running an engine takes it exclusively).
    ///
    /// # Errors
    /// A task panicked; every other task was run all the same.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) -> Result<(), TaskPanic> {
        let (team, worker) = INSIDE.get();
        if team != 0 {
            // Inside another team's task this thread is not a worker of this team, and it is the only thread of this run.
            return run_inline(tasks, task, if team == self.shared.id { worker } else { 0 });
        }
        let _turn = lock(&self.turn);
        if tasks <= 1 || self.workers.is_empty() {
            let before = INSIDE.replace((self.shared.id, 0));
            let verdict = run_inline(tasks, task, 0);
            INSIDE.set(before);
            return verdict;
        }
        self.run_parallel(tasks, task)
    }

    /// Cuts `0..len` into pieces of `chunk` (the last may be shorter) and runs `task(piece, worker)` for each.
    ///
    /// The pieces do not depend on the number of threads.
    ///
    /// # Errors
    /// As [`Team::run`].
    pub fn chunks<F>(&self, len: usize, chunk: usize, task: F) -> Result<(), TaskPanic>
    where
        F: Fn(Range<usize>, usize) + Sync,
    {
        let chunk = chunk.max(1);
        self.run(len.div_ceil(chunk), &|number, worker| {
            let start = number * chunk;
            task(start..len.min(start + chunk), worker);
        })
    }

    /// Needs `turn`.
    fn run_parallel(&self, tasks: usize, task: &Task<'_>) -> Result<(), TaskPanic> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is used by workers inside the gate, and this function
        // shuts the gate and waits for them before it returns.
        let forever = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        // SAFETY: `turn` is held and the run before this one ended with the gate shut and nobody inside.
        unsafe { *shared.job.get() = Job { task: Some(forever) } };
        let count = shared.shares.len();
        for (i, share) in shared.shares.iter().enumerate() {
            // The caller, who is awake, has the first tasks.
            let [start, end] = [i, i + 1].map(|i| (tasks * i).div_ceil(count));
            share.give(start..end);
        }
        let run = shared.state.load(Ordering::Relaxed) / ONE_RUN + 1;
        shared.state.store(run * ONE_RUN + OPEN, Ordering::SeqCst);
        shared.wake_workers((tasks - 1).min(self.workers.len()));
        shared.work(task, 0);
        // A worker that did not come in by now stays out.
        shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        shared.wait_until_left();
        shared.verdict()
    }
}

fn run_inline(tasks: usize, task: &Task<'_>, worker: usize) -> Result<(), TaskPanic> {
    let mut first = None;
    for number in 0..tasks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(number, worker))) {
            first.get_or_insert_with(|| TaskPanic(message(payload.as_ref())));
        }
    }
    first.map_or(Ok(()), Err)
}

impl Drop for Team {
    fn drop(&mut self) {
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.state.fetch_or(SHUT_DOWN, Ordering::SeqCst);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks; should one have died there is nothing left to do.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests;
