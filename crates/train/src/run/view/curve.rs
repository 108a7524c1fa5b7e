//! A part of a column as it is drawn: smoothed, and with as many points as there is room for.

use super::{Quantity, Table};
use crate::picture::{smoothed_over, thin};
use std::ops::RangeInclusive;

/// How curves can be smoothed: the name, and the share of all points that a point is the mean of to either side. The first is the usual one.
pub const SMOOTHING: [(&str, usize); 4] = [("medium", 60), ("strong", 15), ("none", 0), ("light", 240)];

/// How a curve is drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// The steps to show.
    pub steps: RangeInclusive<u64>,
    /// A point becomes the mean of its neighbours, this share of all points to either side; 0 leaves it as it is.
    pub share: usize,
    /// Room across: of each column the first, lowest, highest and last point stay.
    pub columns: usize,
    /// Whether equal factors, and not equal numbers, of steps have the same room.
    pub log_across: bool,
}

impl Drawn {
    /// All steps, over this many columns.
    pub fn whole(share: usize, columns: usize) -> Self {
        Self { steps: 0..=u64::MAX, share, columns, log_across: false }
    }
}

/// The values of a quantity, in the order of their steps.
#[derive(Clone, Copy)]
pub enum Column<'a> {
    /// One of every step.
    Dense(&'a [u64], &'a [f32]),
    /// Some.
    Sparse(&'a [(u64, f32)]),
}

impl Column<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Dense(steps, _) => steps.len(),
            Self::Sparse(all) => all.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One of them, with its step.
    pub fn get(&self, at: usize) -> Option<(u64, f32)> {
        match self {
            Self::Dense(steps, values) => Some((*steps.get(at)?, *values.get(at)?)),
            Self::Sparse(all) => all.get(at).copied(),
        }
    }

    /// How many are before this step.
    fn before(&self, step: u64) -> usize {
        match self {
            Self::Dense(steps, _) => steps.partition_point(|&at| at < step),
            Self::Sparse(all) => all.partition_point(|&(at, _)| at < step),
        }
    }

    /// Those of a part that are finite.
    pub fn finite(&self, from: usize, to: usize) -> Vec<(f64, f64)> {
        let all = (from..to).filter_map(|at| self.get(at)).filter(|(_, value)| value.is_finite());
        all.map(|(step, value)| (step as f64, f64::from(value))).collect()
    }

    /// Walks from a place until `count` finite values are passed; gives where that is.
    fn beyond(&self, places: impl Iterator<Item = usize>, count: usize) -> Option<usize> {
        places.filter(|&at| self.get(at).is_some_and(|(_, value)| value.is_finite())).take(count).last()
    }
}

impl Table {
    /// A curve as it is drawn. What is shown of a part is what the whole shows there.
    pub fn curve(&self, quantity: Quantity, drawn: &Drawn) -> Vec<(f64, f64)> {
        let column = self.column(quantity);
        let (first, last) = (*drawn.steps.start(), *drawn.steps.end());
        let (from, to) = (column.before(first), column.before(last.saturating_add(1)));
        let mut points = match drawn.share {
            0 => column.finite(from, to),
            share => {
                // neighbours outside of the part count as well
                let reach = (column.len() / share).max(1);
                let wide_from = column.beyond((0..from).rev(), reach).unwrap_or(from);
                let wide_to = column.beyond(to..column.len(), reach).map_or(to, |at| at + 1);
                let mut smooth = smoothed_over(&column.finite(wide_from, wide_to), reach);
                smooth.retain(|point| point.0 >= first as f64 && point.0 <= last as f64);
                smooth
            }
        };
        if !drawn.log_across {
            return thin(&points, drawn.columns);
        }
        points.iter_mut().for_each(|point| point.0 = point.0.ln_1p());
        let mut thinned = thin(&points, drawn.columns);
        thinned.iter_mut().for_each(|point| point.0 = point.0.exp_m1().round());
        thinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::metrics::Metrics;

    fn table(steps: u64) -> Table {
        let mut table = Table::default();
        for step in 0..steps {
            let loss = if step % 97 == 13 { f32::NAN } else { (step * 7919 % 1000) as f32 };
            let val_loss = (step % 10 == 3).then_some(step as f32);
            table.push(Metrics { step, loss, val_loss, ..Metrics::default() });
        }
        table
    }

    #[test]
    fn a_part_shows_what_the_whole_shows_there() {
        let table = table(5000);
        for share in [0, 15, 60, 240] {
            let whole = table.curve(Quantity::Loss, &Drawn::whole(share, 100_000));
            for steps in [0..=10, 0..=4999, 20..=20, 1000..=1700, 4990..=9000, 6000..=7000] {
                let part = Drawn { steps: steps.clone(), ..Drawn::whole(share, 100_000) };
                let found = table.curve(Quantity::Loss, &part);
                let within = |x: f64| steps.contains(&(x as u64));
                let expected: Vec<_> = whole.iter().filter(|p| within(p.0)).copied().collect();
                assert_eq!(found.len(), expected.len(), "{share} {steps:?}");
                for (a, b) in found.iter().zip(&expected) {
                    // prefix sums begin elsewhere, so the last bits differ: 5000 sums of values below 1000 in f64
                    assert!(
                        a.0 == b.0 && (a.1 - b.1).abs() < 5e6 * f64::EPSILON,
                        "{share} {steps:?}: {a:?} {b:?}"
                    );
                }
            }
        }
        let part = Drawn { steps: 10..=40, ..Drawn::whole(0, 10) };
        assert_eq!(table.curve(Quantity::ValLoss, &part), [(13.0, 13.0), (23.0, 23.0), (33.0, 33.0)]);
    }

    #[test]
    fn thinning_keeps_extremes_across_either_axis() {
        let mut table = table(100_000);
        (table.loss[77_777], table.loss[33]) = (5000.0, -5000.0);
        for log_across in [false, true] {
            let found = table.curve(Quantity::Loss, &Drawn { log_across, ..Drawn::whole(0, 200) });
            assert!(found.len() <= 800, "{}", found.len());
            assert!(found.contains(&(77_777.0, 5000.0)) && found.contains(&(33.0, -5000.0)), "{log_across}");
            assert!(
                found.windows(2).all(|pair| pair[0].0 < pair[1].0),
                "{log_across}: in order, steps are whole"
            );
            let early = found.iter().filter(|point| point.0 < 100.0).count();
            assert!((early > 50) == log_across, "{early} points of the first 100 steps");
        }
    }
}
