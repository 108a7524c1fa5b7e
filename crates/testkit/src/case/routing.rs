//! Cases of sorting tokens by expert, moving them and combining the results.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, Combine, CombineBwd, Permute, PermuteBwd, RouteSort};

/// (N, E, K)
const SORTS: [[usize; 3]; 12] = [
    [1, 1, 1],
    [1, 8, 8],
    [5, 3, 1],
    [31, 4, 2],
    [33, 8, 8],
    [37, 16, 4],
    [129, 31, 7],
    [7, 64, 3],
    [0, 8, 2],
    [2049, 16, 4],
    [3001, 33, 2],
    [1000, 300, 5],
];

/// (N, K, C)
const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 8, 33],
    [5, 1, 31],
    [31, 2, 48],
    [33, 4, 129],
    [65, 3, 80],
    [7, 2, 1003],
    [40, 4, 768],
    [0, 2, 48],
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SORTS {
        cases.extend([Spread::Even, Spread::One, Spread::Idle].map(|spread| sort(p, shape, spread)));
    }
    for shape in SHAPES {
        cases.push(permute(p, shape));
        cases.extend(ACCUMS.map(|accum| permute_bwd(p, shape, accum)));
        cases.push(combine(p, shape));
        cases.extend([false, true].map(|in_place| combine_bwd(p, shape, in_place)));
    }
    cases
}

/// How tokens are distributed over experts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Spread {
    /// Tokens go to experts at random.
    Even,
    /// As many tokens as possible go to the last expert.
    One,
    /// No token goes to the first expert, if E > K.
    Idle,
}

/// K different experts for each token.
fn experts(kit: &mut Kit, [n, e, k]: [usize; 3], spread: Spread) -> Vec<i32> {
    let mut all = Vec::new();
    for _ in 0..n {
        let mut row: Vec<i32> = (0..e as i32).collect();
        match spread {
            Spread::One => row.reverse(),
            Spread::Idle if k < e => drop(row.remove(0)),
            _ => {}
        }
        if !matches!(spread, Spread::One) {
            for i in 0..k {
                let other = i + kit.rng.below(row.len() - i);
                row.swap(i, other);
            }
        }
        all.extend_from_slice(&row[..k]);
    }
    all
}

/// `order`, `places` and `offsets` of tokens on random experts.
pub(super) fn sorted(kit: &mut Kit, shape: [usize; 3], spread: Spread) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let experts = experts(kit, shape, spread);
    let mut order: Vec<i32> = (0..experts.len() as i32).collect();
    order.sort_by_key(|&route| experts[route as usize]);
    let mut places = vec![0; order.len()];
    for (s, &route) in order.iter().enumerate() {
        places[route as usize] = s as i32;
    }
    let before = |e: i32| experts.iter().filter(|&&other| other < e).count() as i32;
    (order, places, (0..=shape[1] as i32).map(before).collect())
}

fn sort(p: Precision, [n, e, k]: [usize; 3], spread: Spread) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} E{e} K{k} {spread:?}"));
    let experts = experts(&mut kit, [n, e, k], spread);
    let op = RouteSort {
        order: kit.ints([n * k]),
        places: kit.ints([n, k]),
        offsets: kit.ints([e + 1]),
        experts: kit.i32s([n, k], &experts),
    };
    kit.finish(op)
}

fn permute(p: Precision, [n, k, c]: [usize; 3]) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} K{k} C{c}"));
    let (order, ..) = sorted(&mut kit, [n, 8, k], Spread::Even);
    let op = Permute { out: kit.slot([n * k, c]), inp: kit.slot([n, c]), order: kit.i32s([n * k], &order) };
    kit.finish(op)
}

fn permute_bwd(p: Precision, [n, k, c]: [usize; 3], (accum, micro_step): (Accum, u32)) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} K{k} C{c} {accum:?} micro-step {micro_step}"));
    kit.scalars.micro_step = micro_step;
    let (_, places, _) = sorted(&mut kit, [n, 8, k], Spread::Even);
    let op = PermuteBwd {
        d_inp: kit.slot([1, n, c]),
        d_out: kit.slot([n * k, c]),
        places: kit.i32s([n, k], &places),
        accum,
    };
    kit.finish(op)
}

fn combine(p: Precision, [n, k, c]: [usize; 3]) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} K{k} C{c}"));
    let (_, places, _) = sorted(&mut kit, [n, 8, k], Spread::Even);
    let op = Combine {
        out: kit.slot([1, n, c]),
        rows: kit.slot([n * k, c]),
        places: kit.i32s([n, k], &places),
        weights: kit.stat([n, k]),
    };
    kit.draw(op.weights, 0.0, 1.0);
    kit.finish(op)
}

fn combine_bwd(p: Precision, [n, k, c]: [usize; 3], in_place: bool) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} K{k} C{c} in place {in_place}"));
    let (_, places, _) = sorted(&mut kit, [n, 8, k], Spread::Even);
    let rows = kit.slot([n * k, c]);
    let op = CombineBwd {
        d_rows: if in_place { rows } else { kit.slot([n * k, c]) },
        d_weights: kit.stat([n, k]),
        d_out: kit.slot([n, c]),
        rows,
        places: kit.i32s([n, k], &places),
        weights: kit.stat([n, k]),
    };
    kit.draw(op.weights, 0.0, 1.0);
    kit.finish(op)
}
