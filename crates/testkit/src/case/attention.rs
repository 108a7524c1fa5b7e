//! Cases of attention.

use super::{Case, Kit};
use ironhorse_core::op::{AttentionBwd, AttentionCached, AttentionFwd};
use ironhorse_core::{Precision, Slot};

/// (B, T, C, NH)
const SHAPES: [[usize; 4]; 11] = [
    [1, 1, 1, 1],
    [3, 1, 48, 3],
    [2, 2, 5, 1],
    [2, 33, 5, 5],
    [2, 37, 48, 3],
    [1, 31, 128, 2],
    [1, 65, 80, 5],
    [1, 130, 129, 3],
    [1, 17, 160, 1],
    [0, 7, 48, 3],
    [2, 0, 48, 3],
];

/// The same with head sizes of 64 and 128: whole tiles, and a few rows beyond.
const TILES: [[usize; 4]; 9] = [
    [1, 33, 64, 1],
    [2, 64, 128, 2],
    [1, 128, 256, 2],
    [1, 129, 192, 3],
    [2, 200, 128, 2],
    [1, 256, 128, 2],
    [1, 384, 128, 2],
    [1, 256, 256, 2],
    [1, 130, 384, 3],
];

/// (B, maxT, C, NH), positions
const CACHES: [([usize; 4], &[usize]); 7] = [
    ([1, 1, 1, 1], &[0]),
    ([2, 37, 48, 3], &[0, 1, 18, 36]),
    ([1, 130, 129, 3], &[30, 65, 129]),
    ([3, 65, 64, 1], &[31, 64]),
    ([5, 33, 5, 5], &[32]),
    ([0, 4, 48, 3], &[2]),
    ([2, 256, 768, 12], &[0, 128, 255]),
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, 1.0));
        cases.push(bwd(p, shape, 1.0));
    }
    for shape in TILES {
        cases.push(fwd(p, shape, 1.0));
        cases.push(bwd(p, shape, 1.0));
    }
    for spread in [4.0, 10.0] {
        cases.push(fwd(p, [1, 65, 64, 4], spread)); // scores beyond 100: exp overflows unless the maximum is subtracted
        cases.push(bwd(p, [1, 65, 64, 4], spread));
    }
    for (shape, positions) in CACHES {
        cases.extend(positions.iter().map(|&position| cached(p, shape, position)));
    }
    cases
}

/// Scores spread by about spread²/3; the largest of thousands is four or five times that.
fn mark(kit: &mut Kit, [b, t, c, _]: [usize; 4], spread: f32) {
    kit.scores = 1.5 * f64::from(spread * spread);
    kit.large = b * t * t * c > 3_000_000;
}

fn fwd_op(kit: &mut Kit, [b, t, c, heads]: [usize; 4], spread: f32) -> AttentionFwd {
    mark(kit, [b, t, c, heads], spread);
    let (out, lse, qkv) = (kit.slot([b, t, c]), kit.stat([b, heads, t]), kit.slot([b, t, 3 * c]));
    kit.random(qkv, -spread, spread);
    AttentionFwd { out, lse, qkv, heads }
}

fn fwd(p: Precision, [b, t, c, heads]: [usize; 4], spread: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} NH{heads} spread {spread}"));
    let op = fwd_op(&mut kit, [b, t, c, heads], spread);
    kit.finish(op)
}

/// `out` and `lse` are what the oracle's forward makes of `qkv`, rounded to f32.
fn bwd(p: Precision, [b, t, c, heads]: [usize; 4], spread: f32) -> Case {
    let name = format!("B{b} T{t} C{c} NH{heads} spread {spread}");
    let mut kit = Kit::with_precision(p, name.as_str());
    let forward = fwd_op(&mut kit, [b, t, c, heads], spread);
    let oracle = kit.finish(forward).oracle().expect("attention_fwd runs on the oracle");
    let result = |slot: Slot| -> Vec<f32> {
        oracle.read_f64(slot).expect("a slot of the case").into_iter().map(|x| x as f32).collect()
    };

    let mut kit = Kit::with_precision(p, name);
    mark(&mut kit, [b, t, c, heads], spread);
    let op = AttentionBwd {
        d_qkv: kit.slot([b, t, 3 * c]),
        d_out: kit.slot([b, t, c]),
        qkv: kit.f32s([b, t, 3 * c], &result(forward.qkv)),
        out: kit.f32s([b, t, c], &result(forward.out)),
        lse: kit.stat([b, heads, t]),
        heads,
    };
    kit.set(op.lse, result(forward.lse));
    kit.finish(op)
}

/// The cache holds NaN from `position` on: those places may be written, never read.
fn cached(p: Precision, [b, context, c, heads]: [usize; 4], position: usize) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} maxT{context} C{c} NH{heads} at position {position}"));
    kit.scalars.position = position as u32;
    let [keys, values] = [(); 2].map(|()| kit.cache([b, context, c]));
    for slot in [keys, values] {
        let mut data = kit.rng.uniforms(slot.numel(), -1.0, 1.0);
        for row in data.chunks_exact_mut(context * c) {
            row[position * c..].fill(f32::NAN);
        }
        kit.set(slot, data);
    }
    let op = AttentionCached { out: kit.slot([b, 1, c]), keys, values, qkv: kit.slot([b, 1, 3 * c]), heads };
    kit.finish(op)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::Op;

    #[test]
    fn the_widest_scores_overflow_an_f32_exponential() {
        let case = fwd(Precision::F32, [1, 65, 64, 4], 10.0);
        let Op::AttentionFwd(op) = *case.op() else { unreachable!() };
        let lse = case.oracle().unwrap().read_f64(op.lse).unwrap();
        let largest = lse.into_iter().fold(0.0, f64::max) as f32;
        assert_eq!(largest.exp(), f32::INFINITY, "{largest}");
    }
}
