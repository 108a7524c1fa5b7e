//! What several ranks exchange, and the sum of what arrives.
//!
//! The order of a sum is that of [`SumTree`] and does not depend on the number of ranks; which elements belong to which rank is
//! decided by [`Slices`].

use super::numerics::{Arithmetic, Numerics};
use super::spec::{named, op};
use crate::ranks::Among;
use crate::{Place, Slices, Slot, SumTree};

op! {
    /// Sends the sums of micro-steps that this rank has, and receives those of the others: a row for each node of
    /// [`SumTree::rows`]. A rank may have several nodes; this op exchanges one of each rank, the number `round` of those that it
    /// has. Divided, rank j gets only its part of them ([`Slices::part_of`]); else every rank gets all.
    ///
    /// Among some of the ranks only, everything is as if there were no others: rows, parts and micro-steps are theirs. So a machine
    /// adds up what its ranks have before any of it leaves the machine.
    pub struct Exchange {
        /// (rows, elements of this rank's part, or all); the rows of other rounds are left as they are
        pub out: Slot = Write,
        /// a node of this rank; absent where it has fewer than others
        pub inp: Option<Slot> = Read,
        /// Which of the nodes of each rank is exchanged.
        pub round: usize,
        /// Micro-steps of the whole step, or nodes that are added here.
        pub micro_steps: usize,
        /// Which rank this is.
        pub place: Place,
        /// The ranks that exchange.
        pub among: Among,
        /// Whether each rank gets a part only.
        pub divided: bool,
    }
    name "exchange"
    check(op, c) {
        if op.place.rank >= op.place.world || !op.among.divides(op.place) {
            let Place { rank, world } = op.place;
            return c.fail(format!("rank {rank} of {world} has no others in {:?}", op.among));
        }
        let within = op.within();
        if op.micro_steps == 0 || op.micro_steps % within.world != 0 {
            let (Place { rank, world }, count) = (within, op.micro_steps);
            return c.fail(format!("rank {rank} of {world} cannot share {count} micro-steps, expected a multiple of the ranks"));
        }
        c.same_float(named!(op: out))?;
        let rows = op.rows();
        match op.inp {
            Some(inp) => {
                c.dtype("inp", &inp, op.out.dtype)?;
                c.numel("out", &op.out, rows * op.received(inp.numel()))
            }
            None if op.out.numel() % rows == 0 => Ok(()),
            None => c.fail(format!("`out` has {} elements, expected {rows} rows", op.out.numel())),
        }
    }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}

impl Exchange {
    /// Which of how many this rank is among those that exchange.
    pub fn within(&self) -> Place {
        self.among.place(self.place)
    }

    /// The rows of all rounds.
    pub fn rows(&self) -> usize {
        SumTree::new(self.micro_steps).rows(self.within().world).len()
    }

    /// What the rank with number `index` among those that exchange gets of a node of `elements` elements.
    pub fn part(&self, elements: usize, index: usize) -> std::ops::Range<usize> {
        if self.divided { Slices::new(self.within()).part_of(&(0..elements), index) } else { 0..elements }
    }

    /// How many of a node's elements this rank receives.
    fn received(&self, elements: usize) -> usize {
        self.part(elements, self.within().rank).len()
    }

    /// The ranks that take part in this round, each with the row that it sends.
    pub fn senders(&self) -> Vec<(usize, usize)> {
        let mut seen = vec![0; self.within().world];
        let rows = SumTree::new(self.micro_steps).rows(self.within().world).into_iter().enumerate();
        let number = |(index, row): (usize, crate::ranks::Row)| {
            let round = seen[row.rank];
            seen[row.rank] += 1;
            (round, self.among.rank(row.rank, self.place), index)
        };
        let all: Vec<(usize, usize, usize)> = rows.map(number).collect();
        all.into_iter().filter(|(round, ..)| *round == self.round).map(|(_, rank, row)| (rank, row)).collect()
    }

    /// The ranks that get something of a node of `elements` elements, each with what it gets; this rank is one of them.
    pub fn receivers(&self, elements: usize) -> Vec<(usize, std::ops::Range<usize>)> {
        let all = 0..self.within().world;
        all.map(|index| (self.among.rank(index, self.place), self.part(elements, index))).collect()
    }
}

op! {
    /// `out = Σ rows of inp`, in the order of the tree over all micro-steps.
    pub struct TreeSum {
        /// any shape
        pub out: Slot = Write,
        /// (rows, the same size), from [`Exchange`]
        pub inp: Slot = Read,
        /// Micro-steps of the whole step.
        pub micro_steps: usize,
        /// How many ranks share them.
        pub world: usize,
    }
    name "tree_sum"
    check(op, c) {
        if op.world == 0 || op.micro_steps == 0 || op.micro_steps % op.world != 0 {
            let (count, world) = (op.micro_steps, op.world);
            return c.fail(format!("{world} ranks cannot share {count} micro-steps, expected a multiple of the ranks"));
        }
        c.same_float(named!(op: out, inp))?;
        c.numel("inp", &op.inp, SumTree::new(op.micro_steps).rows(op.world).len() * op.out.numel())
    }
    numerics(op, _arg) {
        // Every level of the tree rounds its sums once, all but the last in between.
        let rows = op.inp.numel() / op.out.numel().max(1);
        let between = f64::from(rows.max(1).next_power_of_two().ilog2().saturating_sub(1));
        let error = (between + 1.0) * Arithmetic::Addition.error();
        let arithmetic = if between == 0.0 { Arithmetic::Addition } else { Arithmetic::Elementwise(error) };
        Numerics::new(arithmetic).inner_roundings(between)
    }
    flops(op) { op.inp.numel().saturating_sub(op.out.numel()) as u64 }
}

op! {
    /// Gives every rank the parts of all others ([`Slices::part_of`]); this rank's own part is there.
    pub struct AllGather {
        /// a bucket of a flat pool
        pub data: Slot = Update,
        /// Which rank this is, and whose parts are where.
        pub slices: Slices,
    }
    name "all_gather"
    check(op, c) {
        let Place { rank, world } = op.slices.place;
        if rank >= world || !Among::Machine(op.slices.machine).divides(op.slices.place) {
            return c.fail(format!("rank {rank} of {world} in machines of {}, expected one below", op.slices.machine));
        }
        c.same_float(named!(op: data))
    }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;
    use crate::{DType, Pool, Shape};

    fn slot(dims: &[usize]) -> Slot {
        let offset = dims.len() << 30;
        let shape = match *dims {
            [rows, cols] => Shape::new([rows, cols]),
            _ => Shape::new([dims[0]]),
        };
        Slot { pool: Pool::Activations, offset, shape, dtype: DType::F32 }
    }

    #[test]
    fn what_ranks_cannot_share_is_refused() {
        let place = Place { rank: 1, world: 2 };
        let good = Exchange {
            out: slot(&[2, 5]),
            inp: Some(slot(&[5])),
            round: 0,
            micro_steps: 4,
            place,
            among: Among::All,
            divided: false,
        };
        Op::from(good).check().unwrap();
        assert_eq!(good.senders(), [(0, 0), (1, 1)]);
        let text = |op: Op| op.check().unwrap_err().to_string();
        assert_eq!(
            text(Exchange { micro_steps: 3, ..good }.into()),
            "exchange: rank 1 of 2 cannot share 3 micro-steps, expected a multiple of the ranks"
        );
        assert!(text(Exchange { out: slot(&[2, 4]), ..good }.into()).contains("expected 10"));
        // a part of 5 elements, which are less than a piece, is all or nothing
        assert!(
            text(Exchange { place: Place { rank: 0, world: 2 }, divided: true, ..good }.into())
                .contains("expected 0")
        );
        Op::from(Exchange { divided: true, ..good }).check().unwrap();
        let sum = TreeSum { out: slot(&[5]), inp: slot(&[2, 5]), micro_steps: 4, world: 2 };
        Op::from(sum).check().unwrap();
        assert!(text(TreeSum { micro_steps: 6, ..sum }.into()).contains("expected 20"));
        assert!(
            text(AllGather { data: slot(&[5]), slices: Slices::new(Place { rank: 2, world: 2 }) }.into())
                .contains("rank 2 of 2")
        );
    }

    #[test]
    fn rounds_have_the_ranks_that_have_so_many_nodes() {
        let op = |round| Exchange {
            out: slot(&[4, 5]),
            inp: None,
            round,
            micro_steps: 6,
            place: Place { rank: 0, world: 2 },
            among: Among::All,
            divided: false,
        };
        assert_eq!(op(0).senders(), [(0, 0), (1, 2)]);
        assert_eq!(op(1).senders(), [(0, 1), (1, 3)]);
        assert!(op(2).senders().is_empty());
    }
    #[test]
    fn among_some_ranks_there_are_no_others() {
        let place = Place { rank: 6, world: 8 };
        let op = |among: Among, micro_steps| Exchange {
            out: slot(&[micro_steps, 5]),
            inp: Some(slot(&[5])),
            round: 0,
            micro_steps,
            place,
            among,
            divided: false,
        };
        let inside = op(Among::Machine(4), 4);
        Op::from(inside).check().unwrap();
        assert_eq!(inside.senders(), [(4, 0), (5, 1), (6, 2), (7, 3)]);
        let between = op(Among::Peers(4), 2);
        Op::from(between).check().unwrap();
        assert_eq!(between.senders(), [(2, 0), (6, 1)]);
        assert_eq!(between.receivers(5), [(2, 0..5), (6, 0..5)]);
        let text = Op::from(op(Among::Machine(3), 3)).check().unwrap_err().to_string();
        assert_eq!(text, "exchange: rank 6 of 8 has no others in Machine(3)");
    }
}
