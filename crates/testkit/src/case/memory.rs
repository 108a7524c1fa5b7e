//! Cases of fills and copies.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{CopySlot, Fill};

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [0, 1, 5, 31, 33, 129, 1003, 98_304] {
        for value in [0.0, -1.5] {
            let mut kit = Kit::with_precision(p, format!("n{n} with {value}"));
            let out = kit.slot([n]);
            cases.push(kit.finish(Fill { out, value }));
        }
        let mut kit = Kit::with_precision(p, format!("n{n}"));
        let (out, inp) = (kit.slot([1, n]), kit.slot([n]));
        cases.push(kit.finish(CopySlot { out, inp }));
    }
    cases
}
