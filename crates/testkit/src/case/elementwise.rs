//! Cases of addition.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::Add;

pub(super) const SIZES: [usize; 9] = [0, 1, 5, 31, 33, 129, 1003, 4099, 98_304];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    SIZES.into_iter().flat_map(|n| ["no", "a", "b"].map(|in_place| add(p, n, in_place))).collect()
}

fn add(p: Precision, n: usize, in_place: &str) -> Case {
    let mut kit = Kit::with_precision(p, format!("n{n} in place {in_place}"));
    let [a, b] = [(); 2].map(|()| kit.slot([n]));
    let out = match in_place {
        "a" => a,
        "b" => b,
        _ => kit.slot([n]),
    };
    kit.finish(Add { out, a, b })
}
