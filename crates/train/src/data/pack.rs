//! Best fit: samples into rows of T tokens, the longest first, each into the row that it leaves the least room in.
//!
//! The lengths in each row depend on the lengths of the samples alone; the order in which samples of one length are given
//! decides which of them is where. So a new order mixes the rows of an epoch, and every epoch has as many rows.

use std::collections::BTreeMap;

/// Rows of samples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rows {
    /// The samples of all rows, one row after the other.
    samples: Vec<u32>,
    /// The index of each row's first sample, and the end of the last row.
    starts: Vec<usize>,
}

impl Rows {
    /// Packs the samples `order`, whose lengths are 1 to `room`, into rows of `room` tokens.
    pub(super) fn best_fit(
        order: impl Iterator<Item = u32>,
        length: impl Fn(u32) -> usize,
        room: usize,
    ) -> Self {
        let mut order: Vec<u32> = order.collect();
        order.sort_by_key(|&sample| std::cmp::Reverse(length(sample))); // stable: the order decides between equals
        // The rows that have so many tokens of room left; none where it is 0.
        let mut open: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        let mut count = 0;
        let mut row_of = vec![0_u32; order.len()];
        for (at, &sample) in order.iter().enumerate() {
            let tokens = length(sample);
            let best = open.range_mut(tokens..).next().and_then(|(&left, rows)| Some((left, rows.pop()?)));
            let (left, row) = best.unwrap_or_else(|| {
                count += 1;
                (room, count - 1)
            });
            if open.get(&left).is_some_and(Vec::is_empty) {
                open.remove(&left);
            }
            row_of[at] = row;
            if left > tokens {
                open.entry(left - tokens).or_default().push(row);
            }
        }
        Self::gathered(&order, &row_of, count as usize)
    }

    /// The samples of each of `count` rows, in the order they were placed.
    fn gathered(order: &[u32], row_of: &[u32], count: usize) -> Self {
        let mut starts = vec![0; count + 1];
        row_of.iter().for_each(|&row| starts[row as usize + 1] += 1);
        (0..count).for_each(|row| starts[row + 1] += starts[row]);
        let mut next = starts.clone();
        let mut samples = vec![0; order.len()];
        for (&sample, &row) in order.iter().zip(row_of) {
            samples[next[row as usize]] = sample;
            next[row as usize] += 1;
        }
        Self { samples, starts }
    }

    /// How many rows there are.
    pub(super) fn len(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// The samples of a row.
    pub(super) fn row(&self, row: usize) -> &[u32] {
        &self.samples[self.starts[row]..self.starts[row + 1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn packed(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
        let rows = Rows::best_fit(0..lengths.len() as u32, |sample| lengths[sample as usize], room);
        (0..rows.len()).map(|row| rows.row(row).iter().map(|&at| lengths[at as usize]).collect()).collect()
    }

    /// The 3 goes to the row with 3 tokens left although one with 4 came first.
    #[test]
    fn a_sample_goes_where_it_leaves_the_least_room() {
        assert_eq!(packed(&[6, 7, 3, 4], 10), [vec![7, 3], vec![6, 4]]);
        assert_eq!(packed(&[10, 1, 10, 9], 10), [vec![10], vec![10], vec![9, 1]]);
        assert_eq!(packed(&[4, 4, 4], 10), [vec![4, 4], vec![4]]);
        assert_eq!(packed(&[], 10), Vec::<Vec<usize>>::new());
        assert_eq!(packed(&[1; 4], 1).len(), 4);
    }

    #[test]
    fn every_sample_is_in_one_row_and_no_row_is_too_long() {
        let mut rng = Rng::new(3);
        for (count, room) in [(1, 1), (100, 7), (3000, 128), (500, 2048)] {
            let lengths: Vec<usize> = (0..count).map(|_| 1 + rng.index(room)).collect();
            let rows = Rows::best_fit(0..count as u32, |sample| lengths[sample as usize], room);
            let mut seen = vec![0; count];
            for row in 0..rows.len() {
                let samples = rows.row(row);
                assert!(samples.iter().map(|&at| lengths[at as usize]).sum::<usize>() <= room);
                samples.iter().for_each(|&at| seen[at as usize] += 1);
            }
            assert!(seen.iter().all(|&times| times == 1));
            // Two rows that are half empty would have become one.
            let short = (0..rows.len()).filter(|&row| {
                2 * rows.row(row).iter().map(|&at| lengths[at as usize]).sum::<usize>() <= room
            });
            assert!(short.count() <= 1);
        }
    }

    /// Every epoch has as many rows, whatever its order.
    #[test]
    fn the_number_of_rows_does_not_depend_on_the_order() {
        let mut rng = Rng::new(8);
        let lengths: Vec<usize> = (0..400).map(|_| 1 + rng.index(60)).collect();
        let rows = |order: &[u32]| {
            let rows = Rows::best_fit(order.iter().copied(), |sample| lengths[sample as usize], 100);
            (0..rows.len()).map(|row| rows.row(row).to_vec()).collect::<Vec<_>>()
        };
        let mut order: Vec<u32> = (0..400).collect();
        let first = rows(&order);
        order.reverse();
        let second = rows(&order);
        assert_eq!(first.len(), second.len());
        assert_ne!(first, second);
    }
}
