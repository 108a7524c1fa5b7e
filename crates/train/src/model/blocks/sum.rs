//! From the gradients of micro-steps to those of the step, over all ranks. Which of these ops run when is decided by
//! [`SumTree`]; a session finds them by their origins.

use super::Blocks;
use crate::model::{After, Sums};
use crate::{Error, Result};
use ironhorse_core::op::{Access, Accum, Add, AllGather, CopySlot, Exchange, Op, TreeSum};
use ironhorse_core::ranks::{Among, Move};
use ironhorse_core::{DType, Place, Pool, Section, Shape, Shard, Slices, Slot, SumTree};
use std::ops::Range;

/// What the numbers of a step that are no gradients are called: loss, parts of it, rewards.
const TALLY: &str = "tally";
/// Origins: the tally is gathered; what ranks computed at the same time is added, or what they computed in the whole step, a bucket
/// at a time; the same of the tally; every rank gets the sums of all; the tally goes back to where it came from. Those
/// between follow from [`Move::origin`].
const GATHER: &str = "sum.tally";
const EXCHANGE: &str = "sum.exchange";
const REDUCE: &str = "sum.reduce";
const REDUCE_TALLY: &str = "sum.reduce.tally";
const SPREAD: &str = "sum.spread";
const SCATTER: &str = "sum.scatter";

/// The origin of what is done with one bucket.
fn of_bucket(origin: &str, bucket: usize) -> String {
    format!("{origin}.bucket.{bucket}")
}

/// Some elements of a flat slot.
pub(super) fn part(slot: Slot, range: &Range<usize>) -> Slot {
    let offset = slot.offset + range.start * slot.dtype.size();
    Slot { offset, shape: Shape::new([range.len()]), ..slot }
}

/// Memory that is added up, with its levels: the gradients or a part of them, or the tally.
struct Carried {
    own: Slot,
    levels: Vec<Slot>,
    is_tally: bool,
}

/// How what all ranks have becomes its sum.
struct Reduction<'a> {
    sums: Sums,
    /// Micro-steps that are added.
    micro_steps: usize,
    /// The nodes of the tree that ranks have.
    rows: usize,
    /// The most nodes that one rank has.
    rounds: usize,
    /// The levels of this rank's own nodes of the tree; `None` is the gradients themselves.
    own: Vec<Option<usize>>,
    tally: &'a Carried,
}

impl<'a> Reduction<'a> {
    fn new(sums: Sums, micro_steps: usize, carried: &'a [Carried]) -> Self {
        let rows = SumTree::new(micro_steps).rows(sums.place.world);
        let of = |rank: usize| rows.iter().filter(move |row| row.rank == rank);
        let rounds = (0..sums.place.world).map(|rank| of(rank).count()).max().unwrap_or(0);
        let own = of(sums.place.rank).map(|row| row.level).collect();
        let tally = &carried[carried.len() - 1]; // `Blocks::carried` puts it there
        Self { sums, micro_steps, rows: rows.len(), rounds, own, tally }
    }

    /// Rows into which a bucket arrives, and of how many elements each: the most of all stages.
    fn received(&self, bucket: &Range<usize>) -> usize {
        let Sums { place, .. } = self.sums;
        let slices = self.sums.slices();
        let mine = slices.part_of(bucket, place.rank).len();
        match self.sums.stages() {
            None => self.rows * mine,
            Some(machine) => {
                let column = slices.column_of(bucket, place.rank).len();
                (machine * column).max(place.world / machine * mine)
            }
        }
    }
}

impl Blocks {
    /// The ops that add up micro-steps.
    pub fn sum(&mut self, sums: Sums) -> Result<()> {
        if !sums.is_needed() {
            return Ok(());
        }
        sums.check()?;
        let buckets = self.buckets(sums);
        self.b.section(Section::Sum);
        let small = self.small();
        let tally = self.tally(&small)?;
        let carried = self.carried(sums, tally);
        let shared = !sums.place.is_alone();
        if sums.shard == Shard::Grads && shared {
            // what all ranks computed at the same time
            let reduction = Reduction::new(sums, sums.place.world, &carried);
            let receive = self.receive(&reduction, &buckets);
            self.b.at(EXCHANGE);
            for (bucket, _) in &buckets {
                self.reduce(&reduction, bucket, receive)?;
            }
            self.reduce_tally(&reduction)?;
        }
        self.moves(&carried)?;
        self.takes(&carried, |carried| sums.shard == Shard::Grads || !shared || carried.is_tally)?;
        if sums.shard != Shard::Grads && shared {
            let reduction = Reduction::new(sums, sums.accumulate as usize, &carried);
            let receive = self.receive(&reduction, &buckets);
            for (number, (bucket, _)) in buckets.iter().enumerate() {
                self.takes_of(bucket, number, &carried)?;
                self.b.at(of_bucket(REDUCE, number));
                self.reduce(&reduction, bucket, receive)?;
            }
            self.reduce_tally(&reduction)?;
            if sums.shard == Shard::None {
                let (grads, slices) = (self.b.flat(Pool::Grads), sums.slices());
                self.b.at(SPREAD);
                for bucket in slices.buckets(grads.numel()) {
                    self.b.push(AllGather { data: part(grads, &bucket), slices })?;
                }
            }
        }
        self.b.at(SCATTER);
        for (slot, held) in small {
            self.b.push(CopySlot { out: slot, inp: part(tally, &held) })?;
        }
        Ok(())
    }

    /// The buckets of the gradients in the order in which the backward completes them, each with the number of ops that have run then.
    fn buckets(&self, sums: Sums) -> Vec<(Range<usize>, usize)> {
        let grads = self.b.flat(Pool::Grads);
        let complete = |bucket: Range<usize>| {
            let slot = part(grads, &bucket);
            let writes = |node: &ironhorse_core::Node| node.op.writes().any(|to| to.overlaps(&slot));
            let last = self.b.nodes().iter().rposition(writes);
            (bucket, last.map_or(0, |last| last + 1))
        };
        let mut buckets: Vec<_> = sums.slices().buckets(grads.numel()).into_iter().map(complete).collect();
        buckets.sort_by_key(|(_, complete)| *complete);
        buckets
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
            carried.push(Carried {
                own: part(grads, &range),
                levels: (0..levels).map(level).collect(),
                is_tally: false,
            });
            start += range.len();
        }
        let small = (0..levels).map(|d| self.b.io(format!("{TALLY}.{d}"), tally.shape, DType::F32));
        let levels = small.collect();
        carried.push(Carried { own: tally, levels, is_tally: true });
        carried
    }

    /// Three of the four ways in which a level changes.
    fn moves(&mut self, carried: &[Carried]) -> Result<()> {
        let levels = carried.first().map_or(0, |carried| carried.levels.len());
        let carried: Vec<&Carried> = carried.iter().filter(|carried| carried.own.numel() > 0).collect();
        for d in 0..levels {
            self.b.at(Move::Keep(d).origin());
            for Carried { own, levels, .. } in &carried {
                self.b.push(CopySlot { out: levels[d], inp: *own })?;
            }
            self.b.at(Move::Add(d).origin());
            for Carried { own, levels, .. } in &carried {
                self.b.push(Add { out: levels[d], a: levels[d], b: *own })?;
            }
            if d + 1 < levels {
                self.b.at(Move::Merge(d).origin());
                for Carried { levels, .. } in &carried {
                    self.b.push(Add { out: levels[d], a: levels[d], b: levels[d + 1] })?;
                }
            }
        }
        Ok(())
    }

    /// The fourth, after the last micro-step: levels are added to what is there, the highest first.
    fn takes(&mut self, carried: &[Carried], of: impl Fn(&Carried) -> bool) -> Result<()> {
        let levels = carried.first().map_or(0, |carried| carried.levels.len());
        for d in (0..levels).rev() {
            self.b.at(Move::Take(d).origin());
            for Carried { own, levels, .. } in
                carried.iter().filter(|carried| of(carried) && carried.own.numel() > 0)
            {
                self.b.push(Add { out: *own, a: levels[d], b: *own })?;
            }
        }
        Ok(())
    }

    /// The same of one bucket, so that it can be exchanged before the others are complete.
    fn takes_of(&mut self, bucket: &Range<usize>, number: usize, carried: &[Carried]) -> Result<()> {
        let Some(Carried { own, levels, .. }) = carried.first().filter(|carried| !carried.is_tally) else {
            return Ok(());
        };
        for (d, &level) in levels.iter().enumerate().rev() {
            self.b.at(of_bucket(&Move::Take(d).origin(), number));
            let own = part(*own, bucket);
            self.b.push(Add { out: own, a: part(level, bucket), b: own })?;
        }
        Ok(())
    }

    /// Memory into which buckets arrive, one after the other: in use from when the first of them may be exchanged.
    fn receive(&mut self, reduction: &Reduction<'_>, buckets: &[(Range<usize>, usize)]) -> Slot {
        let most = buckets.iter().map(|(bucket, _)| reduction.received(bucket)).max().unwrap_or(0);
        let since = buckets.iter().map(|(_, complete)| *complete).min().unwrap_or(0);
        let dtype = self.b.precision().grads;
        self.b.activation_since(since, [most], dtype)
    }

    /// What all ranks have of a bucket becomes the sum, of the part of this rank.
    fn reduce(&mut self, reduction: &Reduction<'_>, bucket: &Range<usize>, receive: Slot) -> Result<()> {
        let Reduction { sums, micro_steps, rows, .. } = *reduction;
        let (place, slices, grads) = (sums.place, sums.slices(), self.b.flat(Pool::Grads));
        let mine = slices.part_of(bucket, place.rank);
        let into = |rows: usize, elements: usize| Slot { shape: Shape::new([rows, elements]), ..receive };
        if let Some(machine) = sums.stages() {
            let column = slices.column_of(bucket, place.rank);
            let stages =
                [(Among::Machine(machine), bucket, &column), (Among::Peers(machine), &column, &mine)];
            for (among, from, to) in stages {
                let micro_steps = among.place(place).world;
                let (out, inp) = (into(micro_steps, to.len()), Some(part(grads, from)));
                self.b.push(Exchange { out, inp, round: 0, micro_steps, place, among, divided: true })?;
                if !to.is_empty() {
                    let world = micro_steps;
                    self.b.push(TreeSum { out: part(grads, to), inp: out, micro_steps, world })?;
                }
            }
            return Ok(());
        }
        let level_of = |level: Option<usize>| {
            let start = level.map_or(0, |d| (d + 1) * grads.bytes());
            part(Slot { offset: grads.offset + start, ..grads }, bucket)
        };
        let (out, among) = (into(rows, mine.len()), Among::All);
        for round in 0..reduction.rounds {
            let inp = reduction.own.get(round).map(|level| level_of(*level));
            self.b.push(Exchange { out, inp, round, micro_steps, place, among, divided: true })?;
        }
        if !mine.is_empty() {
            let world = place.world;
            self.b.push(TreeSum { out: part(grads, &mine), inp: out, micro_steps, world })?;
        }
        Ok(())
    }

    /// What all ranks have of the tally becomes the sum, everywhere. This shows a fault of a rank to all, so it waits for everything
    /// that the rank computes.
    fn reduce_tally(&mut self, reduction: &Reduction<'_>) -> Result<()> {
        let &Reduction { sums, micro_steps, rows, tally, .. } = reduction;
        let (place, among) = (sums.place, Among::All);
        self.b.at(REDUCE_TALLY);
        let out = self.b.activation([rows, tally.own.numel()], DType::F32);
        for round in 0..reduction.rounds {
            let inp = reduction.own.get(round).map(|level| level.map_or(tally.own, |d| tally.levels[d]));
            self.b.push(Exchange { out, inp, round, micro_steps, place, among, divided: false })?;
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

    /// What runs after each micro-step of this rank in a step of so many, in a program whose gradients have so many elements.
    pub fn after_each(&self, micro_steps: usize, gradients: usize) -> Vec<After> {
        let moves = SumTree::new(micro_steps).moves(self.place, self.shard);
        let buckets = self.slices().buckets(gradients).len();
        let last = moves.len().saturating_sub(1);
        let of = |(made, moves): (usize, Vec<Move>)| {
            let then = [GATHER.to_owned()].into_iter();
            let origins = moves.iter().map(|step| step.origin());
            if self.place.is_alone() || self.shard == Shard::Grads {
                let both = !self.place.is_alone();
                let exchange = both.then(|| EXCHANGE.to_owned());
                let tally = both.then(|| REDUCE_TALLY.to_owned());
                let ends = (made == last).then(|| SCATTER.to_owned());
                return After {
                    beside: exchange.into_iter().collect(),
                    then: then.chain(tally).chain(origins).chain(ends).collect(),
                };
            }
            if made != last {
                return After { beside: Vec::new(), then: then.chain(origins).collect() };
            }
            let bucket = |number: usize| {
                let takes = moves.iter().map(move |step| of_bucket(&step.origin(), number));
                takes.chain([of_bucket(REDUCE, number)])
            };
            let ends = [REDUCE_TALLY, SPREAD, SCATTER].map(str::to_owned);
            After {
                beside: (0..buckets).flat_map(bucket).collect(),
                then: then.chain(origins).chain(ends).collect(),
            }
        };
        moves.into_iter().enumerate().map(of).collect()
    }

    /// Which elements are whose.
    pub fn slices(&self) -> Slices {
        let usual = Slices::of_machines(self.place, self.stages().unwrap_or(1));
        Slices { bucket: if self.bucket == 0 { usual.bucket } else { self.bucket }, ..usual }
    }

    /// Whether the ranks of a machine add up what they have before any of it leaves the machine: how many they are. The sums are those
    /// of the tree where the micro-steps of a machine are a node of it: powers of two.
    pub fn stages(&self) -> Option<usize> {
        let Place { world, .. } = self.place;
        let machine = self.machine;
        let each = if self.shard == Shard::Grads { 1 } else { self.accumulate as usize / world.max(1) };
        let several = machine > 1 && machine < world && world.is_multiple_of(machine);
        (several && machine.is_power_of_two() && each.is_power_of_two()).then_some(machine)
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
            let sums = Sums { place, shard: Shard::State, accumulate, ..Sums::default() };
            let needed =
                (1..=accumulate as usize).map(|count| SumTree::new(count).levels(place, Shard::State));
            assert_eq!(Some(sums.levels()), needed.max(), "{accumulate}");
        }
    }
}
