//! Cases of the norm of the heads of queries and keys.

use super::norm::EPS;
use super::{ACCUMS, Case, Kit};
use crate::oracle::rmsnorm::rstd;
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, Gain, QkNormBwd, QkNormFwd};

/// (B, T, HD, NH, NKV): heads narrower than a vector, of whole vectors, of a few lanes too many, and wider than a warp's
/// vectors.
const SHAPES: [[usize; 5]; 14] = [
    [1, 1, 1, 1, 1],
    [2, 5, 2, 3, 3],
    [2, 31, 6, 4, 1],
    [1, 33, 10, 6, 2],
    [3, 37, 16, 4, 1],
    [1, 65, 62, 2, 1],
    [2, 130, 64, 12, 1],
    [1, 33, 80, 3, 3],
    [1, 67, 96, 5, 1],
    [1, 65, 128, 16, 8],
    [8, 1, 128, 4, 2],
    [1, 7, 264, 2, 1],
    [0, 7, 16, 4, 1],
    [2, 0, 16, 4, 1],
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, (false, 1.0), PLAIN));
        cases.push(fwd(p, shape, (true, 1.0), PLAIN));
        cases.extend(ACCUMS.map(|accum| bwd(p, shape, accum, PLAIN)));
    }
    cases.push(fwd(p, [1, 9, 128, 4, 2], (false, 1e-3), PLAIN)); // so small that eps shows
    cases.push(fwd(p, [1, 9, 128, 4, 2], (false, 1e4), PLAIN));
    for factors in [(Gain::OnePlusWeight, 1.0), (Gain::OnePlusWeight, 0.875)] {
        for shape in [[1, 1, 1, 1, 1], [2, 31, 6, 4, 1], [1, 65, 128, 16, 8], [2, 33, 256, 4, 1]] {
            cases.push(fwd(p, shape, (false, 1.0), factors));
            cases.push(fwd(p, shape, (true, 1.0), factors));
            cases.extend(ACCUMS.map(|accum| bwd(p, shape, accum, factors)));
        }
    }
    cases
}

/// `gain` and `q_scale`.
type Factors = (Gain, f32);

const PLAIN: Factors = (Gain::Weight, 1.0);

fn name([b, t, hd, heads, kv_heads]: [usize; 5], factors: Factors) -> String {
    let factors =
        if factors == PLAIN { String::new() } else { format!(" {:?} q × {}", factors.0, factors.1) };
    format!("B{b} T{t} HD{hd} NH{heads} NKV{kv_heads}{factors}")
}

fn fwd(p: Precision, shape: [usize; 5], (in_place, range): (bool, f32), factors: Factors) -> Case {
    let [b, t, hd, heads, kv_heads] = shape;
    let mut kit =
        Kit::with_precision(p, format!("{} in place {in_place} range {range}", name(shape, factors)));
    let qkv = [b, t, (heads + 2 * kv_heads) * hd];
    let inp = kit.slot(qkv);
    let op = QkNormFwd {
        out: if in_place { inp } else { kit.slot(qkv) },
        rstd: kit.stat([b, t, heads + kv_heads]),
        inp,
        q_weight: kit.param([hd]),
        k_weight: kit.param([hd]),
        heads,
        kv_heads,
        eps: EPS,
        gain: factors.0,
        q_scale: factors.1,
    };
    kit.draw(inp, -range, 2.0 * range);
    kit.finish(op)
}

fn bwd(p: Precision, shape: [usize; 5], (accum, micro_step): (Accum, u32), factors: Factors) -> Case {
    let [b, t, hd, heads, kv_heads] = shape;
    let mut kit =
        Kit::with_precision(p, format!("{} {accum:?}, micro-step {micro_step}", name(shape, factors)));
    kit.scalars.micro_step = micro_step;
    let qkv = [b, t, (heads + 2 * kv_heads) * hd];
    let op = QkNormBwd {
        d_qkv: kit.slot(qkv),
        d_q_weight: kit.grad([hd]),
        d_k_weight: kit.grad([hd]),
        inp: kit.slot(qkv),
        rstd: kit.stat([b, t, heads + kv_heads]),
        q_weight: kit.param([hd]),
        k_weight: kit.param([hd]),
        heads,
        kv_heads,
        accum,
        gain: factors.0,
        q_scale: factors.1,
    };
    let values: Vec<f64> = kit.random(op.inp, -1.0, 2.0).into_iter().map(f64::from).collect();
    let all = values
        .chunks_exact(hd)
        .enumerate()
        .filter(|(row, _)| row % (heads + 2 * kv_heads) < heads + kv_heads);
    let stats = kit.set(op.rstd, all.map(|(_, head)| rstd(head, f64::from(EPS)) as f32).collect());
    if hd <= 2 {
        // g - x̂·mean(g·x̂) with x̂² near 1: a rounding of g shows rstd times
        kit.floor = f64::from(stats.into_iter().fold(0.0, f32::max));
    }
    kit.finish(op)
}
