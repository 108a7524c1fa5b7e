//! Cases of what ranks exchange: those of a rank that is alone, and sums for any number of ranks.

use super::elementwise::SIZES;
use super::{Case, Kit};
use ironhorse_core::op::{AllGather, Exchange, TreeSum};
use ironhorse_core::ranks::Among;
use ironhorse_core::{Place, Precision, Slices, SumTree};

/// Micro-steps and ranks: one row, some, as many as there are micro-steps, and several of one rank.
const SHARED: [(usize, usize); 9] =
    [(1, 1), (2, 2), (4, 2), (3, 3), (6, 2), (6, 3), (12, 4), (8, 8), (40, 40)];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for n in SIZES {
        for (micro_steps, world) in SHARED.into_iter().filter(|(_, world)| n < 4000 || *world < 4) {
            let mut kit = Kit::with_precision(p, format!("n{n} of {micro_steps} micro-steps, {world} ranks"));
            let rows = SumTree::new(micro_steps).rows(world).len();
            let (out, inp) = (kit.slot([n]), kit.slot([rows, n]));
            cases.push(kit.finish(TreeSum { out, inp, micro_steps, world }));
        }
        let place = Place::ALONE;
        for divided in [false, true] {
            let mut kit = Kit::with_precision(p, format!("n{n} divided {divided}"));
            let (out, inp) = (kit.slot([1, n]), Some(kit.slot([n])));
            cases.push(kit.finish(Exchange {
                out,
                inp,
                round: 0,
                micro_steps: 4,
                place,
                among: Among::All,
                divided,
            }));
        }
        let mut kit = Kit::with_precision(p, format!("n{n}"));
        let data = kit.slot([n]);
        cases.push(kit.finish(AllGather { data, slices: Slices::new(place) }));
    }
    cases
}
