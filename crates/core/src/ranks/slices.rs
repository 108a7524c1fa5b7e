//! Which elements of the flat pools belong to which rank.

use super::Place;
use std::ops::Range;

/// The elements that are never divided: the gradient norm adds the squares of so many at a time, and then these sums in order.
pub const PIECE_ELEMENTS: usize = 1 << 16;

/// How flat pools are divided: into buckets, which are exchanged one after the other, and each bucket into a part for every
/// rank, in whole pieces of [`PIECE_ELEMENTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Whose parts are meant.
    pub place: Place,
    /// Pieces of a bucket; the last bucket may have fewer.
    pub bucket: usize,
}

impl Slices {
    /// Buckets of 32 Mi elements: 128 MiB of f32, enough to fill a network while the backward computes the next one.
    pub const BUCKET: usize = 512;

    /// In buckets of the usual size.
    pub fn new(place: Place) -> Self {
        Self { place, bucket: Self::BUCKET }
    }

    /// The elements of each bucket of a pool.
    pub fn buckets(&self, elements: usize) -> Vec<Range<usize>> {
        let size = self.bucket.max(1) * PIECE_ELEMENTS;
        (0..elements.div_ceil(size)).map(|i| i * size..((i + 1) * size).min(elements)).collect()
    }

    /// The part of a bucket that belongs to a rank; it may be empty.
    pub fn part_of(&self, bucket: &Range<usize>, rank: usize) -> Range<usize> {
        let pieces = bucket.len().div_ceil(PIECE_ELEMENTS);
        let cut = |rank: usize| {
            let piece = pieces * rank / self.place.world.max(1);
            (bucket.start + piece * PIECE_ELEMENTS).min(bucket.end)
        };
        cut(rank)..cut(rank + 1)
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

    /// Where a range of the pool is in the memory of this rank, which holds its parts one after the other: pairs of a place
    /// in the range, from 0, and the elements there.
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

#[cfg(test)]
mod tests {
    use super::*;

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
            let (world, bucket) = (1 + draw(19), 1 + draw(12));
            let of = |rank| Slices { place: Place { rank, world }, bucket };
            let mut owned: Vec<Range<usize>> = (0..world).flat_map(|rank| of(rank).parts(elements)).collect();
            owned.retain(|part| !part.is_empty());
            owned.sort_by_key(|part| part.start);
            let mut end = 0;
            for part in &owned {
                assert_eq!(
                    part.start, end,
                    "case {case}: {elements} elements, world {world}, bucket {bucket}"
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
        for world in [2, 3, 8, 64] {
            let held: Vec<usize> =
                (0..world).map(|rank| Slices::new(Place { rank, world }).held(elements)).collect();
            let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
            assert!(most - least <= 48 * PIECE_ELEMENTS, "world {world}: {least} to {most}");
        }
    }
}
