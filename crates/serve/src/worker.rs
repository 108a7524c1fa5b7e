//! The thread that owns the model: requests wait in a queue, join the decoder when it has a row for them, and are told what is written.
//!
//! What is written goes into a channel of each request that never blocks: a client that reads slowly holds its own tokens, at most as
//! many as it asked for, and nobody else's.

use crate::metrics::Metrics;
use ironhorse_train::generate::{Decoder, Event, Job};
use ironhorse_train::session::Session;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What a request is told: the number of the text, and what happened to it.
pub type Told = (usize, Result<Event, String>);

/// One text of a request.
pub struct Work {
    /// The text.
    pub job: Job,
    /// Its number in the request.
    pub index: usize,
    /// The channel to the request. A request that is gone has closed it.
    pub told: mpsc::UnboundedSender<Told>,
    /// Whether nothing more is wanted.
    pub cancelled: Arc<AtomicBool>,
    /// When the request came.
    pub came: Instant,
}

impl Work {
    fn is_wanted(&self) -> bool {
        !self.cancelled.load(Ordering::Relaxed) && !self.told.is_closed()
    }
}

/// Why work was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    /// The queue is full.
    Full,
    /// The model's thread has ended.
    Gone,
}

#[derive(Default)]
struct Waiting {
    work: VecDeque<Work>,
    /// No more work comes.
    closed: bool,
    /// The thread has ended.
    gone: bool,
}

/// The work that waits for the model.
pub struct Queue {
    waiting: Mutex<Waiting>,
    came: Condvar,
    most: usize,
}

impl Queue {
    /// A queue with room for `most` texts.
    pub fn new(most: usize) -> Self {
        Self { waiting: Mutex::default(), came: Condvar::new(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // nothing that holds it panics half way
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds all of these texts or none.
    pub fn add(&self, work: Vec<Work>) -> Result<(), Busy> {
        let mut waiting = self.lock();
        if waiting.gone || waiting.closed {
            return Err(Busy::Gone);
        }
        waiting.work.retain(Work::is_wanted);
        if waiting.work.len() + work.len() > self.most {
            return Err(Busy::Full);
        }
        waiting.work.extend(work);
        self.came.notify_one();
        Ok(())
    }

    /// How many texts it has room for.
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many texts wait.
    pub fn len(&self) -> usize {
        self.lock().work.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the model's thread has ended.
    pub fn is_gone(&self) -> bool {
        self.lock().gone
    }

    /// Lets the thread end when all work is done.
    pub fn close(&self) {
        self.lock().closed = true;
        self.came.notify_one();
    }

    /// The next work; waits for it if the decoder has nothing to do. `None` when there is none now, or none comes any more.
    fn next(&self, idle: bool) -> Option<Work> {
        let mut waiting = self.lock();
        loop {
            while let Some(work) = waiting.work.pop_front() {
                if work.is_wanted() {
                    return Some(work);
                }
            }
            if !idle || waiting.closed {
                return None;
            }
            let woken = self.came.wait_timeout(waiting, Duration::from_secs(1));
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Says that the thread has ended, however it does.
struct Ended<'a>(&'a Queue);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        waiting.gone = true;
        waiting.work.clear();
    }
}

/// Writes until the queue is closed and all work is done.
pub fn run(session: &mut Session, queue: &Queue, metrics: &Metrics) -> ironhorse_train::Result<()> {
    let _ended = Ended(queue);
    let mut decoder = Decoder::new(session)?;
    let mut writing: HashMap<u64, Work> = HashMap::new();
    loop {
        writing.retain(|&id, work| {
            let wanted = work.is_wanted();
            if !wanted {
                decoder.leave(id);
            }
            wanted
        });
        while decoder.has_room() {
            let Some(work) = queue.next(decoder.is_empty()) else { break };
            metrics.prompt_tokens.add(work.job.prompt.len() as u64);
            match decoder.join(work.job.clone()) {
                Ok(id) => {
                    metrics.queue_seconds.record(work.came.elapsed());
                    writing.insert(id, work);
                }
                Err(error) => tell(&work, Err(error.to_string())),
            }
        }
        if decoder.is_empty() {
            if queue.lock().closed {
                return Ok(());
            }
            continue;
        }
        metrics.sequences.set(decoder.len() as u64);
        let start = Instant::now();
        let stepped = decoder.step(|id, event| {
            let Some(work) = writing.get_mut(&id) else { return Ok(()) };
            let ends = matches!(event, Event::End(_));
            if let Event::Token(_) = &event {
                metrics.completion_tokens.add(1);
            }
            tell(work, Ok(event));
            if ends {
                writing.remove(&id);
            }
            Ok(())
        });
        metrics.step_seconds.record(start.elapsed());
        metrics.sequences.set(decoder.len() as u64);
        if let Err(error) = stepped {
            // one of them may be at fault, and which is not known: all are told, and the next begin anew
            tracing::warn!("a step failed: {error}");
            for (id, work) in writing.drain() {
                decoder.leave(id);
                tell(&work, Err(error.to_string()));
            }
        }
    }
}

fn tell(work: &Work, what: Result<Event, String>) {
    let _ = work.told.send((work.index, what)); // a client that is gone
}
