//! How long collectives take on machines of several GPUs: a model of links, not a measurement.

use super::{Among, Lane, PIECE_ELEMENTS, Place, Turn};
use crate::op::{AllGather, Exchange, GradNorm, Op};

/// What connects the ranks of a run. Ranks are numbered machine by machine, and every rank has a link to the others of its
/// machine and a network card of its own; both carry both directions at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// How many ranks a machine has.
    pub local: usize,
    /// Bytes a second and direction between a rank and those of its machine.
    pub inside: f64,
    /// Bytes a second and direction between a rank and those of other machines.
    pub outside: f64,
    /// How much of these rates large messages reach.
    pub reached: f64,
    /// Whether the library adds on the way (`--fast`): what leaves a machine is then the sum of its ranks.
    pub adds: bool,
    /// Seconds until a collective has begun.
    pub call: f64,
    /// Seconds that a message inside a machine adds, however small.
    pub message_inside: f64,
    /// Seconds that a message between machines adds, however small.
    pub message_outside: f64,
    /// How much slower a rank computes while it exchanges: its library keeps some of the multiprocessors busy, and the memory.
    pub slows: f64,
}

/// What a rank sends and receives in one collective: the larger of both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes to or from ranks of the same machine.
    pub inside: f64,
    /// Bytes to or from other machines, over this rank's network card.
    pub outside: f64,
    /// Messages in a row inside the machine.
    pub messages_inside: usize,
    /// Messages in a row between machines.
    pub messages_outside: usize,
}

impl Links {
    /// Machines of `local` GPUs of the kind of an H200: NVLink with 450 GB/s and 400 Gb/s of network for each. NCCL reaches about
    /// four fifths of such rates; the latencies are of the order that its small messages show, and it takes about 20 of 132
    /// multiprocessors.
    pub fn h200(local: usize) -> Self {
        Self {
            local: local.max(1),
            inside: 450e9,
            outside: 50e9,
            reached: 0.8,
            adds: false,
            call: 20e-6,
            message_inside: 1e-6,
            message_outside: 3e-6,
            slows: 0.15,
        }
    }

    /// What an op of this rank sends and receives; `None` for an op without others.
    pub fn traffic(&self, op: &Op) -> Option<Traffic> {
        match op {
            // a library adds one node of each rank
            Op::Exchange(op)
                if !op.within().is_alone()
                    && self.adds
                    && op.among == Among::All
                    && op.rows() == op.place.world =>
            {
                let bytes = op.inp.map_or(0, |inp| inp.bytes());
                let twice = if op.divided { 1 } else { 2 };
                Some(self.gather(op.place, twice * bytes))
            }
            Op::Exchange(op) if !op.within().is_alone() => Some(self.exchange(op)),
            Op::AllGather(AllGather { data, slices }) if !slices.place.is_alone() => {
                Some(self.gather(slices.place, data.bytes()))
            }
            Op::GradNorm(GradNorm { grads, slices: Some(slices), .. }) if !slices.place.is_alone() => {
                let pieces = grads.numel().div_ceil(PIECE_ELEMENTS);
                Some(self.gather(slices.place, pieces * size_of::<f64>()))
            }
            _ => None,
        }
    }

    /// The time of such traffic, with nothing else on the links.
    pub fn seconds(&self, traffic: &Traffic) -> f64 {
        let bytes = (traffic.inside / self.inside).max(traffic.outside / self.outside) / self.reached;
        let messages = traffic.messages_inside as f64 * self.message_inside
            + traffic.messages_outside as f64 * self.message_outside;
        self.call + bytes.max(messages)
    }

    fn is_near(&self, a: usize, b: usize) -> bool {
        a / self.local == b / self.local
    }

    /// Messages straight from each rank to each other.
    fn exchange(&self, op: &Exchange) -> Traffic {
        let (rank, size) = (op.place.rank, op.out.dtype.size());
        let width = op.out.numel() / op.rows().max(1) * size;
        let (mut sent, mut received) = (Traffic::default(), Traffic::default());
        let count = |traffic: &mut Traffic, other: usize, bytes: usize| {
            if bytes == 0 || other == rank {
            } else if self.is_near(rank, other) {
                traffic.inside += bytes as f64;
                traffic.messages_inside += 1;
            } else {
                traffic.outside += bytes as f64;
                traffic.messages_outside += 1;
            }
        };
        if let Some(inp) = op.inp {
            op.receivers(inp.numel())
                .into_iter()
                .for_each(|(to, part)| count(&mut sent, to, part.len() * size));
        }
        op.senders().into_iter().for_each(|(from, _)| count(&mut received, from, width));
        Traffic {
            inside: sent.inside.max(received.inside),
            outside: sent.outside.max(received.outside),
            messages_inside: sent.messages_inside.max(received.messages_inside),
            messages_outside: sent.messages_outside.max(received.messages_outside),
        }
    }

    /// Rings through all ranks, as NCCL has them: one for each network card, so that every byte enters a machine once.
    fn gather(&self, Place { world, .. }: Place, bytes: usize) -> Traffic {
        let (bytes, machines) = (bytes as f64, world.div_ceil(self.local));
        let all_but_own = |ranks: usize| bytes * (ranks - 1) as f64 / ranks as f64;
        let local = self.local.min(world);
        Traffic {
            inside: if local > 1 { all_but_own(world) } else { 0.0 },
            outside: if machines > 1 { all_but_own(machines) / local as f64 } else { 0.0 },
            messages_inside: world - machines,
            messages_outside: machines - 1,
        }
    }
}

/// How long an op takes by itself, and whether it only waits for links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lasting {
    /// The queue it is in, and what it waits for before it begins.
    pub turn: Turn,
    /// How long it takes, with nothing beside it.
    pub seconds: f64,
    /// Whether it exchanges something and computes nothing.
    pub exchanges: bool,
}

/// The time of ops that run on two queues.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// Seconds until the last has ended.
    pub seconds: f64,
    /// The part of it in which nothing is computed: what is exchanged then is not hidden.
    pub waiting: f64,
    /// The time of exchanges while something is computed.
    pub hidden: f64,
}

impl Links {
    /// How long ops take together. What is computed beside other computing takes its time from it; beside an exchange computing is
    /// slower ([`Links::slows`]).
    pub fn beside(&self, ops: &[Lasting]) -> Beside {
        let queue =
            |lane: Lane| ops.iter().enumerate().filter(move |(_, op)| op.turn.lane == lane).map(|(at, _)| at);
        let mut queues = [Lane::Computing, Lane::Exchanging].map(|lane| queue(lane).peekable());
        let mut rest: Vec<f64> = ops.iter().map(|op| op.seconds.max(0.0)).collect();
        let mut ended = vec![false; ops.len()];
        let mut time = Beside::default();
        loop {
            let begun = |at: Option<&usize>| {
                at.copied()
                    .filter(|&at| ops[at].turn.after.is_none_or(|after| ended.get(after) == Some(&true)))
            };
            let [main, side] = queues.each_mut().map(|queue| begun(queue.peek()));
            let rates = match (main, side) {
                (Some(_), Some(side)) if ops[side].exchanges => [1.0 - self.slows, 1.0],
                (Some(_), Some(_)) => [0.0, 1.0],
                (None, None) => return time,
                _ => [1.0; 2],
            };
            let running = [main, side].into_iter().zip(rates).filter_map(|(at, rate)| Some((at?, rate)));
            let running: Vec<(usize, f64)> = running.filter(|(_, rate)| *rate > 0.0).collect();
            let now = running.iter().map(|&(at, rate)| rest[at] / rate).fold(f64::INFINITY, f64::min);
            time.seconds += now;
            match (main, side) {
                (None, Some(side)) if ops[side].exchanges => time.waiting += now,
                (Some(_), Some(side)) if ops[side].exchanges => time.hidden += now,
                _ => {}
            }
            for (at, rate) in running {
                let left = rest[at] - now * rate;
                rest[at] = if left <= 1e-12 * ops[at].seconds { 0.0 } else { left };
                if rest[at] == 0.0 {
                    ended[at] = true;
                    for queue in &mut queues {
                        queue.next_if_eq(&at);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Pool, Shape, Slices, Slot};

    const BUCKET: usize = 512 * PIECE_ELEMENTS;

    fn slot(rows: usize, elements: usize) -> Slot {
        let (offset, shape) = (rows << 40, Shape::new([rows, elements]));
        Slot { pool: Pool::Activations, offset, shape, dtype: DType::F32 }
    }

    fn exchange(place: Place) -> Op {
        let part = Slices::new(place).part_of(&(0..BUCKET), place.rank).len();
        let (out, inp) = (slot(place.world, part), Some(Slot { offset: 1 << 50, ..slot(1, BUCKET) }));
        Exchange { out, inp, round: 0, micro_steps: place.world, place, among: Among::All, divided: true }
            .into()
    }

    #[test]
    fn a_machine_of_eight_moves_seven_eighths_over_its_links() {
        let links = Links::h200(8);
        let place = Place { rank: 3, world: 8 };
        let bytes = (4 * BUCKET) as f64 * 7.0 / 8.0;
        let found = links.traffic(&exchange(place)).unwrap();
        assert_eq!(found, Traffic { inside: bytes, messages_inside: 7, ..Traffic::default() });
        let gather = AllGather { data: slot(1, BUCKET), slices: Slices::new(place) };
        assert_eq!(links.traffic(&gather.into()).unwrap().inside, bytes);
        let seconds = links.seconds(&found);
        assert!((seconds - (20e-6 + bytes / 450e9 / 0.8)).abs() < 1e-12, "{seconds}");
    }

    /// The exchange of slices sends to every rank of other machines, a ring once into every machine.
    #[test]
    fn between_machines_an_exchange_sends_more_than_a_ring() {
        let links = Links::h200(8);
        let place = Place { rank: 9, world: 16 };
        let found = links.traffic(&exchange(place)).unwrap();
        let bytes = (4 * BUCKET) as f64;
        assert_eq!((found.inside, found.outside), (bytes * 7.0 / 16.0, bytes / 2.0));
        assert_eq!((found.messages_inside, found.messages_outside), (7, 8));
        let ring =
            links.traffic(&AllGather { data: slot(1, BUCKET), slices: Slices::new(place) }.into()).unwrap();
        assert_eq!(ring.outside, bytes / 2.0 / 8.0);
        let fast = Links { adds: true, ..links };
        assert_eq!(
            fast.traffic(&exchange(place)),
            Some(ring),
            "a reduce-scatter is a gather the other way round"
        );
    }

    #[test]
    fn one_rank_sends_nothing_and_small_messages_cost_their_latency() {
        let links = Links::h200(8);
        assert_eq!(links.traffic(&exchange(Place::ALONE)), None);
        let small = Traffic { inside: 8.0, messages_inside: 7, ..Traffic::default() };
        assert!((links.seconds(&small) - 27e-6).abs() < 1e-9);
        let few = Links::h200(8).traffic(
            &AllGather { data: slot(1, 100), slices: Slices::new(Place { rank: 0, world: 2 }) }.into(),
        );
        assert_eq!(few.unwrap().outside, 0.0, "two ranks of a machine of eight");
    }
    /// Two stages: inside the machine all but an eighth, and between machines as much as a ring.
    #[test]
    fn a_machine_that_adds_first_sends_an_eighth() {
        let (links, place) = (Links::h200(8), Place { rank: 9, world: 32 });
        let stage = |among: Among, elements: usize| {
            let within = among.place(place);
            let part = Slices::new(within).part_of(&(0..elements), within.rank).len();
            let (out, inp) = (slot(within.world, part), Some(Slot { offset: 1 << 50, ..slot(1, elements) }));
            let op = Exchange { out, inp, round: 0, micro_steps: within.world, place, among, divided: true };
            links.traffic(&op.into()).unwrap()
        };
        let bytes = (4 * BUCKET) as f64;
        let inside = stage(Among::Machine(8), BUCKET);
        assert_eq!((inside.inside, inside.outside), (bytes * 7.0 / 8.0, 0.0));
        let between = stage(Among::Peers(8), BUCKET / 8);
        assert_eq!((between.inside, between.outside), (0.0, bytes / 8.0 * 3.0 / 4.0));
        assert_eq!(between.messages_outside, 3);
    }

    #[test]
    fn exchanges_hide_behind_computing_that_they_slow() {
        let links = Links { slows: 0.5, ..Links::h200(8) };
        let op = |lane, after, seconds| Lasting {
            turn: Turn { op: 0, lane, after },
            seconds,
            exchanges: lane == Lane::Exchanging,
        };
        // the exchange of 2 s begins after the first second, and slows the second op of 3 s
        let ops = [
            op(Lane::Computing, None, 1.0),
            op(Lane::Exchanging, Some(0), 2.0),
            op(Lane::Computing, None, 3.0),
        ];
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let found = links.beside(&ops);
        assert!(near(found.seconds, 5.0) && near(found.waiting, 0.0) && near(found.hidden, 2.0), "{found:?}");
        // one that waits for the exchange
        let waits = [ops[0], ops[1], op(Lane::Computing, Some(1), 3.0)];
        let found = links.beside(&waits);
        assert!(near(found.seconds, 6.0) && near(found.waiting, 2.0) && near(found.hidden, 0.0), "{found:?}");
        // what is computed beside takes its time from the other
        let computes = [ops[0], Lasting { exchanges: false, ..ops[1] }, ops[2]];
        assert!(near(links.beside(&computes).seconds, 6.0));
        assert_eq!(links.beside(&[]), Beside::default());
    }
}
