//! Cases of the loss of pairs.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, Preference};

/// How the rows of a batch are pairs.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Texts of random lengths, some of them empty, from the first row to about the last.
    Random,
    /// A row for each text, as many as there are.
    Short,
    /// All rows are one pair.
    One,
    /// No row counts.
    None,
}

/// (B, T, P)
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [1, 2, 1], [1, 31, 3], [2, 33, 31], [1, 129, 33], [3, 1003, 1501], [0, 3, 2], [1, 4, 0]];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for kind in [Kind::Random, Kind::Short, Kind::One, Kind::None] {
            let spread = Spread { beta: 0.1, losses: 12.0, reference: 0.5 };
            cases.extend([true, false].map(|weights| case(p, shape, kind, spread, weights, ACCUMS[2])));
        }
    }
    for accum in ACCUMS {
        let spread = Spread { beta: 0.3, losses: 3.0, reference: 0.5 };
        cases.push(case(p, [2, 33, 20], Kind::Random, spread, true, accum));
    }
    // the same as the reference; margins of a thousand, where a power of e overflows
    for (beta, reference) in [(0.1, 0.0), (50.0, 12.0)] {
        let spread = Spread { beta, losses: 12.0, reference };
        cases.push(case(p, [2, 33, 20], Kind::Random, spread, true, ACCUMS[2]));
    }
    cases
}

/// The numbers of a case.
#[derive(Clone, Copy)]
struct Spread {
    beta: f32,
    /// Losses are 0 to this.
    losses: f32,
    /// Losses of the reference differ from them by up to this.
    reference: f32,
}

fn case(
    p: Precision,
    [b, t, count]: [usize; 3],
    kind: Kind,
    spread: Spread,
    weights: bool,
    (accum, micro_step): (Accum, u32),
) -> Case {
    let Spread { beta, losses: most, reference: apart } = spread;
    let name = format!(
        "B{b} T{t} P{count} {kind:?} beta {beta} losses to {most} within {apart}, weights {weights}, {accum:?} micro-step {micro_step}"
    );
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    kit.scalars.loss_scale = 1.0 / (2 * count.max(1)) as f32;
    let bounds = bounds(&mut kit, b * t, count, kind);
    let op = Preference {
        loss: kit.stat([]),
        means: kit.stat([3]),
        rewards: kit.stat([count, 2]),
        weights: weights.then(|| kit.stat([b, t])),
        losses: kit.stat([b, t]),
        reference: kit.stat([b, t]),
        pairs: kit.i32s([count, 3], &bounds),
        beta,
        accum,
    };
    let losses = kit.random(op.losses, 0.0, most);
    let theirs = losses.into_iter().map(|loss| loss + kit.rng.uniforms(1, -apart, apart)[0]).collect();
    kit.set(op.reference, theirs);
    // what is added to is larger than any mean of rewards: the sums cancel nothing
    kit.draw(op.loss, 20.0, 30.0);
    kit.draw(op.means, 20.0, 30.0);
    kit.finish(op)
}

fn bounds(kit: &mut Kit, rows: usize, count: usize, kind: Kind) -> Vec<i32> {
    let mut at = 0;
    let mut next = |most: usize| {
        at = (at + most).min(rows);
        at as i32
    };
    let mean = rows / (2 * count).max(1);
    let mut all = Vec::new();
    for pair in 0..count {
        match kind {
            Kind::Random => {
                let lengths = [kit.rng.below(2), kit.rng.below(2 * mean + 2), kit.rng.below(2 * mean + 2)];
                all.extend(lengths.map(&mut next));
            }
            Kind::Short => all.extend([0, 1, 1].map(&mut next)),
            Kind::One => all.extend(if pair == 0 { [0, rows / 2, rows] } else { [0; 3] }.map(&mut next)),
            Kind::None => all.extend([if pair == count / 2 { rows } else { 0 }, 0, 0].map(&mut next)),
        }
    }
    all
}
