//! Cases of the activations.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Act, ActBwd, ActFwd};

/// Sizes, whether in place, and the largest input: the last one saturates tanh, and its powers must not overflow.
fn shapes() -> impl Iterator<Item = (usize, bool, f32)> {
    let plain = super::elementwise::SIZES.into_iter().flat_map(|n| [(n, false, 6.0), (n, true, 6.0)]);
    plain.chain([(65, false, 1e4)])
}

fn each(make: impl Fn(Act, (usize, bool, f32)) -> Case) -> Vec<Case> {
    Act::ALL
        .iter()
        .flat_map(|&act| shapes().map(move |shape| (act, shape)))
        .map(|(a, s)| make(a, s))
        .collect()
}

fn kit(p: Precision, (n, in_place, range): (usize, bool, f32)) -> Kit {
    Kit::with_precision(p, format!("n{n} in place {in_place} range {range}"))
}

pub(super) fn fwd_cases(p: Precision) -> Vec<Case> {
    each(|act, shape| {
        let (mut kit, (n, in_place, range)) = (kit(p, shape), shape);
        let inp = kit.slot([n]);
        let out = if in_place { inp } else { kit.slot([n]) };
        kit.draw(inp, -range, range);
        kit.finish(ActFwd { out, inp, act })
    })
}

pub(super) fn bwd_cases(p: Precision) -> Vec<Case> {
    each(|act, shape| {
        let (mut kit, (n, in_place, range)) = (kit(p, shape), shape);
        let [d_out, inp] = [(); 2].map(|()| kit.slot([n]));
        let d_inp = if in_place { d_out } else { kit.slot([n]) };
        kit.draw(inp, -range, range);
        kit.finish(ActBwd { d_inp, d_out, inp, act })
    })
}
