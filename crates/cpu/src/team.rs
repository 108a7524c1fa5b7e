//! A fixed team of threads that runs numbered tasks.
//!
//! A training step calls [`Team::run`] some hundreds of times, with a few microseconds of work between the
//! calls. So the threads live as long as the team, a call allocates nothing, tasks are handed out by one atomic
//! counter, and a thread that has nothing to do spins for a moment before it sleeps.
//!
//! Which thread runs which task is not fixed. Results that must not depend on it need tasks that write disjoint
//! memory and a partition into tasks that does not depend on the number of threads, or does not matter.

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

/// State word: bit 0 the gate is open; bits 1..=15 workers inside; bit 16 shut down; bits 17.. number of the run.
const OPEN: u64 = 1;
const ONE_INSIDE: u64 = 2;
const INSIDE_MASK: u64 = 0xfffe;
const SHUT_DOWN: u64 = 1 << 16;
const ONE_RUN: u64 = 1 << 17;
const MAX_THREADS: usize = 1 << 14;

/// The run in progress. Written by the caller while the gate is shut and nobody is inside.
struct Job {
    task: Option<&'static Task<'static>>,
    tasks: usize,
}

/// The counter has its own cache line: every worker hammers it.
#[repr(align(128))]
struct Counter(AtomicUsize);

struct Shared {
    id: u64,
    spin: bool,
    state: AtomicU64,
    next: Counter,
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
    /// Takes tasks until none is left.
    fn work(&self, task: &Task<'_>, tasks: usize, worker: usize) {
        let before = INSIDE.replace((self.id, worker));
        loop {
            let number = self.next.0.fetch_add(1, Ordering::Relaxed);
            if number >= tasks {
                break;
            }
            self.guarded(task, number, worker);
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
            let (task, tasks) = unsafe { ((*self.job.get()).task, (*self.job.get()).tasks) };
            if let Some(task) = task {
                self.work(task, tasks, worker);
            }
            let left = self.state.fetch_sub(ONE_INSIDE, Ordering::SeqCst) - ONE_INSIDE;
            if left & INSIDE_MASK == 0 && self.caller_sleeps.load(Ordering::SeqCst) {
                let _guard = lock(&self.sleep);
                self.done.notify_all();
            }
        }
    }

    /// Idle worker: returns when the state word may be worth another look.
    fn wait_for_change(&self, old: u64) {
        // A change of the count of workers inside is of no interest: only the run, the gate and shut-down are.
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
            next: Counter(AtomicUsize::new(0)),
            job: UnsafeCell::new(Job { task: None, tasks: 0 }),
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
            // Inside another team's task this thread is no worker of ours; it is the only one of this run.
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
        unsafe { *shared.job.get() = Job { task: Some(forever), tasks } };
        shared.next.0.store(0, Ordering::Relaxed);
        let run = shared.state.load(Ordering::Relaxed) / ONE_RUN + 1;
        shared.state.store(run * ONE_RUN + OPEN, Ordering::SeqCst);
        shared.wake_workers((tasks - 1).min(self.workers.len()));
        shared.work(task, tasks, 0);
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

/// One `T` for each worker of a team, each on its own cache lines.
pub struct PerWorker<T> {
    items: Vec<Padded<T>>,
}

#[repr(align(128))]
struct Padded<T>(UnsafeCell<T>);

// SAFETY: the items are reached through `&mut self`, or by `get`, whose contract is one thread for each worker number.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    /// `make(worker)` for each worker of `team`.
    pub fn new(team: &Team, make: impl FnMut(usize) -> T) -> Self {
        Self { items: (0..team.threads()).map(make).map(|item| Padded(UnsafeCell::new(item))).collect() }
    }

    /// The item of `worker`.
    ///
    /// # Safety
    /// `worker` is below the team's thread count, it is the number the team gave to the running task, the task holds no
    /// other reference to this item, and no other run that uses these items is under way (see [`Team::run`]).
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, worker: usize) -> &mut T {
        // SAFETY: the team runs no two tasks at the same time with one worker number; the caller holds no second
        // reference. The index is checked.
        unsafe { &mut *self.items[worker].0.get() }
    }

    /// All items, for preparing and for combining in a fixed order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().map(|item| item.0.get_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 4, 9] {
            let team = Team::new(threads);
            assert_eq!(team.threads(), threads);
            let mut random = 12345_u64;
            for _ in 0..2000 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let tasks = (random >> 33) as usize % 40;
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                team.run(tasks, &|number, worker| {
                    assert!(worker < threads);
                    counts[number].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn workers_wake_after_sleep() {
        let team = Team::new(2);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            let both = AtomicU32::new(0);
            // Each task waits for the other: passes only if two threads take part.
            team.run(2, &|_, _| {
                both.fetch_add(1, Ordering::SeqCst);
                while both.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            })
            .unwrap();
        }
    }

    #[test]
    fn worker_numbers_are_exclusive() {
        let team = Team::new(4);
        let busy = PerWorker::new(&team, |_| AtomicBool::new(false));
        for _ in 0..500 {
            team.run(16, &|_, worker| {
                // SAFETY: the team's own worker number; only one reference.
                let flag = unsafe { busy.get(worker) };
                assert!(!flag.swap(true, Ordering::SeqCst));
                std::hint::spin_loop();
                flag.store(false, Ordering::SeqCst);
            })
            .unwrap();
        }
    }

    #[test]
    fn panics_are_reported_and_the_team_survives() {
        for threads in [1, 3] {
            let team = Team::new(threads);
            for round in 0..50 {
                let ran = AtomicU32::new(0);
                let verdict = team.run(20, &|number, _| {
                    ran.fetch_add(1, Ordering::Relaxed);
                    assert!(number != 7, "task seven");
                });
                assert_eq!(ran.load(Ordering::Relaxed), 20, "round {round}");
                assert!(verdict.unwrap_err().to_string().contains("task seven"));
                team.run(20, &|_, _| ()).unwrap();
            }
        }
    }

    #[test]
    fn nested_runs_stay_on_their_thread() {
        let team = Team::new(3);
        let other = Team::new(2);
        let total = AtomicU32::new(0);
        team.run(10, &|_, worker| {
            let me = std::thread::current().id();
            team.run(5, &|_, inner| {
                assert_eq!((worker, me), (inner, std::thread::current().id()));
                total.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            other.run(5, &|_, _| assert_eq!(me, std::thread::current().id())).unwrap();
        })
        .unwrap();
        assert_eq!(total.load(Ordering::Relaxed), 50);
    }

    #[test]
    fn threads_may_share_a_team() {
        let team = Team::new(2);
        let total = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(6, &|_, _| {
                            total.fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 6);
    }

    #[test]
    fn chunks_cover_the_range() {
        let team = Team::new(3);
        for (len, chunk) in [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 7), (3, 0)] {
            let hits: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
            team.chunks(len, chunk, |range, _| {
                range.for_each(|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
            })
            .unwrap();
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
        }
    }
}
