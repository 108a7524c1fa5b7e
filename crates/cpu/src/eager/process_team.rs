//! The process-wide team of threads.
//!
//! One caller at a time has it. A second one that comes meanwhile does not wait: it works alone, on its own thread. So
//! callers on several threads cannot block each other, and a child process made by `fork`, in which the threads of the
//! team do not exist and the lock may be held by nobody, works too.

use crate::gemm::Workspace;
use crate::isa::Isa;
use crate::team::{Done, Split, Team};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, TryLockError};

/// Elements of light work (one load, one store, one operation) below which more threads gain nothing: below 8 MiB the caches
/// feed one thread as fast as it computes. Heavier work counts by its weight.
const WORTH_IT: usize = 1 << 21;

/// A team, and the memory that matrix products on it keep.
struct Pool {
    process: u32,
    wanted: usize,
    team: Team,
    workspace: Workspace,
}

impl Pool {
    fn new(threads: usize) -> Self {
        Self {
            process: std::process::id(),
            wanted: threads,
            team: Team::new(threads),
            workspace: Workspace::new(),
        }
    }
}

static SHARED: Mutex<Option<Pool>> = Mutex::new(None);
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The pool of a caller that works alone.
    static SOLO: RefCell<Option<Pool>> = const { RefCell::new(None) };
}

/// How many threads large calls may use from now on; 0, as at the start, means one for each core.
pub fn set_threads(threads: usize) {
    THREADS.store(threads, Ordering::Relaxed);
}

/// How many threads large calls use; 0 means one for each core.
pub fn threads() -> usize {
    THREADS.load(Ordering::Relaxed)
}

/// Calls `work` with a team: the process-wide one if `wide` and nobody else has it, else a team of one, the calling
/// thread.
pub(crate) fn with_team<R>(wide: bool, work: impl FnOnce(&Team, &mut Workspace) -> R) -> R {
    if wide {
        let mut guard = match SHARED.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(work),
        };
        let stale = |pool: &Pool| pool.process != std::process::id() || pool.wanted != threads();
        if let Some(old) = guard.take_if(|pool| stale(pool))
            && old.process != std::process::id()
        {
            // After a fork the threads are not there: dropping the team would wait for them.
            std::mem::forget(old);
        }
        let pool = guard.get_or_insert_with(|| Pool::new(threads()));
        return work(&pool.team, &mut pool.workspace);
    }
    alone(work)
}

fn alone<R>(work: impl FnOnce(&Team, &mut Workspace) -> R) -> R {
    SOLO.with(|solo| match solo.try_borrow_mut() {
        Ok(mut slot) => {
            let pool = slot.get_or_insert_with(|| Pool::new(1));
            work(&pool.team, &mut pool.workspace)
        }
        // A call inside a call of the same thread.
        Err(_) => work(&Team::new(1), &mut Workspace::new()),
    })
}

/// [`Split`] of an eager op: on several threads if `len * weight` light element operations are worth it.
#[derive(Clone, Copy)]
pub(crate) struct ProcessTeam;

impl Split for ProcessTeam {
    fn isa(&self) -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(Isa::detect)
    }

    fn pieces(&self, len: usize, chunk: usize, weight: usize, task: impl Fn(Range<usize>) + Sync) -> Done {
        let chunk = chunk.max(1);
        if len.saturating_mul(weight) < WORTH_IT || len <= chunk {
            // `step_by` would divide, which takes as long as a small op.
            let mut start = 0;
            while start < len {
                let end = len.min(start.saturating_add(chunk));
                task(start..end);
                start = end;
            }
            return Ok(());
        }
        with_team(true, |team, _| team.chunks(len, chunk, |range, _| task(range)))
    }

    fn rows(&self, count: usize, width: usize, weight: usize, task: impl Fn(usize) + Sync) -> Done {
        /// Light element operations of a task.
        const TASK: usize = 1 << 16;
        let work = width.saturating_mul(weight);
        if count.saturating_mul(work) < WORTH_IT {
            (0..count).for_each(task);
            return Ok(());
        }
        self.pieces(count, TASK / work.max(1), work, |range| range.for_each(&task))
    }
}
