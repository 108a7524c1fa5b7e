//! How long collectives take on machines of several GPUs: a model of links, not a measurement.

use super::{PIECE_ELEMENTS, Place, Slices};
use crate::op::{AllGather, Exchange, GradNorm, Op};

/// What connects the ranks of a run. Ranks are numbered machine by machine, and every rank has a link to the others of its
/// machine and a network card of its own; both carry both directions at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Ranks of one machine.
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
    /// The same between machines.
    pub message_outside: f64,
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
    /// GPUs of the kind of an H200, so many in a machine: NVLink with 450 GB/s and 400 Gb/s of network for each. NCCL reaches about
    /// four fifths of such rates; the latencies are of the order that its small messages show.
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
        }
    }

    /// What an op of this rank sends and receives; `None` for an op without others.
    pub fn traffic(&self, op: &Op) -> Option<Traffic> {
        match op {
            // a library adds one node of each rank
            Op::Exchange(op) if !op.place.is_alone() && self.adds && op.rows() == op.place.world => {
                let bytes = op.inp.map_or(0, |inp| inp.bytes());
                let twice = if op.divided { 1 } else { 2 };
                Some(self.gather(op.place, twice * bytes))
            }
            Op::Exchange(op) if !op.place.is_alone() => Some(self.exchange(op)),
            Op::AllGather(AllGather { data, place }) if !place.is_alone() => {
                Some(self.gather(*place, data.bytes()))
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
        let (Place { rank, world }, slices) = (op.place, Slices::new(op.place));
        let size = op.out.dtype.size();
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
        for to in 0..world {
            let part = |elements: usize| match op.divided {
                true => slices.part_of(&(0..elements), to).len(),
                false => elements,
            };
            count(&mut sent, to, op.inp.map_or(0, |inp| part(inp.numel()) * size));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Pool, Shape, Slot};

    const BUCKET: usize = 512 * PIECE_ELEMENTS;

    fn slot(rows: usize, elements: usize) -> Slot {
        let (offset, shape) = (rows << 40, Shape::new([rows, elements]));
        Slot { pool: Pool::Activations, offset, shape, dtype: DType::F32 }
    }

    fn exchange(place: Place) -> Op {
        let part = Slices::new(place).part_of(&(0..BUCKET), place.rank).len();
        let (out, inp) = (slot(place.world, part), Some(Slot { offset: 1 << 50, ..slot(1, BUCKET) }));
        Exchange { out, inp, round: 0, micro_steps: place.world, place, divided: true }.into()
    }

    #[test]
    fn a_machine_of_eight_moves_seven_eighths_over_its_links() {
        let links = Links::h200(8);
        let place = Place { rank: 3, world: 8 };
        let bytes = (4 * BUCKET) as f64 * 7.0 / 8.0;
        let found = links.traffic(&exchange(place)).unwrap();
        assert_eq!(found, Traffic { inside: bytes, messages_inside: 7, ..Traffic::default() });
        let gather = AllGather { data: slot(1, BUCKET), place };
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
        let ring = links.traffic(&AllGather { data: slot(1, BUCKET), place }.into()).unwrap();
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
        let few = Links::h200(8)
            .traffic(&AllGather { data: slot(1, 100), place: Place { rank: 0, world: 2 } }.into());
        assert_eq!(few.unwrap().outside, 0.0, "two ranks of a machine of eight");
    }
}
