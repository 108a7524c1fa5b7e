//! Inputs that an engine must reject with `Error::Input` instead of reading out of bounds.

use super::{Case, Kit};
use ironhorse_core::op::{
    Accum, AttentionCached, AttentionFwd, AttentionMask, CrossEntropy, CrossEntropyBwd, EmbeddingBwd,
    EmbeddingFwd, GroupedFp8, GroupedFp8BwdWeight, GroupedLinearFwd, GroupedLoraBwdInput,
    GroupedLoraBwdWeight, GroupedLoraFwd, LoraParts, Preference, Rope, RopeScaling, RouteSort, RouterFwd,
};
use ironhorse_core::{Fp8, Precision, Slot};

/// Valid programs with an invalid input, in f32.
pub fn refusals() -> Vec<Case> {
    refusals_in(Precision::F32)
}

/// As [`refusals`], in these element types.
pub fn refusals_in(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for token in [-1, 7, i32::MIN, i32::MAX] {
        cases.push(embedding_fwd(p, token, 0));
        cases.push(cross_entropy(p, token, true));
        cases.push(cross_entropy(p, token, false));
        cases.push(cross_entropy_bwd(p, token));
        if token != 7 {
            cases.push(embedding_bwd(p, token)); // has only the padded vocabulary of 8
        }
    }
    for position in [5, u32::MAX] {
        cases.push(embedding_fwd(p, 0, position));
        cases.push(attention_cached(p, position));
        cases.push(rope(p, position));
    }
    for positions in [[1, 0, 0, 1], [0, 2, 0, 1], [0, 1, 2, 3], [0, -1, 0, 1], [0, i32::MIN, 0, i32::MAX]] {
        cases.extend([
            packed_attention(p, positions),
            packed_rope(p, positions),
            packed_embedding(p, positions),
        ]);
    }
    for positions in [[0, 5], [-2, 1], [i32::MAX, 3], [3, i32::MIN]] {
        cases.extend([placed_embedding(p, positions), placed_rope(p, positions)]);
        cases.push(placed_attention(p, [0, 1], positions));
    }
    for (rows, positions) in
        [([0, 3], [0, 0]), ([-1, 0], [0, 0]), ([1, 0], [0, 0]), ([1, 1], [2, 2]), ([1, 2], [-1, 2])]
    {
        cases.push(placed_attention(p, rows, positions));
    }
    for logit in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        cases.extend([0, 40].map(|token| router_fwd(p, token, logit)));
    }
    for pairs in [
        [0, 1, 2, 2, 4, 3],
        [0, 1, 2, 1, 3, 4],
        [-1, 0, 2, 2, 3, 4],
        [0, 1, 2, 2, 3, 5],
        [0, i32::MAX, 4, 4, 4, i32::MIN],
    ] {
        cases.push(preference(p, pairs));
    }
    for expert in [-1, 4, i32::MIN, i32::MAX] {
        cases.push(route_sort(p, expert));
    }
    for offsets in [[1, 3, 5], [0, 4, 3], [0, 3, 6], [0, -1, 5], [0, i32::MAX, 5], [0, 5, 4]] {
        cases.push(grouped_linear_fwd(p, offsets));
        cases.extend(grouped_lora(p, offsets));
        cases.extend(grouped_fp8(p, offsets));
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
        wpe: Some(kit.param([5, 3])),
        positions: None,
        vocab: 7,
        at_position: true,
        factor: 1.0,
    };
    kit.finish(op)
}

fn embedding_bwd(p: Precision, token: i32) -> Case {
    let mut kit = Kit::with_precision(p, format!("token {token} of 8"));
    let op = EmbeddingBwd {
        d_wte: kit.grad([8, 3]),
        d_wpe: Some(kit.grad([5, 3])),
        d_out: kit.slot([2, 1, 3]),
        tokens: kit.i32s([2, 1], &[7, token]),
        positions: None,
        accum_wte: Accum::Add,
        accum: Accum::Write,
        factor: 1.0,
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

fn cross_entropy_bwd(p: Precision, target: i32) -> Case {
    let mut kit = Kit::with_precision(p, format!("target {target} of 7"));
    let op = CrossEntropyBwd {
        logits: kit.slot([2, 1, 8]),
        targets: kit.i32s([2, 1], &[6, target]),
        losses: kit.stat([2, 1]),
        weights: kit.stat([2, 1]),
        vocab: 7,
    };
    kit.finish(op)
}

/// Two pairs whose rows are not those of four tokens in order.
fn preference(p: Precision, pairs: [i32; 6]) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {pairs:?} of pairs"));
    let op = Preference {
        loss: kit.stat([]),
        means: kit.stat([3]),
        rewards: kit.stat([2, 2]),
        weights: Some(kit.stat([2, 2])),
        losses: kit.stat([2, 2]),
        reference: kit.stat([2, 2]),
        pairs: kit.i32s([2, 3], &pairs),
        beta: 0.1,
        accum: Accum::Write,
    };
    kit.finish(op)
}

fn attention_cached(p: Precision, position: u32) -> Case {
    let mut kit = Kit::with_precision(p, format!("position {position} of 5"));
    kit.scalars.position = position;
    let [keys, values] = [(); 2].map(|()| kit.cache([2, 5, 3]));
    let (out, qkv) = (kit.slot([2, 1, 3]), kit.slot([2, 1, 9]));
    kit.finish(AttentionCached {
        out,
        keys,
        values,
        qkv,
        rows: None,
        positions: None,
        heads: 1,
        kv_heads: 1,
        window: None,
    })
}

fn rope(p: Precision, position: u32) -> Case {
    let mut kit = Kit::with_precision(p, format!("position {position} of 5"));
    kit.scalars.position = position;
    let qkv = kit.slot([2, 1, 12]);
    let (heads, kv_heads, base, alpha, scaling) = (1, 1, 1e4, 1.0, RopeScaling::None);
    let (back, at_position, positions) = (false, true, None);
    kit.finish(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 5 })
}

/// Two sequences of two tokens whose positions do not count up from 0.
fn packed(p: Precision, positions: [i32; 4]) -> (Kit, Option<Slot>) {
    let mut kit = Kit::with_precision(p, format!("positions {positions:?} of documents"));
    let positions = kit.i32s([2, 2], &positions);
    (kit, Some(positions))
}

/// Two tokens of a cache of three sequences of five positions.
fn placed_attention(p: Precision, rows: [i32; 2], positions: [i32; 2]) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows:?} at positions {positions:?}"));
    let [keys, values] = [(); 2].map(|()| kit.cache([3, 5, 3]));
    let (out, qkv) = (kit.slot([2, 1, 3]), kit.slot([2, 1, 9]));
    let [rows, positions] = [rows, positions].map(|values| Some(kit.i32s([2, 1], &values)));
    kit.finish(AttentionCached {
        out,
        keys,
        values,
        qkv,
        rows,
        positions,
        heads: 1,
        kv_heads: 1,
        window: None,
    })
}

fn placed_rope(p: Precision, positions: [i32; 2]) -> Case {
    let mut kit = Kit::with_precision(p, format!("tokens at positions {positions:?} of 5"));
    let positions = Some(kit.i32s([2, 1], &positions));
    let qkv = kit.slot([2, 1, 12]);
    let (heads, kv_heads, base, alpha, scaling) = (1, 1, 1e4, 1.0, RopeScaling::None);
    let (back, at_position) = (false, true);
    kit.finish(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 5 })
}

fn placed_embedding(p: Precision, positions: [i32; 2]) -> Case {
    let mut kit = Kit::with_precision(p, format!("tokens at positions {positions:?} of 5"));
    let op = EmbeddingFwd {
        out: kit.slot([2, 1, 3]),
        tokens: kit.i32s([2, 1], &[6, 0]),
        wte: kit.param([8, 3]),
        wpe: Some(kit.param([5, 3])),
        positions: Some(kit.i32s([2, 1], &positions)),
        vocab: 7,
        at_position: true,
        factor: 1.0,
    };
    kit.finish(op)
}

fn packed_attention(p: Precision, positions: [i32; 4]) -> Case {
    let (mut kit, positions) = packed(p, positions);
    let (out, lse, qkv) = (kit.slot([2, 2, 3]), kit.stat([2, 1, 2]), kit.slot([2, 2, 9]));
    let mask = AttentionMask { positions, window: None };
    kit.finish(AttentionFwd { out, lse, qkv, heads: 1, kv_heads: 1, mask })
}

fn packed_rope(p: Precision, positions: [i32; 4]) -> Case {
    let (mut kit, positions) = packed(p, positions);
    let qkv = kit.slot([2, 2, 12]);
    let (heads, kv_heads, base, alpha, scaling) = (1, 1, 1e4, 1.0, RopeScaling::None);
    let (back, at_position) = (false, false);
    kit.finish(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: 2 })
}

fn packed_embedding(p: Precision, positions: [i32; 4]) -> Case {
    let (mut kit, positions) = packed(p, positions);
    let op = EmbeddingFwd {
        out: kit.slot([2, 2, 3]),
        tokens: kit.i32s([2, 2], &[6, 0, 1, 2]),
        wte: kit.param([8, 3]),
        wpe: Some(kit.param([5, 3])),
        positions,
        vocab: 7,
        at_position: false,
        factor: 1.0,
    };
    kit.finish(op)
}

fn router_fwd(p: Precision, token: usize, logit: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("logit {logit} of token {token}"));
    let (probs, weights) = (kit.stat([41, 3]), kit.stat([41, 2]));
    let (experts, logits) = (kit.ints([41, 2]), kit.slot([41, 3]));
    let mut values = kit.rng.uniforms(41 * 3, -1.0, 1.0);
    values[3 * token + 1] = logit;
    kit.set(logits, values);
    kit.finish(RouterFwd { probs, weights, experts, logits })
}

fn route_sort(p: Precision, expert: i32) -> Case {
    let mut kit = Kit::with_precision(p, format!("expert {expert} of 4"));
    let (order, places, offsets) = (kit.ints([4]), kit.ints([2, 2]), kit.ints([5]));
    let experts = kit.i32s([2, 2], &[0, 3, 2, expert]);
    kit.finish(RouteSort { order, places, offsets, experts })
}

fn grouped_linear_fwd(p: Precision, offsets: [i32; 3]) -> Case {
    let mut kit = Kit::with_precision(p, format!("offsets {offsets:?} of 5 rows"));
    let (out, inp, weight) = (kit.slot([5, 2]), kit.slot([5, 3]), kit.param([2, 2, 3]));
    let offsets = kit.i32s([3], &offsets);
    kit.finish(GroupedLinearFwd { out, act: None, inp, weight, offsets })
}

/// Offsets of 5 rows for 16 rows: none of them ends where it should.
fn grouped_fp8(p: Precision, ends: [i32; 3]) -> [Case; 2] {
    let kits = || {
        let mut kit = Kit::with_precision(p, format!("offsets {ends:?} of 16 rows"));
        let slots = [(); 2].map(|()| {
            let slot = kit.fp8([16, 16], Fp8::E4M3);
            kit.set(slot, vec![1.0; 256]);
            slot
        });
        let inverses = [(); 2].map(|()| {
            let slot = kit.stat([1]);
            kit.set(slot, vec![1.0]);
            slot
        });
        let offsets = kit.i32s([3], &ends);
        (kit, slots, inverses, offsets)
    };
    let (mut kit, [a, _], [a_inverse, b_inverse], offsets) = kits();
    let (out, b) = (kit.slot([16, 16]), kit.fp8([2, 16, 16], Fp8::E4M3));
    kit.set(b, vec![1.0; 512]);
    let (beside, fast) = (false, true);
    let rows = kit.finish(GroupedFp8 { out, a, b, a_inverse, b_inverse, offsets, beside, fast });
    let (mut kit, [d_out, inp], [d_out_inverse, inp_inverse], offsets) = kits();
    let (d_weight, accum) = (kit.grad([2, 16, 16]), Accum::Write);
    let op = GroupedFp8BwdWeight { d_weight, d_out, inp, d_out_inverse, inp_inverse, offsets, accum };
    [rows, kit.finish(op)]
}

/// The kernels of adapters: those of rows, and that of weights.
fn grouped_lora(p: Precision, ends: [i32; 3]) -> [Case; 3] {
    let kits = || {
        let mut kit = Kit::with_precision(p, format!("offsets {ends:?} of 5 rows"));
        let offsets = kit.i32s([3], &ends);
        (kit, offsets)
    };
    let parts = LoraParts::new(&[0..2, 2..3]).unwrap_or_default();
    let (mut kit, offsets) = kits();
    let (out, hidden, b) = (kit.slot([5, 3]), kit.slot([5, 4]), kit.param([2, 3, 2]));
    let fwd = kit.finish(GroupedLoraFwd { out, hidden, b, offsets, parts, scale: 1.0 });
    let (mut kit, offsets) = kits();
    let (d_b, d_out, hidden) = (kit.grad([2, 3, 2]), kit.slot([5, 3]), kit.slot([5, 4]));
    let accum = Accum::Write;
    let weight = kit.finish(GroupedLoraBwdWeight { d_b, d_out, hidden, offsets, parts, scale: 1.0, accum });
    let (mut kit, offsets) = kits();
    let (d_inp, d_hidden, a) = (kit.slot([5, 3]), kit.slot([5, 4]), kit.param([2, 4, 3]));
    [fwd, weight, kit.finish(GroupedLoraBwdInput { d_inp, d_hidden, a, offsets })]
}
