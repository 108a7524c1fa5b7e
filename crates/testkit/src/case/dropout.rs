//! Cases of dropout.

use super::{Case, Kit};
use ironhorse_core::op::Dropout;
use ironhorse_core::{DropRate, DropSite, Precision, Scalars};

/// (N, C): rows that are whole vectors, and rows that are not.
const SHAPES: [[usize; 2]; 14] = [
    [0, 7],
    [1, 1],
    [5, 1],
    [3, 5],
    [2, 15],
    [7, 16],
    [31, 17],
    [9, 31],
    [33, 32],
    [5, 33],
    [3, 129],
    [130, 80],
    [2, 1003],
    [70, 768],
];

/// How often, and the number of the place.
const RATES: [(f64, u32); 4] = [(0.1, 0), (0.5, 7), (0.2, 36), (0.999, 1)];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let plain = SHAPES.into_iter().enumerate();
    plain.flat_map(|(i, shape)| [false, true].map(|in_place| dropout(p, shape, in_place, i))).collect()
}

/// The dropout of case `number`, and scalars that are not the defaults.
pub(super) fn drop_of(number: usize) -> (DropSite, Scalars) {
    let (rate, site) = RATES[number % RATES.len()];
    let rate = DropRate::new(rate).expect("a rate below 1");
    let scalars = Scalars {
        step: number as u32 * 1001 + 1,
        micro_step: number as u32 % 3,
        seed: (number as u64) << 31 | 5,
        ..Scalars::default()
    };
    (DropSite { rate, site }, scalars)
}

fn dropout(p: Precision, [rows, cols]: [usize; 2], in_place: bool, number: usize) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{rows} C{cols} in place {in_place}"));
    let (drop, scalars) = drop_of(number);
    kit.scalars = scalars;
    let inp = kit.slot([rows, cols]);
    let out = if in_place { inp } else { kit.slot([rows, cols]) };
    kit.finish(Dropout { out, inp, drop })
}
