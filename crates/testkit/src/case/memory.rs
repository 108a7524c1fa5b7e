//! Cases of fills and copies.

use super::{Case, Kit};
use ironhorse_core::op::{CopySlot, Fill};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [0, 1, 5, 31, 33, 129, 1003] {
        for value in [0.0, -1.5] {
            let mut kit = Kit::new(format!("n{n} with {value}"));
            let out = kit.slot([n]);
            cases.push(kit.finish(Fill { out, value }));
        }
        let mut kit = Kit::new(format!("n{n} f32"));
        let (out, inp) = (kit.slot([1, n]), kit.slot([n]));
        cases.push(kit.finish(CopySlot { out, inp }));
    }
    cases
}
