//! From the gradients of micro-steps to those of the step, over all ranks. Which of these ops run when is decided by
//! [`SumTree`]; a session finds them by their origins.

use super::Blocks;
use crate::model::Sums;
use crate::{Error, Result};
use ironhorse_core::op::{Access, Accum, Add, AllGather, CopySlot, Exchange, Op, TreeSum};
use ironhorse_core::ranks::Move;
use ironhorse_core::{DType, Place, Pool, Section, Shape, Shard, Slices, Slot, SumTree};
use std::ops::Range;

/// What the numbers of a step that are no gradients are called: loss, parts of it, rewards.
const TALLY: &str = "tally";
/// Origins: the tally is gathered, what ranks computed at the same time is added, what they computed in the whole step is, and
/// the tally goes back to where it came from. Those between follow from [`Move::origin`].
const GATHER: &str = "sum.tally";
const EXCHANGE: &str = "sum.exchange";
const REDUCE: &str = "sum.reduce";
const SCATTER: &str = "sum.scatter";

/// Some elements of a flat slot.
pub(super) fn part(slot: Slot, range: &Range<usize>) -> Slot {
    let offset = slot.offset + range.start * slot.dtype.size();
    Slot { offset, shape: Shape::new([range.len()]), ..slot }
}

/// Memory that is added up, with its levels: the gradients or a part of them, or the tally.
struct Carried {
    own: Slot,
    levels: Vec<Slot>,
}

impl Blocks {
    /// The ops that add up micro-steps.
    pub fn sum(&mut self, sums: Sums) -> Result<()> {
        if !sums.is_needed() {
            return Ok(());
        }
        sums.check()?;
        self.b.section(Section::Sum);
        let small = self.small();
        let tally = self.tally(&small)?;
        let carried = self.carried(sums, tally);
        if sums.shard == Shard::Grads && !sums.place.is_alone() {
            // what all ranks computed at the same time
            self.reduce(EXCHANGE, sums, sums.place.world, &carried)?;
        }
        self.moves(&carried)?;
        if sums.shard != Shard::Grads && !sums.place.is_alone() {
            self.reduce(REDUCE, sums, sums.accumulate as usize, &carried)?;
            if sums.shard == Shard::None {
                let grads = self.b.flat(Pool::Grads);
                for bucket in sums.slices().buckets(grads.numel()) {
                    self.b.push(AllGather { data: part(grads, &bucket), place: sums.place })?;
                }
            }
        }
        self.b.at(SCATTER);
        for (slot, held) in small {
            self.b.push(CopySlot { out: slot, inp: part(tally, &held) })?;
        }
        Ok(())
    }

    /// What is summed over micro-steps besides the gradients, and where it is in the tally.
    fn small(&self) -> Vec<(Slot, Range<usize>)> {
        let mut slots: Vec<Slot> = Vec::new();
        let summed = |access: Access| matches!(access, Access::Accumulate(Accum::FirstWrites));
        let args = self.b.nodes().iter().flat_map(|node| node.op.args());
        let accumulated =
            args.filter(|arg| arg.slot.pool == Pool::Io && summed(arg.access)).map(|arg| arg.slot);
        let loads = self.b.nodes().iter().filter_map(|node| match node.op {
            Op::RouterLoad(op) => Some(op.load),
            _ => None,
        });
        // the loss is only last made of what is accumulated
        let all = accumulated.chain(loads).chain(self.b.find_io("loss"));
        for slot in all.filter(|slot| slot.dtype == DType::F32) {
            if !slots.contains(&slot) {
                slots.push(slot);
            }
        }
        let mut start = 0;
        let place = |slot: Slot| {
            start += slot.numel();
            (slot, start - slot.numel()..start)
        };
        slots.into_iter().map(place).collect()
    }

    fn tally(&mut self, small: &[(Slot, Range<usize>)]) -> Result<Slot> {
        let numbers = small.last().map_or(0, |(_, held)| held.end);
        let tally = self.b.io(TALLY, [numbers], DType::F32);
        self.b.at(GATHER);
        for (slot, held) in small {
            self.b.push(CopySlot { out: part(tally, held), inp: *slot })?;
        }
        Ok(tally)
    }

    /// What is added up, with room for its levels: behind the gradients, and among inputs and results.
    fn carried(&mut self, sums: Sums, tally: Slot) -> Vec<Carried> {
        let (grads, levels) = (self.b.flat(Pool::Grads), sums.levels());
        let whole = 0..grads.numel();
        let parts = match sums.shard {
            Shard::Grads if !sums.place.is_alone() => sums.slices().parts(grads.numel()),
            _ => vec![whole],
        };
        let held: usize = parts.iter().map(Range::len).sum();
        let room = held * grads.dtype.size();
        let mut start = 0;
        let mut carried = Vec::new();
        for range in parts {
            let level = |d: usize| {
                let offset = grads.bytes() + d * room + start * grads.dtype.size();
                Slot { offset, shape: Shape::new([range.len()]), ..grads }
            };
            carried.push(Carried { own: part(grads, &range), levels: (0..levels).map(level).collect() });
            start += range.len();
        }
        let small = (0..levels).map(|d| self.b.io(format!("{TALLY}.{d}"), tally.shape, DType::F32));
        let levels = small.collect();
        carried.push(Carried { own: tally, levels });
        carried
    }

    /// The four ways in which a level changes.
    fn moves(&mut self, carried: &[Carried]) -> Result<()> {
        let levels = carried.first().map_or(0, |carried| carried.levels.len());
        let carried: Vec<&Carried> = carried.iter().filter(|carried| carried.own.numel() > 0).collect();
        for d in 0..levels {
            self.b.at(Move::Keep(d).origin());
            for Carried { own, levels } in &carried {
                self.b.push(CopySlot { out: levels[d], inp: *own })?;
            }
            self.b.at(Move::Add(d).origin());
            for Carried { own, levels } in &carried {
                self.b.push(Add { out: levels[d], a: levels[d], b: *own })?;
            }
            if d + 1 < levels {
                self.b.at(Move::Merge(d).origin());
                for Carried { levels, .. } in &carried {
                    self.b.push(Add { out: levels[d], a: levels[d], b: levels[d + 1] })?;
                }
            }
            self.b.at(Move::Take(d).origin());
            for Carried { own, levels } in &carried {
                self.b.push(Add { out: *own, a: levels[d], b: *own })?;
            }
        }
        Ok(())
    }

    /// What all ranks have of a step of so many micro-steps becomes the sum: of the gradients in the parts of this rank, of
    /// the tally everywhere.
    fn reduce(&mut self, origin: &str, sums: Sums, micro_steps: usize, carried: &[Carried]) -> Result<()> {
        let (place, slices) = (sums.place, sums.slices());
        let rows = SumTree::new(micro_steps).rows(place.world);
        let rounds = |rank: usize| rows.iter().filter(|row| row.rank == rank).count();
        let most = (0..place.world).map(rounds).max().unwrap_or(0);
        let own: Vec<Option<usize>> =
            rows.iter().filter(|row| row.rank == place.rank).map(|row| row.level).collect();
        let (grads, tally) = (self.b.flat(Pool::Grads), carried.last());
        let Some(tally) = tally else { return Ok(()) };
        let level_of = |level: Option<usize>, bucket: &Range<usize>| {
            let start = level.map_or(0, |d| (d + 1) * grads.bytes());
            part(Slot { offset: grads.offset + start, ..grads }, bucket)
        };
        self.b.at(origin);
        for bucket in slices.buckets(grads.numel()) {
            let mine = slices.part_of(&bucket, place.rank);
            let out = self.b.activation([rows.len(), mine.len()], grads.dtype);
            for round in 0..most {
                let inp = own.get(round).map(|level| level_of(*level, &bucket));
                self.b.push(Exchange { out, inp, round, micro_steps, place, divided: true })?;
            }
            if !mine.is_empty() {
                let world = place.world;
                self.b.push(TreeSum { out: part(grads, &mine), inp: out, micro_steps, world })?;
            }
        }
        let out = self.b.activation([rows.len(), tally.own.numel()], DType::F32);
        for round in 0..most {
            let inp = own.get(round).map(|level| level.map_or(tally.own, |d| tally.levels[d]));
            self.b.push(Exchange { out, inp, round, micro_steps, place, divided: false })?;
        }
        self.b.push(TreeSum { out: tally.own, inp: out, micro_steps, world: place.world })?;
        Ok(())
    }
}

impl Sums {
    /// Refuses what ranks cannot share.
    pub fn check(&self) -> Result<()> {
        let (count, world) = (self.accumulate as usize, self.place.world);
        if count == 0 || !count.is_multiple_of(world) {
            return Err(Error::input(
                "the number of micro-steps, --accumulate,",
                count,
                format!("a multiple of the {world} ranks, which share them"),
            ));
        }
        if self.shard == Shard::Grads && !world.is_power_of_two() {
            let expected = "a power of two with --shard grads; use --shard state";
            return Err(Error::input("the number of ranks", world, expected));
        }
        Ok(())
    }

    /// What runs after each micro-step of this rank in a step of so many: origins of ops of [`Section::Sum`], in order.
    pub fn after_each(&self, micro_steps: usize) -> Vec<Vec<String>> {
        let moves = SumTree::new(micro_steps).moves(self.place, self.shard);
        let last = moves.len().saturating_sub(1);
        let of = |(made, moves): (usize, Vec<Move>)| {
            let ends = if made == last { &[REDUCE, SCATTER][..] } else { &[] };
            let fixed = |origin: &&str| (*origin).to_owned();
            let begins = [GATHER, EXCHANGE];
            begins
                .iter()
                .map(fixed)
                .chain(moves.into_iter().map(Move::origin))
                .chain(ends.iter().map(fixed))
                .collect()
        };
        moves.into_iter().enumerate().map(of).collect()
    }

    /// Which elements are whose.
    pub fn slices(&self) -> Slices {
        Slices::new(self.place)
    }

    /// The levels that a step may need: that of fewer micro-steps than `accumulate`, in a batch-size ramp-up, needs no more.
    fn levels(&self) -> usize {
        let each = self.accumulate as usize / self.place.world;
        if self.place.is_alone() || self.shard == Shard::Grads {
            return each.max(1).ilog2() as usize;
        }
        // all ranks have the same programs, whatever they need of it
        let tree = SumTree::new(self.accumulate as usize);
        let of = |rank| tree.levels(Place { rank, ..self.place }, self.shard);
        (0..self.place.world).map(of).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_alone_has_as_many_levels_as_any_number_of_micro_steps_needs() {
        let place = Place::ALONE;
        for accumulate in 1..200 {
            let sums = Sums { place, shard: Shard::State, accumulate };
            let needed =
                (1..=accumulate as usize).map(|count| SumTree::new(count).levels(place, Shard::State));
            assert_eq!(Some(sums.levels()), needed.max(), "{accumulate}");
        }
    }
}
