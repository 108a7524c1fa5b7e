//! A range of ops as launches: run one by one at first, recorded and replayed from then on. What ranks exchange goes to a stream of
//! its own; events make one stream wait for the other where an op uses what one of the other has to leave first.

use crate::Result;
use crate::device::{Buffer, Device, Event, Graph, Stream};
use crate::launch::Launch;
use crate::memory::Counters;
use ironhorse_core::Slot;
use ironhorse_core::ranks::{Lane, Turn};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A range of ops made ready.
#[derive(Default)]
pub(crate) struct Lowered {
    /// The launches in the order in which they are given to the device.
    pub(crate) launches: Vec<Launch>,
    pub(crate) constants: Vec<Buffer>,
    pub(super) counters: Counters,
    /// The launches, and what they wait for.
    steps: Vec<Step>,
    events: Vec<Event>,
    graph: Option<Graph>,
    /// Whether recording has failed: then the range runs launch by launch.
    eager: bool,
    runs: u32,
    /// The gradients that the ops write, and those of them whose sums of squares they leave.
    pub(super) written: Vec<Slot>,
    pub(super) summed: Vec<Slot>,
    /// Positions the scalar `position` must stay below.
    pub(super) context: Option<usize>,
}

/// What the host gives to a stream at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The launch with this number.
    Launch(Lane, usize),
    /// The present end of a stream becomes the event with this number.
    Mark(Lane, usize),
    /// What follows on a stream waits for this event.
    Wait(Lane, usize),
}

/// The streams of an engine.
#[derive(Clone, Copy)]
pub(crate) struct Streams<'a> {
    pub main: &'a Stream,
    /// The stream of what ranks exchange, where there are several.
    pub exchange: &'a Stream,
}

impl Streams<'_> {
    fn of(&self, lane: Lane) -> &Stream {
        match lane {
            Lane::Computing => self.main,
            Lane::Exchanging => self.exchange,
        }
    }
}

/// The launches of one op, which are on the list of its lane.
pub(super) struct Made {
    pub turn: Turn,
    pub launches: Range<usize>,
}

/// Settles the ranges after the last op took back launches of ops before it to compute all of them in one: what is left counts for the
/// first of these.
pub(super) fn join(made: &mut [Made]) {
    let Some((end, lane)) = made.last().map(|last| (last.launches.end, last.turn.lane)) else { return };
    let behind = |of: &&mut Made| of.launches.end > end || of.launches.start > end;
    for of in made.iter_mut().rev().filter(|of| of.turn.lane == lane).take_while(behind) {
        of.launches = of.launches.start.min(end)..of.launches.end.min(end);
    }
}

/// The launches of both lanes.
#[derive(Default)]
pub(super) struct Lanes {
    pub computing: Vec<Launch>,
    pub exchanging: Vec<Launch>,
}

impl Lanes {
    pub fn of(&mut self, lane: Lane) -> &mut Vec<Launch> {
        match lane {
            Lane::Computing => &mut self.computing,
            Lane::Exchanging => &mut self.exchanging,
        }
    }
}

impl Lowered {
    /// Puts the launches of both lanes into the order of their ops.
    pub(super) fn arrange(&mut self, device: &'static Device, lanes: Lanes, order: &[Made]) -> Result<()> {
        let ops: Vec<(Turn, Vec<bool>)> = order
            .iter()
            .map(|Made { turn, launches }| {
                let of_lane = match turn.lane {
                    Lane::Computing => &lanes.computing,
                    Lane::Exchanging => &lanes.exchanging,
                };
                let all = of_lane.get(launches.clone()).unwrap_or_default();
                (*turn, all.iter().map(Launch::exchanges).collect())
            })
            .collect();
        let (steps, events) = steps(&ops);
        let (mut computing, mut exchanging) = (lanes.computing.into_iter(), lanes.exchanging.into_iter());
        for Made { turn, launches } in order {
            let of_lane = match turn.lane {
                Lane::Computing => &mut computing,
                Lane::Exchanging => &mut exchanging,
            };
            self.launches.extend(of_lane.take(launches.len()));
        }
        // a kernel behind a wait has more than one thing ahead of it
        let mut waits: Vec<Lane> = Vec::new();
        for step in &steps {
            match *step {
                Step::Wait(lane, _) => waits.push(lane),
                Step::Launch(lane, at) if waits.contains(&lane) => {
                    self.launches[at].unchain();
                    waits.retain(|other| *other != lane);
                }
                _ => {}
            }
        }
        self.events = (0..events).map(|_| Event::new(device, false)).collect::<Result<_>>()?;
        self.steps = steps;
        Ok(())
    }

    /// Puts everything on the streams.
    pub fn run(&mut self, streams: Streams<'_>, graphs: bool) -> Result<()> {
        self.runs += 1;
        // The first run is eager: libraries load their kernels then, which a recording does not allow.
        let record = graphs && !self.eager && self.runs > 1 && self.launches.len() > 1;
        if self.graph.is_none() && record {
            let counters = self.counters.range();
            let mut capture = |counters: &Range<u64>| {
                streams.main.capture(counters, || self.enqueue(streams, |_, launch| launch()))
            };
            // a graph that cannot be changed is recorded as it is
            match capture(&counters).or_else(|_| capture(&(0..0))) {
                Ok(graph) => self.graph = Some(graph),
                Err(error) => {
                    self.eager = true;
                    warn_once(&error.to_string());
                }
            }
        }
        match &self.graph {
            Some(graph) => streams.main.replay(graph),
            None => self.enqueue(streams, |_, launch| launch()),
        }
    }

    /// Gives everything to the streams; `during` is called with the op of each launch, and makes it.
    pub fn enqueue(
        &mut self,
        streams: Streams<'_>,
        during: impl Fn(usize, &mut dyn FnMut() -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        for step in &self.steps {
            match *step {
                Step::Launch(lane, at) => {
                    let launch = &mut self.launches[at];
                    during(launch.op, &mut || launch.enqueue(streams.of(lane)))?;
                }
                Step::Mark(lane, event) => self.events[event].record(streams.of(lane))?,
                Step::Wait(lane, event) => streams.of(lane).wait(&self.events[event])?,
            }
        }
        Ok(())
    }
}

/// What the host gives to the streams for ops whose launches are numbered in order, each with whether it is for the stream of what
/// ranks exchange; and how many events that takes. At the end the main stream has waited for the other.
fn steps(ops: &[(Turn, Vec<bool>)]) -> (Vec<Step>, usize) {
    use Lane::{Computing, Exchanging};
    let (mut steps, mut events, mut launch) = (Vec::new(), 0, 0);
    let mut event = || {
        events += 1;
        events - 1
    };
    let waited: std::collections::HashSet<usize> = ops.iter().filter_map(|(turn, _)| turn.after).collect();
    let mut marks: HashMap<usize, usize> = HashMap::new();
    // what was asked for before this range is on the main stream
    let mut begins = ops.iter().any(|(turn, _)| turn.lane == Exchanging).then(&mut event);
    steps.extend(begins.map(|begin| Step::Mark(Computing, begin)));
    let mut behind = false;
    for (at, (turn, launches)) in ops.iter().enumerate() {
        let lane = turn.lane;
        if let Some(begin) = begins.take_if(|_| lane == Exchanging) {
            steps.push(Step::Wait(Exchanging, begin));
        }
        if let Some(&mark) = turn.after.and_then(|after| marks.get(&after)) {
            steps.push(Step::Wait(lane, mark));
        }
        for &exchanges in launches {
            if exchanges && lane == Computing {
                let [go, done] = [event(), event()];
                steps.extend([
                    Step::Mark(Computing, go),
                    Step::Wait(Exchanging, go),
                    Step::Launch(Exchanging, launch),
                    Step::Mark(Exchanging, done),
                    Step::Wait(Computing, done),
                ]);
            } else {
                steps.push(Step::Launch(lane, launch));
            }
            launch += 1;
        }
        if waited.contains(&at) {
            let mark = event();
            marks.insert(at, mark);
            steps.push(Step::Mark(lane, mark));
        }
        behind |= lane == Exchanging;
    }
    if behind {
        let end = event();
        steps.extend([Step::Mark(Exchanging, end), Step::Wait(Computing, end)]);
    }
    (steps, events)
}

/// Ranges fail for the same reason, so one line is enough.
fn warn_once(why: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("ops run one by one, not as a CUDA graph, and so slower: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Lane::{Computing, Exchanging};

    fn turn(lane: Lane, after: Option<usize>) -> Turn {
        Turn { op: 0, lane, after }
    }

    #[test]
    fn a_launch_in_place_of_several_counts_for_the_first_of_their_ops() {
        let made = |launches| Made { turn: turn(Computing, None), launches };
        let ranges = |all: &[Made]| all.iter().map(|of| of.launches.clone()).collect::<Vec<_>>();
        // the fourth op took back two launches and made one
        let taken = Range { start: 4, end: 3 };
        let mut all = vec![made(0..2), made(2..3), made(3..4), made(taken)];
        join(&mut all);
        assert_eq!(ranges(&all), [0..2, 2..3, 3..3, 3..3]);
        all.push(made(3..5));
        join(&mut all);
        assert_eq!(ranges(&all), [0..2, 2..3, 3..3, 3..3, 3..5]);
        // those of the other queue are counted for themselves
        let other = Made { turn: turn(Exchanging, None), launches: 0..9 };
        let mut all = vec![made(0..1), other, made(1..1)];
        join(&mut all);
        assert_eq!(ranges(&all), [0..1, 0..9, 1..1]);
    }

    #[test]
    fn computing_alone_has_no_events() {
        let ops = [(turn(Computing, None), vec![false, false]), (turn(Computing, None), vec![false])];
        let launches = (0..3).map(|at| Step::Launch(Computing, at)).collect();
        assert_eq!(steps(&ops), (launches, 0));
    }

    #[test]
    fn the_streams_part_wait_and_join() {
        let ops = [
            (turn(Computing, None), vec![false]),
            (turn(Exchanging, Some(0)), vec![true]),
            (turn(Computing, None), vec![false]),
            (turn(Computing, Some(1)), vec![false]),
        ];
        let expected = vec![
            Step::Mark(Computing, 0),
            Step::Launch(Computing, 0),
            Step::Mark(Computing, 1),
            Step::Wait(Exchanging, 0),
            Step::Wait(Exchanging, 1),
            Step::Launch(Exchanging, 1),
            Step::Mark(Exchanging, 2),
            Step::Launch(Computing, 2),
            Step::Wait(Computing, 2),
            Step::Launch(Computing, 3),
            Step::Mark(Exchanging, 3),
            Step::Wait(Computing, 3),
        ];
        assert_eq!(steps(&ops), (expected, 4));
    }

    /// The norm computes, exchanges and computes: its call goes to the other stream, and its kernels do not.
    #[test]
    fn a_call_inside_an_op_goes_to_the_other_stream() {
        let expected = vec![
            Step::Launch(Computing, 0),
            Step::Mark(Computing, 0),
            Step::Wait(Exchanging, 0),
            Step::Launch(Exchanging, 1),
            Step::Mark(Exchanging, 1),
            Step::Wait(Computing, 1),
            Step::Launch(Computing, 2),
        ];
        assert_eq!(steps(&[(turn(Computing, None), vec![false, true, false])]), (expected, 2));
    }
}
