//! Cases of the embedding.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, EmbeddingBwd, EmbeddingFwd};

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

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, None));
        cases.extend(ACCUMS.map(|accum| bwd(p, shape, accum, false)));
    }
    let first = (Accum::FirstWrites, 0);
    cases.push(fwd(p, [2, 64, 768, 1003, 64], None));
    cases.push(bwd(p, [8, 256, 64, 256, 256], first, false)); // bytes as tokens: many gradients add up in every row
    cases.push(bwd(p, [4, 128, 64, 50, 128], first, true));
    cases.push(bwd(p, [1, 2048, 80, 257, 2048], (Accum::Add, 0), true));
    cases.push(bwd(p, [2, 128, 768, 1003, 1024], (Accum::FirstWrites, 1), false));
    cases.push(fwd(p, [3, 1, 48, 50, 40], Some(0)));
    cases.push(fwd(p, [3, 1, 48, 50, 40], Some(39)));
    cases.push(fwd(p, [1, 7, 33, 50, 40], Some(20)));
    for (shape, longest) in [
        ([2, 31, 5, 7, 31], 9),
        ([3, 37, 80, 50, 40], 1),
        ([2, 200, 129, 1003, 200], 90),
        ([0, 5, 48, 9, 8], 2),
    ] {
        cases.push(packed_fwd(p, shape, longest));
        cases.extend(ACCUMS.map(|accum| packed_bwd(p, shape, accum, longest)));
    }
    for shape in SHAPES.into_iter().chain([[2, 64, 768, 1003, 64]]) {
        for factor in [1.0, 5.5] {
            cases.push(alone_fwd(p, shape, None, factor));
            cases.extend(ACCUMS.map(|accum| alone_bwd(p, shape, accum, factor)));
        }
    }
    cases.extend([1, 5].map(|b| placed_fwd(p, b)));
    cases.push(alone_fwd(p, [3, 1, 48, 50, 40], Some(1000), 1.0)); // without a table of positions, any position is valid
    cases
}

/// A case of the backward. With `hot` all tokens are the same: all gradients add up in one row.
fn bwd(
    p: Precision,
    [b, t, c, v, context]: [usize; 5],
    (accum, micro_step): (Accum, u32),
    hot: bool,
) -> Case {
    let same = if hot { " one token" } else { "" };
    let name = format!("B{b} T{t} C{c} V{v}{same} {accum:?} micro-step {micro_step}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    let op = EmbeddingBwd {
        d_wte: kit.grad([v, c]),
        d_wpe: Some(kit.grad([context, c])),
        d_out: kit.slot([b, t, c]),
        tokens: if hot { kit.i32s([b, t], &vec![v as i32 - 1; b * t]) } else { kit.tokens([b, t], v) },
        positions: None,
        accum_wte: Accum::Add,
        accum,
        factor: 1.0,
    };
    kit.finish(op)
}

/// The table has more rows than the vocabulary: padding.
fn fwd(p: Precision, [b, t, c, v, context]: [usize; 5], position: Option<u32>) -> Case {
    let at = position.map_or(String::new(), |position| format!(" at position {position}"));
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} V{v}{at}"));
    kit.scalars.position = position.unwrap_or(u32::MAX); // must not be used if `at_position` is false
    let op = EmbeddingFwd {
        out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        wte: kit.param([v + 3, c]),
        wpe: Some(kit.param([context, c])),
        positions: None,
        vocab: v,
        at_position: position.is_some(),
        factor: 1.0,
    };
    kit.finish(op)
}

/// A case of tokens that continue sequences in a cache, each at its own position; a token at -1 is not used.
fn placed_fwd(p: Precision, b: usize) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T1 C48 V50 at their positions"));
    kit.scalars.position = u32::MAX; // must not be used
    let op = EmbeddingFwd {
        out: kit.slot([b, 1, 48]),
        tokens: kit.tokens([b, 1], 50),
        wte: kit.param([53, 48]),
        wpe: Some(kit.param([40, 48])),
        positions: Some(kit.i32s([b, 1], &[39, 0, -1, 17, 39][..b])),
        vocab: 50,
        at_position: true,
        factor: 1.0,
    };
    kit.finish(op)
}

/// A case of documents of up to `longest` tokens.
fn packed_fwd(p: Precision, [b, t, c, v, context]: [usize; 5], longest: usize) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} V{v} documents to {longest}"));
    let op = EmbeddingFwd {
        out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        wte: kit.param([v + 3, c]),
        wpe: Some(kit.param([context, c])),
        positions: Some(kit.documents([b, t], longest)),
        vocab: v,
        at_position: false,
        factor: 1.0,
    };
    kit.finish(op)
}

/// A case of the backward with documents of up to `longest` tokens.
fn packed_bwd(
    p: Precision,
    [b, t, c, v, context]: [usize; 5],
    (accum, micro_step): (Accum, u32),
    longest: usize,
) -> Case {
    let name = format!("B{b} T{t} C{c} V{v} documents to {longest} {accum:?} micro-step {micro_step}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    let op = EmbeddingBwd {
        d_wte: kit.grad([v, c]),
        d_wpe: Some(kit.grad([context, c])),
        d_out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        positions: Some(kit.documents([b, t], longest)),
        accum_wte: Accum::Add,
        accum,
        factor: 1.0,
    };
    kit.finish(op)
}

/// What a case's name says about its factor.
fn times(factor: f32) -> String {
    if factor == 1.0 { String::new() } else { format!(" times {factor}") }
}

/// A case without a table of positions.
fn alone_fwd(p: Precision, [b, t, c, v, _]: [usize; 5], position: Option<u32>, factor: f32) -> Case {
    let at = position.map_or(String::new(), |position| format!(" at position {position}"));
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} V{v} tokens only{at}{}", times(factor)));
    kit.scalars.position = position.unwrap_or(u32::MAX);
    let op = EmbeddingFwd {
        out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        wte: kit.param([v + 3, c]),
        wpe: None,
        positions: None,
        vocab: v,
        at_position: position.is_some(),
        factor,
    };
    kit.finish(op)
}

/// A case of the backward without a table of positions, for untied embeddings.
fn alone_bwd(
    p: Precision,
    [b, t, c, v, _]: [usize; 5],
    (accum_wte, micro_step): (Accum, u32),
    factor: f32,
) -> Case {
    let name =
        format!("B{b} T{t} C{c} V{v} tokens only {accum_wte:?} micro-step {micro_step}{}", times(factor));
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    let op = EmbeddingBwd {
        d_wte: kit.grad([v + 3, c]),
        d_wpe: None,
        d_out: kit.slot([b, t, c]),
        tokens: kit.tokens([b, t], v),
        positions: None,
        accum_wte,
        accum: Accum::Write,
        factor,
    };
    kit.finish(op)
}
