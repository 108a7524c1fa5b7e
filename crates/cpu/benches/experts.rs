//! The ops of a mixture of experts: products in GFLOP/s beside one dense product of the same work, the others in GB/s
//! beside a copy; then its other layers.
//!
//!     cargo bench -p ironhorse-cpu --bench experts -- [threads] [bf16]
//!     ONLY="64 experts" cargo bench -p ironhorse-cpu --bench experts    sizes whose names have these words

mod frame;

use ironhorse_core::op::*;
use ironhorse_core::{DType, Slot};

/// Tokens, width, width of an expert, experts, chosen.
type Size = [usize; 5];

const SIZES: [(&str, Size); 4] = [
    ("moe-tiny, 2×32 tokens", [64, 64, 256, 4, 2]),
    ("moe-tiny, 8×512 tokens", [4096, 64, 256, 4, 2]),
    ("768 wide, 16 experts", [1024, 768, 1536, 16, 4]),
    ("768 wide, 64 experts", [1024, 768, 384, 64, 4]),
];

/// Tokens, width, and the columns of the result.
const LAYERS: [(&str, [usize; 3]); 4] = [
    ("moe-tiny, 8×512 tokens, head", [4096, 64, 1000]),
    ("moe-tiny, 8×512 tokens, queries, keys and values", [4096, 64, 96]),
    ("moe-tiny, 8×512 tokens, result of attention", [4096, 64, 64]),
    ("moe-tiny, 8×512 tokens, router", [4096, 64, 4]),
];

fn experts([n, c, f, e, k]: Size) -> frame::Timed {
    let (mut ops, r) = (frame::Ops::default(), n * k);
    let [x, y, d_y] = ops.f32s([1, n, c]);
    let [norm, d_norm] = ops.f32s([1, 1, c]).map(|slot| slot.view([c]));
    let [rstd] = ops.f32s([1, 1, n]);
    let [logits, probs] = ops.f32s([1, n, e]);
    let [weights, d_weights] = ops.f32s([1, n, k]);
    let ([load], [aux]) = (ops.f32s([1, 1, e]), ops.f32s([1, 1, 1]));
    let [rows, d_rows] = ops.f32s([1, r, c]);
    let [h, d_h] = ops.f32s([1, r, 2 * f]);
    let [a] = ops.f32s([1, r, f]);
    let [w13, d_w13] = ops.f32s([e, 2 * f, c]);
    let [w2, d_w2] = ops.f32s([e, c, f]);
    let [experts, places] = [(); 2].map(|()| ops.slot([1, n, k], DType::I32));
    let (order, offsets) = (ops.slot([1, 1, r], DType::I32), ops.slot([1, 1, e + 1], DType::I32));
    let (accum, eps) = (Accum::Write, 1e-5);
    let dense = Slot { shape: [2 * f, c].into(), ..w13 };
    let d_dense = Slot { shape: [2 * f, c].into(), ..d_w13 };
    ops.push(RouterFwd { probs, weights, experts, logits });
    ops.push(RouteSort { order, places, offsets, experts });
    ops.push(RouterLoad { load, aux, entropy: None, probs, offsets, alpha: 0.01, accum });
    ops.push(RouterBwd { d_logits: logits, d_weights, probs, weights, experts, load, alpha: 0.01 });
    ops.push(CopySlot { out: d_rows, inp: rows });
    ops.push(RmsNormFwd { out: y, rstd, inp: x, weight: norm, eps, gain: Gain::Weight });
    ops.push(RmsNormBwd {
        d_inp: d_y,
        d_weight: d_norm,
        d_out: y,
        inp: x,
        rstd,
        weight: norm,
        accum_inp: accum,
        accum,
        gain: Gain::Weight,
    });
    ops.push(Permute { out: rows, inp: x, order });
    ops.push(PermuteBwd { d_inp: d_y, d_out: rows, places, accum });
    ops.push(Combine { out: y, rows, places, weights });
    ops.push(CombineBwd { d_rows, d_weights, d_out: y, rows, places, weights });
    ops.push(SwigluFwd { out: a, inp: h, gate: Gate::Silu });
    ops.push(SwigluBwd { d_inp: d_h, act: None, d_out: a, inp: h, gate: Gate::Silu });
    ops.push(LinearFwd { out: h, pre: None, inp: rows, weight: dense, bias: None });
    ops.push(GroupedLinearFwd { out: h, act: None, inp: rows, weight: w13, offsets });
    ops.push(GroupedLinearFwd { out: h, act: Some(a), inp: rows, weight: w13, offsets });
    ops.push(GroupedLinearFwd { out: d_rows, act: None, inp: a, weight: w2, offsets });
    ops.push(LinearBwdInput { d_inp: d_rows, d_out: h, weight: dense, pre: None });
    ops.push(GroupedLinearBwdInput { d_inp: d_rows, d_out: h, weight: w13, offsets });
    ops.push(GroupedLinearBwdInput { d_inp: a, d_out: d_rows, weight: w2, offsets });
    ops.push(LinearBwdWeight { d_weight: d_dense, d_bias: None, d_out: h, inp: rows, accum });
    ops.push(GroupedLinearBwdWeight { d_weight: d_w13, d_out: h, inp: rows, offsets, accum });
    ops.push(GroupedLinearBwdWeight { d_weight: d_w2, d_out: rows, inp: a, offsets, accum });
    // The gradients take the place of what they are computed from, as in a training step: the numbers are others in each run.
    ops.push_all([
        GroupedLinearBwdInput { d_inp: a, d_out: d_rows, weight: w2, offsets }.into(),
        SwigluBwd { d_inp: h, act: None, d_out: a, inp: h, gate: Gate::Silu }.into(),
    ]);
    ops.finish(vec![x, norm, logits, h, w13, w2, d_weights])
}

fn layer([n, ic, oc]: [usize; 3]) -> frame::Timed {
    let mut ops = frame::Ops::default();
    let [inp, d_inp] = ops.f32s([1, n, ic]);
    let [out, d_out] = ops.f32s([1, n, oc]);
    let [weight, d_weight] = ops.f32s([1, oc, ic]).map(|slot| slot.view([oc, ic]));
    ops.push(LinearFwd { out, pre: None, inp, weight, bias: None });
    ops.push(LinearBwdInput { d_inp, d_out, weight, pre: None });
    ops.push(LinearBwdWeight { d_weight, d_bias: None, d_out, inp, accum: Accum::Write });
    let [losses] = ops.f32s([1, 1, n]).map(|slot| slot.view([n]));
    let targets = ops.slot([1, 1, n], DType::I32).view([n]);
    let loss = CrossEntropy { losses, logits: out, targets, vocab: oc, grad: true };
    ops.push(loss);
    ops.push_all([LinearFwd { out, pre: None, inp, weight, bias: None }.into(), loss.into()]);
    ops.finish(vec![inp, d_out, weight])
}

fn main() {
    frame::run(&SIZES, experts, (0.5, 500));
    frame::run(&LAYERS, layer, (0.5, 500));
}
