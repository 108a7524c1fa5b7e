//! Inputs an engine must refuse with `Error::Input`, not read past its tables.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, AttentionCached, CrossEntropy, EmbeddingBwd, EmbeddingFwd};

/// Programs that are right, with an input that is not.
pub fn refusals() -> Vec<Case> {
    refusals_in(Precision::F32)
}

/// The same in these element types.
pub fn refusals_in(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for token in [-1, 7, i32::MIN, i32::MAX] {
        cases.push(embedding_fwd(p, token, 0));
        cases.push(cross_entropy(p, token, true));
        cases.push(cross_entropy(p, token, false));
        if token != 7 {
            cases.push(embedding_bwd(p, token)); // knows only the padded vocabulary of 8
        }
    }
    for position in [5, u32::MAX] {
        cases.push(embedding_fwd(p, 0, position));
        cases.push(attention_cached(p, position));
    }
    cases
}

fn embedding_fwd(p: Precision, token: i32, position: u32) -> Case {
    let mut kit = Kit::with_precision(p, format!("token {token} of 7 at position {position} of 5"));
    kit.scalars.position = position;
    let op = EmbeddingFwd {
        out: kit.slot([2, 1, 3]),
        tokens: kit.i32s([2, 1], &[6, token]),
        wte: kit.param([8, 3]),
        wpe: kit.param([5, 3]),
        vocab: 7,
        at_position: true,
    };
    kit.finish(op)
}

fn embedding_bwd(p: Precision, token: i32) -> Case {
    let mut kit = Kit::with_precision(p, format!("token {token} of 8"));
    let op = EmbeddingBwd {
        d_wte: kit.grad([8, 3]),
        d_wpe: kit.grad([5, 3]),
        d_out: kit.slot([2, 1, 3]),
        tokens: kit.i32s([2, 1], &[7, token]),
        accum: Accum::Write,
    };
    kit.finish(op)
}

fn cross_entropy(p: Precision, target: i32, grad: bool) -> Case {
    let mut kit = Kit::with_precision(p, format!("target {target} of 7 grad {grad}"));
    let op = CrossEntropy {
        losses: kit.stat([2, 1]),
        logits: kit.slot([2, 1, 8]),
        targets: kit.i32s([2, 1], &[6, target]),
        vocab: 7,
        grad,
    };
    kit.finish(op)
}

fn attention_cached(p: Precision, position: u32) -> Case {
    let mut kit = Kit::with_precision(p, format!("position {position} of 5"));
    kit.scalars.position = position;
    let [keys, values] = [(); 2].map(|()| kit.cache([2, 5, 3]));
    let (out, qkv) = (kit.slot([2, 1, 3]), kit.slot([2, 1, 9]));
    kit.finish(AttentionCached { out, keys, values, qkv, heads: 1, kv_heads: 1 })
}
