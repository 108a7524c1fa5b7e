//! Cases of the embedding.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};

/// (B, T, C, V, maxT)
const SHAPES: [[usize; 5]; 7] = [
    [1, 1, 1, 1, 1],
    [2, 31, 5, 7, 31],
    [1, 33, 48, 33, 64],
    [3, 37, 80, 50, 40],
    [2, 65, 129, 1003, 130],
    [0, 5, 48, 9, 8],
    [2, 0, 48, 9, 8],
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(shape, None));
        for (accum, micro_step) in ACCUMS {
            let [b, t, c, v, context] = shape;
            let mut kit = Kit::new(format!("B{b} T{t} C{c} V{v} {accum:?} micro-step {micro_step}"));
            kit.scalars.micro_step = micro_step;
            let op = EmbeddingBwd {
                d_wte: kit.grad([v, c]),
                d_wpe: kit.grad([context, c]),
                d_out: kit.slot([b, t, c]),
                tokens: kit.tokens([b, t], v),
                accum,
            };
            cases.push(kit.finish(op));
        }
    }
    cases.push(fwd([3, 1, 48, 50, 40], Some(0)));
    cases.push(fwd([3, 1, 48, 50, 40], Some(39)));
    cases.push(fwd([1, 7, 33, 50, 40], Some(20)));
    cases
}

/// The table has more rows than the vocabulary: padding.
fn fwd([b, t, c, v, context]: [usize; 5], position: Option<u32>) -> Case {
    let at = position.map_or(String::new(), |position| format!(" at position {position}"));
    let mut kit = Kit::new(format!("B{b} T{t} C{c} V{v}{at}"));
    kit.scalars.position = position.unwrap_or(u32::MAX); // must not matter
    let op = EmbeddingFwd {
        out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        wte: kit.param([v + 3, c]),
        wpe: kit.param([context, c]),
        vocab: v,
        at_position: position.is_some(),
    };
    kit.finish(op)
}
