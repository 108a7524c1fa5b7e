//! Cases of attention over documents that share a sequence, and over a sliding window.

use super::{Case, Earlier, Kit, Size, bwd_op, cached, drop_of, fwd_op, results};
use ironhorse_core::op::{
    AttentionBwd, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd, AttentionMask,
};
use ironhorse_core::{Precision, Scalars};
use std::sync::Arc;

/// What limits the keys of a case: the longest document, 0 for whole sequences, and the window, 0 for none.
type Limits = [usize; 2];

/// (B, T, C, NH, NKV) and limits, for every kind of kernel: documents of one token, windows of one key and of more than the
/// sequence, edges at and beside those of tiles.
const MASKED: [([usize; 5], Limits); 23] = [
    ([1, 1, 1, 1, 1], [1, 1]),
    ([2, 33, 5, 5, 5], [9, 0]),
    ([2, 37, 48, 3, 3], [1, 0]),
    ([2, 70, 102, 6, 3], [30, 7]),
    ([1, 65, 80, 5, 5], [0, 1]),
    ([2, 130, 128, 2, 1], [100, 0]),
    ([1, 64, 64, 1, 1], [1, 0]),
    ([1, 200, 128, 2, 2], [0, 65]),
    ([1, 200, 128, 2, 1], [0, 64]),
    ([2, 150, 256, 2, 1], [60, 33]),
    ([1, 129, 192, 3, 3], [0, 200]),
    ([1, 129, 192, 3, 1], [0, 129]),
    ([1, 300, 64, 1, 1], [300, 64]),
    ([2, 260, 256, 2, 2], [8, 0]),
    ([1, 257, 128, 1, 1], [150, 1]),
    ([1, 67, 160, 2, 1], [20, 0]),
    ([1, 100, 192, 2, 2], [40, 50]),
    ([1, 40, 514, 2, 1], [13, 5]),
    ([1, 50, 200, 1, 1], [17, 0]),
    ([1, 550, 64, 4, 1], [200, 300]),
    ([1, 700, 128, 2, 2], [300, 0]),
    ([0, 7, 48, 6, 2], [3, 2]),
    ([2, 0, 48, 6, 2], [3, 2]),
];

/// The indices in [`MASKED`] of the cases that also run with dropout of the probabilities.
const DROPPED: [usize; 6] = [3, 5, 8, 9, 17, 18];

/// (B, maxT, C, NH, NKV), positions, windows.
const CACHES: [([usize; 5], &[usize], &[usize]); 4] = [
    ([2, 37, 48, 4, 1], &[0, 18, 36], &[1, 7, 37, 100]),
    ([1, 130, 129, 3, 3], &[129], &[1, 64, 65]),
    ([1, 600, 128, 2, 1], &[0, 63, 64, 300, 599], &[1, 64, 129]),
    ([2, 300, 256, 2, 2], &[299], &[31, 257]),
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, limits) in MASKED {
        let (size, name) = (Size::from(shape), name(shape, limits));
        let forward = |kit: &mut Kit| fwd(kit, size, limits);
        let mut kit = Kit::with_precision(p, name.as_str());
        let op = forward(&mut kit);
        cases.push(kit.finish(op));
        let mut kit = Kit::with_precision(p, name.as_str());
        let op = forward(&mut kit);
        let results = results(kit.finish(op), op);
        let mut kit = Kit::with_precision(p, name);
        let op = bwd(&mut kit, size, limits, &results);
        cases.push(kit.finish(op));
    }
    for (shape, positions, windows) in CACHES {
        for (&position, &window) in positions.iter().flat_map(|at| windows.iter().map(move |w| (at, w))) {
            cases.push(cached(p, shape.into(), position, Some(window)));
        }
    }
    cases
}

pub(super) fn dropout_cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for (number, (shape, limits)) in DROPPED.map(|at| MASKED[at]).into_iter().enumerate() {
        let (size, name, (drop, scalars)) = (Size::from(shape), name(shape, limits), drop_of(number));
        let forward = |kit: &mut Kit| {
            let AttentionFwd { out, lse, qkv, heads, kv_heads, mask } = fwd(kit, size, limits);
            AttentionDropoutFwd { out, lse, qkv, heads, kv_heads, mask, drop }
        };
        let kit = || with_scalars(p, &name, scalars);
        let mut first = kit();
        let op = forward(&mut first);
        cases.push(first.finish(op));
        let mut again = kit();
        let op = forward(&mut again);
        let results = results(again.finish(op), op.attention());
        let mut second = kit();
        let AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask } =
            bwd(&mut second, size, limits, &results);
        cases.push(second.finish(AttentionDropoutBwd {
            d_qkv,
            d_out,
            qkv,
            out,
            lse,
            heads,
            kv_heads,
            mask,
            drop,
        }));
    }
    cases
}

fn name(shape: [usize; 5], [longest, window]: Limits) -> String {
    let documents = if longest == 0 { String::new() } else { format!(" documents to {longest}") };
    let last = if window == 0 { String::new() } else { format!(" window {window}") };
    Size::from(shape).name("T") + &documents + &last
}

/// The documents are the first random numbers of a case, so those of a forward and its backward are the same.
fn mask(kit: &mut Kit, size: Size, [longest, window]: Limits) -> AttentionMask {
    let positions = (longest > 0).then(|| kit.documents([size.b, size.t], longest));
    AttentionMask { positions, window: (window > 0).then_some(window) }
}

fn fwd(kit: &mut Kit, size: Size, limits: Limits) -> AttentionFwd {
    let mask = mask(kit, size, limits);
    AttentionFwd { mask, ..fwd_op(kit, size, 1.0) }
}

fn bwd(kit: &mut Kit, size: Size, limits: Limits, results: &Arc<Earlier>) -> AttentionBwd {
    let mask = mask(kit, size, limits);
    AttentionBwd { mask, ..bwd_op(kit, size, 1.0, results) }
}

fn with_scalars(p: Precision, name: &str, scalars: Scalars) -> Kit {
    let mut kit = Kit::with_precision(p, name);
    kit.scalars = scalars;
    kit
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::Op;

    /// A backward must be of the documents of its forward.
    #[test]
    fn forward_and_backward_have_the_same_documents() {
        let positions = |case: &Case| {
            let mask = match case.op() {
                Op::AttentionFwd(op) => op.mask,
                Op::AttentionBwd(op) => op.mask,
                _ => return None,
            };
            mask.positions.map(|slot| case.oracle().unwrap().read_f64(slot).unwrap())
        };
        let all: Vec<_> = cases(Precision::F32).iter().take(2 * MASKED.len()).map(positions).collect();
        assert!(all.chunks(2).all(|pair| pair[0] == pair[1]));
        assert!(all.iter().flatten().any(|at| at.iter().filter(|&&p| p == 0.0).count() > 3));
    }
}
