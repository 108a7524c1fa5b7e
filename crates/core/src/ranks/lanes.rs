//! Which ops may run at the same time: what ranks exchange goes on beside what a rank computes.

use crate::op::Op;
use crate::program::Node;
use crate::slot::Slot;
use std::ops::Range;

/// One of two queues of ops. Each is worked off in order; they wait for each other only where they must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// What a rank computes.
    Computing,
    /// What ranks exchange, and what is done with it before anything else uses it.
    Exchanging,
}

/// An op in the order in which ops are given to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its index in the program.
    pub op: usize,
    /// Its queue.
    pub lane: Lane,
    /// The last turn of the other queue that must have ended before it begins; `None` if an earlier turn of its own queue has
    /// waited for that one, or if there is none.
    pub after: Option<usize>,
}

/// The turns of `ops`, and of `beside`, which come after them in the program. Ops of `beside` keep their order, but each of them
/// is given to the device as soon as no op of `ops` that is still to come uses the same memory, so that the result is that of one
/// op after the other. Which ops use the same memory is read off the slots: no list has to be kept in step with the model.
///
/// All ranks get the same order of ops that exchange something, because that order is that of the program.
pub fn turns(nodes: &[Node], ops: Range<usize>, beside: &[Range<usize>]) -> Vec<Turn> {
    let uses = |op: usize| nodes.get(op).map_or_else(Vec::new, |node| Use::all(&node.op));
    let main: Vec<Vec<Use>> = ops.clone().map(uses).collect();
    let side: Vec<(usize, Vec<Use>)> = beside.iter().cloned().flatten().map(|op| (op, uses(op))).collect();
    // how many of `ops` come before each
    let ready: Vec<usize> = side
        .iter()
        .scan(0, |ready, (_, uses)| {
            let last = main.iter().rposition(|main| meet(main, uses));
            *ready = last.map_or(0, |last| last + 1).max(*ready);
            Some(*ready)
        })
        .collect();
    let mut all = Vec::with_capacity(main.len() + side.len());
    let mut used = Vec::with_capacity(all.capacity());
    let mut waiting = side.into_iter().zip(ready).peekable();
    for (at, (op, main)) in ops.zip(main).enumerate() {
        while let Some(((op, uses), _)) = waiting.next_if(|(_, ready)| *ready <= at) {
            all.push((op, Lane::Exchanging));
            used.push(uses);
        }
        let exchanges = nodes.get(op).is_some_and(|node| is_collective(&node.op));
        all.push((op, if exchanges { Lane::Exchanging } else { Lane::Computing }));
        used.push(main);
    }
    for ((op, uses), _) in waiting {
        all.push((op, Lane::Exchanging));
        used.push(uses);
    }
    waits(&all, &used)
}

/// Adds what each op waits for.
fn waits(all: &[(usize, Lane)], used: &[Vec<Use>]) -> Vec<Turn> {
    // positions of the ops of each queue, and the turn of the other that it has last waited for
    let mut queues: [(Vec<usize>, Option<usize>); 2] = Default::default();
    let mut turns = Vec::with_capacity(all.len());
    for (at, &(op, lane)) in all.iter().enumerate() {
        let (own, other) = match lane {
            Lane::Computing => (0, 1),
            Lane::Exchanging => (1, 0),
        };
        let waited = queues[own].1;
        let news = queues[other].0.iter().rev().take_while(|&&before| Some(before) > waited);
        let after = news.copied().find(|&before| meet(&used[before], &used[at]));
        queues[own].1 = after.max(waited);
        queues[own].0.push(at);
        turns.push(Turn { op, lane, after });
    }
    turns
}

/// Whether an op only moves something from rank to rank.
fn is_collective(op: &Op) -> bool {
    matches!(op, Op::Exchange(_) | Op::AllGather(_))
}

/// Memory that an op uses.
#[derive(Clone, Copy, Debug)]
struct Use {
    slot: Slot,
    writes: bool,
}

impl Use {
    fn all(op: &Op) -> Vec<Self> {
        op.args().into_iter().map(|arg| Self { slot: arg.slot, writes: arg.access.writes() }).collect()
    }
}

/// Whether two ops must keep their order: one of them changes what the other uses.
fn meet(a: &[Use], b: &[Use]) -> bool {
    a.iter().any(|a| b.iter().any(|b| (a.writes || b.writes) && a.slot.overlaps(&b.slot)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Add, AllGather, CopySlot};
    use crate::program::Section;
    use crate::{DType, Place, Pool, Shape, Slices};
    use proptest::prelude::*;

    fn slot(start: usize, length: usize) -> Slot {
        Slot { pool: Pool::Grads, offset: 4 * start, shape: Shape::new([length]), dtype: DType::F32 }
    }

    fn node(op: impl Into<Op>) -> Node {
        Node { op: op.into(), origin: 0, section: Section::Backward }
    }

    fn copy(from: usize, to: usize, length: usize) -> Node {
        node(CopySlot { out: slot(to, length), inp: slot(from, length) })
    }

    fn gather(start: usize, length: usize) -> Node {
        node(AllGather { data: slot(start, length), slices: Slices::new(Place { rank: 0, world: 2 }) })
    }

    /// A backward that writes three buckets, the last first, and their exchange.
    #[test]
    fn a_bucket_is_exchanged_when_its_last_gradient_is_there() {
        let nodes = [
            copy(90, 20, 10),
            copy(90, 10, 10),
            copy(90, 20, 5), // the third bucket is written twice
            copy(90, 0, 10),
            gather(20, 10),
            gather(10, 10),
            gather(0, 10),
        ];
        let found = turns(&nodes, 0..4, &[4..5, 5..7]);
        let order: Vec<usize> = found.iter().map(|turn| turn.op).collect();
        assert_eq!(order, [0, 1, 2, 4, 5, 3, 6]);
        let after: Vec<Option<usize>> = found.iter().map(|turn| turn.after).collect();
        assert_eq!(
            after,
            [None, None, None, Some(2), None, None, Some(5)],
            "the second was ready before the first"
        );
        assert!(found.iter().all(|turn| (turn.lane == Lane::Exchanging) == (turn.op > 3)));
    }

    /// An update of parts, each followed by the exchange of its bucket: the next part does not wait for it.
    #[test]
    fn collectives_of_a_range_go_on_beside_what_follows() {
        let add = |at: usize| node(Add { out: slot(at, 10), a: slot(at, 10), b: slot(90, 10) });
        let nodes = [add(0), gather(0, 10), add(10), gather(10, 10), copy(0, 50, 10)];
        let after: Vec<Option<usize>> = turns(&nodes, 0..5, &[]).iter().map(|turn| turn.after).collect();
        assert_eq!(after, [None, Some(0), None, Some(2), Some(1)]);
    }

    fn program() -> impl Strategy<Value = (Vec<Node>, usize)> {
        let one =
            (0_usize..60, 60_usize..120, 1_usize..20, 0..4).prop_map(|(a, b, length, kind)| match kind {
                0 => gather(a, length),
                1 => copy(b, a, length),
                _ => copy(a, b, length),
            });
        let all = proptest::collection::vec(one, 1..40);
        all.prop_flat_map(|nodes| (Just(nodes.clone()), 0..=nodes.len()))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Whatever the ops: each has one turn, two that use the same memory keep their order, and on different queues the later
        /// one waits for the earlier one or for something behind it.
        #[test]
        fn queues_give_what_one_op_after_the_other_gives((nodes, cut) in program()) {
            let beside = cut..nodes.len();
            let found = turns(&nodes, 0..cut, std::slice::from_ref(&beside));
            let mut ops: Vec<usize> = found.iter().map(|turn| turn.op).collect();
            let exchanging: Vec<usize> = ops.iter().copied().filter(|&op| op >= cut).collect();
            prop_assert!(exchanging.is_sorted());
            for (later, b) in found.iter().enumerate() {
                let waited = found[..=later].iter().filter(|turn| turn.lane == b.lane).filter_map(|turn| turn.after).max();
                for (earlier, a) in found.iter().enumerate() {
                    let [first, second] = [a, b].map(|turn| Use::all(&nodes[turn.op].op));
                    if a.op >= b.op || !meet(&first, &second) {
                        continue;
                    }
                    prop_assert!(earlier < later, "ops {} and {} changed places", a.op, b.op);
                    prop_assert!(a.lane == b.lane || waited >= Some(earlier), "op {} does not wait for {}", b.op, a.op);
                }
            }
            ops.sort_unstable();
            prop_assert_eq!(ops, (0..nodes.len()).collect::<Vec<_>>());
        }
    }
}
