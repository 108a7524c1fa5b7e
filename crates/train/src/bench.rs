//! Timing training steps, whole and kernel by kernel, and decoding.

use crate::Result;
use crate::generate::sample::Sampler;
use crate::generate::{Request, generate};
use crate::session::{Batch, PendingUpdate, Session};
use ironhorse_core::op::Op;
use ironhorse_core::{Program, Scalars, Timed};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How often to run.
#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    /// Steps before timing starts.
    pub warmup: usize,
    /// Steps to time, at least.
    pub steps: usize,
    /// How long to time, at least: a device slows down once it is warm.
    pub time: Duration,
    /// Micro-steps of a step of one rank, each of the whole batch.
    pub accumulate: u32,
}

/// What a benchmark measured.
#[derive(Clone, Debug, Default)]
pub struct Timing {
    /// Wall time of each step, warm-up left out.
    pub steps: Vec<Duration>,
    /// Loss of each step, warm-up included: the first is the loss before any update.
    pub losses: Vec<f32>,
    /// When the first step of all was done: kernels are compiled and algorithms chosen by then.
    pub first_done: Option<Instant>,
    /// Wall time of that first step.
    pub first: Duration,
}

impl Timing {
    /// The median step.
    pub fn median(&self) -> Duration {
        median(&self.steps)
    }

    /// The mean step.
    pub fn mean(&self) -> Duration {
        self.steps.iter().sum::<Duration>() / self.steps.len().max(1) as u32
    }
}

/// Runs training steps on one batch the way training does: where the engine works by itself, the next step is asked for
/// before the last is waited for. A step's time is the time between the ends of two steps.
pub fn time_steps(
    session: &mut Session,
    batch: Batch<'_>,
    scalars: &Scalars,
    repeat: &Repeat,
) -> Result<Timing> {
    let mut clock = Clock {
        timing: Timing::default(),
        warmup: repeat.warmup,
        timed: Duration::ZERO,
        last_end: Instant::now(),
    };
    let mut in_flight: Option<PendingUpdate> = None;
    let mut asked = 0;
    while asked < repeat.warmup + repeat.steps || clock.timed < repeat.time {
        asked += 1;
        let scalars = Scalars { step: asked as u32, ..*scalars }.counting(batch.y);
        let micro_steps = repeat.accumulate as usize * session.place().world;
        let scalars = Scalars { loss_scale: scalars.loss_scale / micro_steps as f32, ..scalars };
        for micro_step in session.begin_step(micro_steps) {
            session.step(batch, &Scalars { micro_step: micro_step as u32, ..scalars })?;
        }
        let pending = session.start_update(&scalars)?;
        if pending.is_ready() {
            clock.finish(session, pending)?;
        } else if let Some(earlier) = in_flight.replace(pending) {
            clock.finish(session, earlier)?;
        }
        // The timed steps start with nothing of the warm-up in flight.
        if asked == repeat.warmup {
            if let Some(last) = in_flight.take() {
                clock.finish(session, last)?;
            }
            session.engine().synchronize()?;
            clock.last_end = Instant::now();
        }
    }
    if let Some(last) = in_flight {
        clock.finish(session, last)?;
    }
    session.engine().synchronize()?;
    Ok(clock.timing)
}

struct Clock {
    timing: Timing,
    warmup: usize,
    timed: Duration,
    last_end: Instant,
}

impl Clock {
    fn finish(&mut self, session: &mut Session, pending: PendingUpdate) -> Result<()> {
        let (loss, _) = session.finish_update(pending)?;
        let end = Instant::now();
        let took = end - self.last_end;
        self.last_end = end;
        self.timing.losses.push(loss);
        if self.timing.first_done.is_none() {
            (self.timing.first_done, self.timing.first) = (Some(end), took);
        }
        if self.timing.losses.len() > self.warmup {
            self.timing.steps.push(took);
            self.timed += took;
        }
        Ok(())
    }
}

/// Tokens generated one after the other.
#[derive(Clone, Debug, Default)]
pub struct Decoding {
    /// Wall time of each token, warm-up left out.
    pub timing: Timing,
    /// The tokens of a single sequence, warm-up included.
    pub written: Vec<u32>,
    /// The kernels of one more token at the last position, without a graph.
    pub kernels: Vec<Timed>,
}

/// Generates `warmup` tokens and then `tokens` that are timed, for `batch` sequences at a time. A single sequence continues with
/// its most likely token, for which it waits; several are all fed token 0, and none is chosen.
pub fn time_decoding(session: &mut Session, batch: usize, [warmup, tokens]: [usize; 2]) -> Result<Decoding> {
    let (count, vocab) = (warmup + tokens, session.config().vocab_size());
    let (mut ends, mut written) = (vec![Instant::now()], Vec::new());
    if batch == 1 {
        let sampler = Sampler::greedy();
        let request = Request { prompt: &[0], vocab, tokens: count, context: None, stop: &[], sampler };
        written = generate(session, &request, |_| {
            ends.push(Instant::now());
            Ok(())
        })?;
    } else {
        for position in 0..count {
            session.feed(&vec![0; batch], position)?;
            session.engine().synchronize()?;
            ends.push(Instant::now());
        }
    }
    let steps = ends.windows(2).skip(warmup).map(|pair| pair[1] - pair[0]).collect();
    let kernels = session.profile_feed(count.saturating_sub(1))?;
    Ok(Decoding { timing: Timing { steps, ..Timing::default() }, written, kernels })
}

/// A training step, kernel by kernel.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Each kernel with its median time, in the order they ran.
    pub kernels: Vec<Timed>,
    /// One whole step as it ran: the one whose kernels took the median time.
    pub timeline: Vec<Timed>,
}

impl Recording {
    /// Time of all kernels of the recorded timeline, and from its first kernel's start to its last one's end, in ns.
    pub fn busy_and_span(&self) -> (u64, u64) {
        let start = self.timeline.iter().map(|timed| timed.start_ns).min().unwrap_or(0);
        let end = self.timeline.iter().map(|timed| timed.start_ns + timed.ns).max().unwrap_or(0);
        (total(&self.timeline), end - start)
    }

    /// The time of what ranks exchange in the recorded timeline, in ns, and how much of it is hidden: something else is computed at
    /// the same time.
    pub fn exchanged_and_hidden(&self, program: &Program) -> (u64, u64) {
        let exchanges = |timed: &&Timed| {
            let op = program.nodes().get(timed.op).map(|node| &node.op);
            matches!(op, Some(Op::Exchange(_) | Op::AllGather(_)))
        };
        let span = |timed: &Timed| timed.start_ns..timed.start_ns + timed.ns;
        let exchanged = union(self.timeline.iter().filter(exchanges).map(span).collect());
        let computed = union(self.timeline.iter().filter(|timed| !exchanges(timed)).map(span).collect());
        let common = |a: &Range<u64>, b: &Range<u64>| b.end.min(a.end).saturating_sub(b.start.max(a.start));
        let hidden = exchanged.iter().flat_map(|a| computed.iter().map(move |b| common(a, b))).sum();
        (exchanged.iter().map(|span| span.end - span.start).sum(), hidden)
    }

    /// Median time of each of the program's first `ops` ops, in ns.
    pub fn op_ns(&self, ops: usize) -> Vec<u64> {
        let mut times = vec![0; ops];
        for timed in &self.kernels {
            if let Some(time) = times.get_mut(timed.op) {
                *time += timed.ns;
            }
        }
        times
    }
}

/// Runs steps with every kernel timed by itself.
pub fn profile_steps(
    session: &mut Session,
    batch: Batch<'_>,
    scalars: &Scalars,
    [warmup, steps]: [usize; 2],
) -> Result<Recording> {
    let mut records = Vec::with_capacity(steps);
    for step in 0..warmup + steps {
        let scalars = Scalars { step: step as u32 + 1, ..*scalars }.counting(batch.y);
        let record = session.record_step(batch, &scalars)?;
        if step >= warmup {
            records.push(record);
        }
    }
    Ok(summarise(records))
}

/// Steps launch the same kernels in the same order, so each gets its median over the steps. If they differ after all,
/// the times of the median step are used.
fn summarise(mut records: Vec<Vec<Timed>>) -> Recording {
    records.sort_by_key(|record| total(record));
    let Some(timeline) = records.get(records.len() / 2).cloned() else { return Recording::default() };
    let same = |record: &Vec<Timed>| {
        record.len() == timeline.len()
            && record.iter().zip(&timeline).all(|(a, b)| (a.op, &a.name) == (b.op, &b.name))
    };
    let mut kernels = timeline.clone();
    if records.iter().all(same) {
        for (i, kernel) in kernels.iter_mut().enumerate() {
            let mut times: Vec<u64> = records.iter().map(|record| record[i].ns).collect();
            times.sort_unstable();
            kernel.ns = times[times.len() / 2];
        }
    }
    Recording { kernels, timeline }
}

/// Spans of time, those that meet joined.
fn union(mut spans: Vec<Range<u64>>) -> Vec<Range<u64>> {
    spans.sort_by_key(|span| span.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => joined.push(span),
        }
    }
    joined
}

fn total(record: &[Timed]) -> u64 {
    record.iter().map(|timed| timed.ns).sum()
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    match sorted[..] {
        [] => Duration::ZERO,
        _ => (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::{AllGather, Fill};
    use ironhorse_core::{Builder, DType, Place, Slices};

    /// Two exchanges, of which one half goes on beside two kernels that overlap.
    #[test]
    fn an_exchange_is_hidden_while_something_is_computed() {
        let mut b = Builder::new();
        let out = b.io("out", [8], DType::F32);
        b.push(Fill { out, value: 1.0 }).unwrap();
        b.push(AllGather { data: out, slices: Slices::new(Place { rank: 0, world: 2 }) }).unwrap();
        let program = b.finish().unwrap();
        let timed = |op, start_ns, ns| Timed { op, first: op, name: String::new(), start_ns, ns };
        let timeline = vec![timed(0, 0, 60), timed(0, 50, 50), timed(1, 20, 160), timed(1, 300, 20)];
        let recording = Recording { timeline, ..Recording::default() };
        assert_eq!(recording.exchanged_and_hidden(&program), (180, 80));
    }

    #[test]
    fn the_median_is_in_the_middle() {
        let of =
            |times: &[u64]| median(&times.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>());
        assert_eq!(of(&[]), Duration::ZERO);
        assert_eq!(of(&[7]), Duration::from_millis(7));
        assert_eq!(of(&[9, 4]), Duration::from_micros(6500));
        assert_eq!(of(&[30, 1, 2]), Duration::from_millis(2));
        assert_eq!(of(&[1, 30, 2, 4]), Duration::from_millis(3));
    }

    fn step(times: [u64; 2]) -> Vec<Timed> {
        let [a, b] = times;
        vec![
            Timed { op: 0, first: 0, name: "a".into(), start_ns: 5, ns: a },
            Timed { op: 2, first: 2, name: "b".into(), start_ns: 105, ns: b },
        ]
    }

    #[test]
    fn each_kernel_gets_its_median_and_the_timeline_is_one_step() {
        let recording = summarise(vec![step([10, 30]), step([20, 40]), step([15, 90])]);
        assert_eq!(recording.kernels.iter().map(|kernel| kernel.ns).collect::<Vec<_>>(), [15, 40]);
        assert_eq!(recording.timeline, step([20, 40]));
        assert_eq!(recording.busy_and_span(), (60, 140));
        assert_eq!(recording.op_ns(4), [15, 0, 40, 0]);
    }

    #[test]
    fn steps_that_differ_are_not_mixed() {
        let recording = summarise(vec![step([10, 30]), step([20, 40]), step([15, 90])[..1].to_vec()]);
        assert_eq!(recording.kernels, step([10, 30]));
        assert_eq!(summarise(Vec::new()).kernels, []);
    }
}
