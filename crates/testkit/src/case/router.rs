//! Cases of the router.

use super::routing::{Spread, sorted};
use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::{Accum, RouterBwd, RouterFwd, RouterLoad};
use ironhorse_core::{Precision, Slot};

/// (N, E, K)
const SHAPES: [[usize; 3]; 13] = [
    [1, 1, 1],
    [1, 8, 2],
    [5, 3, 1],
    [31, 4, 2],
    [33, 8, 8],
    [37, 16, 4],
    [65, 5, 3],
    [129, 31, 7],
    [7, 64, 8],
    [40, 33, 2],
    [9, 128, 4],
    [0, 8, 2],
    [1003, 16, 4],
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, Logits::Spread(2.0)));
        cases.push(bwd(p, shape, 0.01));
        for (accum, entropy) in ACCUMS.into_iter().zip([true, false, true, true]) {
            cases.push(load(p, shape, accum, entropy));
        }
    }
    for shape in [[37, 16, 4], [33, 8, 8]] {
        cases.push(fwd(p, shape, Logits::Few)); // many ties
        cases.push(fwd(p, shape, Logits::Same));
        cases.push(fwd(p, shape, Logits::Spread(15.0)));
        cases.push(bwd(p, shape, 0.0));
        cases.push(bwd(p, shape, 10.0));
    }
    cases
}

/// The values of the logits.
#[derive(Clone, Copy, Debug)]
enum Logits {
    /// Random logits, up to this absolute value.
    Spread(f32),
    /// Logits of -1, 0 or 1.
    Few,
    /// Logits of 0: every expert is equally likely.
    Same,
}

fn fwd_op(kit: &mut Kit, [n, e, k]: [usize; 3], logits: Logits) -> RouterFwd {
    let op = RouterFwd {
        probs: kit.stat([n, e]),
        weights: kit.stat([n, k]),
        experts: kit.ints([n, k]),
        logits: kit.slot([n, e]),
    };
    let values: Vec<f32> = match logits {
        Logits::Spread(spread) => kit.rng.uniforms(n * e, -spread, spread),
        Logits::Few => (0..n * e).map(|_| kit.rng.below(3) as f32 - 1.0).collect(),
        Logits::Same => vec![0.0; n * e],
    };
    kit.set(op.logits, values);
    op
}

fn fwd(p: Precision, [n, e, k]: [usize; 3], logits: Logits) -> Case {
    let mut kit = Kit::with_precision(p, format!("N{n} E{e} K{k} {logits:?}"));
    let op = fwd_op(&mut kit, [n, e, k], logits);
    kit.finish(op)
}

/// Probabilities, weights and experts are the results of the oracle's forward on random logits, rounded to f32.
fn bwd(p: Precision, shape: [usize; 3], alpha: f32) -> Case {
    let [n, e, k] = shape;
    let name = format!("N{n} E{e} K{k} alpha {alpha}");
    let mut kit = Kit::with_precision(p, name.as_str());
    let forward = fwd_op(&mut kit, shape, Logits::Spread(2.0));
    let oracle = kit.finish(forward).oracle().expect("router_fwd runs on the oracle");
    let result = |slot: Slot| oracle.read_f64(slot).expect("a slot of the case");
    let narrow = |slot: Slot| result(slot).into_iter().map(|x| x as f32).collect::<Vec<_>>();

    let mut kit = Kit::with_precision(p, name);
    kit.scalars.loss_scale = 0.25;
    let experts: Vec<i32> = result(forward.experts).into_iter().map(|x| x as i32).collect();
    let op = RouterBwd {
        d_logits: kit.slot([n, e]),
        d_weights: kit.stat([n, k]),
        probs: kit.stat([n, e]),
        weights: kit.stat([n, k]),
        experts: kit.i32s([n, k], &experts),
        load: kit.stat([e]),
        alpha,
    };
    kit.set(op.probs, narrow(forward.probs));
    kit.set(op.weights, narrow(forward.weights));
    kit.draw(op.load, 0.0, 2.0 * k as f32 / e as f32);
    if k == 1 || e == 1 {
        kit.floor = 1.0; // with K = 1 the weight is always 1: its gradient is only rounding error
    }
    kit.finish(op)
}

fn load(p: Precision, [n, e, k]: [usize; 3], (accum, micro_step): (Accum, u32), entropy: bool) -> Case {
    let mut kit =
        Kit::with_precision(p, format!("N{n} E{e} K{k} entropy {entropy} {accum:?} micro-step {micro_step}"));
    kit.scalars.micro_step = micro_step;
    kit.scalars.loss_scale = 0.5 / n.max(1) as f32;
    let (_, _, offsets) = sorted(&mut kit, [n, e, k], Spread::Even);
    let op = RouterLoad {
        load: kit.stat([e]),
        aux: kit.stat([1]),
        entropy: entropy.then(|| kit.stat([1])),
        probs: kit.stat([n, e]),
        offsets: kit.i32s([e + 1], &offsets),
        alpha: 0.01,
        accum,
    };
    // Some probabilities are exactly 0: their term of the entropy is 0.
    let probs: Vec<f32> = kit.rng.uniforms(n * e, -0.1, 0.5).into_iter().map(|p| p.max(0.0)).collect();
    kit.set(op.probs, probs);
    kit.finish(op)
}
