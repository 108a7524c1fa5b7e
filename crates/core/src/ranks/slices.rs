//! Which elements of the flat pools belong to which rank.

use super::Place;
use std::ops::Range;

/// The elements of a piece, which is never divided: the gradient norm adds the squares of one piece at a time, and then these sums in
/// order.
pub const PIECE_ELEMENTS: usize = 1 << 16;

/// How flat pools are divided: into buckets, which are exchanged one after the other, and each bucket into a part for every
/// rank, in whole pieces of [`PIECE_ELEMENTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// The rank whose parts are meant.
    pub place: Place,
    /// Pieces of a bucket; the last bucket may have fewer.
    pub bucket: usize,
    /// Ranks of a machine, where these exchange among themselves first: a bucket is then divided among the ranks of a machine,
    /// and what each of them gets among those with the same number in all machines. 1 where there is no such order.
    pub machine: usize,
}

impl Slices {
    /// Buckets of 32 Mi elements: 128 MiB of f32, enough to fill a network while the backward computes the next one.
    pub const BUCKET: usize = 512;

    /// The division of pools into buckets of the usual size.
    pub fn new(place: Place) -> Self {
        Self::of_machines(place, 1)
    }

    /// As [`Slices::new`], for machines of `machine` ranks.
    pub fn of_machines(place: Place, machine: usize) -> Self {
        Self { place, bucket: Self::BUCKET, machine: machine.max(1) }
    }

    /// The elements of each bucket of a pool.
    pub fn buckets(&self, elements: usize) -> Vec<Range<usize>> {
        let size = self.bucket.max(1) * PIECE_ELEMENTS;
        (0..elements.div_ceil(size)).map(|i| i * size..((i + 1) * size).min(elements)).collect()
    }

    /// The part of a bucket that belongs to a rank; it may be empty.
    pub fn part_of(&self, bucket: &Range<usize>, rank: usize) -> Range<usize> {
        let world = self.place.world.max(1);
        divide(&self.column_of(bucket, rank), rank / self.machine, world / self.machine)
    }

    /// What the ranks with the same number in all machines as this one have of a bucket.
    pub fn column_of(&self, bucket: &Range<usize>, rank: usize) -> Range<usize> {
        divide(bucket, rank % self.machine, self.machine)
    }

    /// The parts of this rank, one of each bucket.
    pub fn parts(&self, elements: usize) -> Vec<Range<usize>> {
        self.parts_of(elements, self.place.rank)
    }

    /// The parts of a rank, one of each bucket.
    pub fn parts_of(&self, elements: usize, rank: usize) -> Vec<Range<usize>> {
        self.buckets(elements).iter().map(|bucket| self.part_of(bucket, rank)).collect()
    }

    /// How many elements a rank has.
    pub fn held(&self, elements: usize) -> usize {
        self.parts(elements).iter().map(Range::len).sum()
    }

    /// The elements of a range of the pool that this rank holds, as pairs: an offset in the range, and the elements of this rank's
    /// memory that begin with it. The memory holds the rank's parts one after the other.
    pub fn local(&self, elements: usize, range: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut start = 0;
        let mut found = Vec::new();
        for part in self.parts(elements) {
            let common = part.start.max(range.start)..part.end.min(range.end);
            if !common.is_empty() {
                let first = start + common.start - part.start;
                found.push((common.start - range.start, first..first + common.len()));
            }
            start += part.len();
        }
        found
    }
}

/// Part `index` of a range that is divided into `parts` of whole pieces.
fn divide(range: &Range<usize>, index: usize, parts: usize) -> Range<usize> {
    let pieces = range.len().div_ceil(PIECE_ELEMENTS);
    let cut = |index: usize| (range.start + pieces * index / parts.max(1) * PIECE_ELEMENTS).min(range.end);
    cut(index)..cut(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Among;

    fn numbers(seed: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(Some(seed), |x| {
            Some(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
        })
        .map(|x| x >> 33)
    }

    /// Any sizes, any world, any buckets: every element has one owner, and its place in the owner's memory is its own.
    #[test]
    fn every_element_belongs_to_exactly_one_rank() {
        let mut next = numbers(7);
        let mut draw = |most: u64| (next.next().unwrap() % most) as usize;
        for case in 0..200 {
            let elements = match case {
                0 => 0,
                1 => 1,
                2 => PIECE_ELEMENTS,
                _ => draw(40 * PIECE_ELEMENTS as u64),
            };
            let (machine, bucket) = (1 << draw(4), 1 + draw(12));
            let world = machine * (1 + draw(19));
            let of = |rank| Slices { place: Place { rank, world }, bucket, machine };
            let mut owned: Vec<Range<usize>> = (0..world).flat_map(|rank| of(rank).parts(elements)).collect();
            owned.retain(|part| !part.is_empty());
            owned.sort_by_key(|part| part.start);
            let mut end = 0;
            for part in &owned {
                assert_eq!(
                    part.start, end,
                    "case {case}: {elements} elements, world {world}, bucket {bucket}, machine {machine}"
                );
                assert_eq!(part.start % PIECE_ELEMENTS, 0);
                end = part.end;
            }
            assert_eq!(end, elements);
            let held: usize = (0..world).map(|rank| of(rank).held(elements)).sum();
            assert_eq!(held, elements);
            // a tensor anywhere is found whole, each part once
            if elements > 0 {
                let start = draw(elements as u64);
                let range = start..start + draw((elements - start) as u64 + 1);
                let mut seen = vec![0_u8; range.len()];
                for rank in 0..world {
                    let (mut last, held) = (0, of(rank).held(elements));
                    for (at, local) in of(rank).local(elements, &range) {
                        assert!(local.start >= last && local.end <= held);
                        last = local.end;
                        seen[at..at + local.len()].iter_mut().for_each(|seen| *seen += 1);
                    }
                }
                assert!(seen.iter().all(|&seen| seen == 1));
            }
        }
    }

    #[test]
    fn ranks_have_about_the_same() {
        let elements = 1_558_000_000;
        for (world, machine) in [(2, 1), (3, 1), (8, 1), (64, 1), (64, 8), (24, 8)] {
            let of = |rank| Slices::of_machines(Place { rank, world }, machine);
            let held: Vec<usize> = (0..world).map(|rank| of(rank).held(elements)).collect();
            let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
            assert!(most - least <= 48 * PIECE_ELEMENTS, "world {world}: {least} to {most}");
        }
    }
    /// What two stages of an exchange give a rank is its part: a share among its machine, and of that among its peers.
    #[test]
    fn stages_end_at_the_owner() {
        let mut next = numbers(11);
        for _ in 0..100 {
            let mut draw = |most: u64| (next.next().unwrap() % most) as usize;
            let (machine, machines) = (1 << draw(4), 1 + draw(5));
            let (world, bucket) = (machine * machines, 0..1 + draw(30 * PIECE_ELEMENTS as u64));
            for rank in 0..world {
                let place = Place { rank, world };
                let [inside, between] = [Among::Machine(machine), Among::Peers(machine)];
                assert_eq!(inside.rank(inside.place(place).rank, place), rank);
                assert_eq!(between.rank(between.place(place).rank, place), rank);
                let first = Slices::new(inside.place(place)).part_of(&bucket, inside.place(place).rank);
                let then = Slices::new(between.place(place));
                let then = then.part_of(&first, between.place(place).rank);
                let slices = Slices::of_machines(place, machine);
                assert_eq!(slices.column_of(&bucket, rank), first);
                assert_eq!(slices.part_of(&bucket, rank), then);
            }
        }
    }
}
