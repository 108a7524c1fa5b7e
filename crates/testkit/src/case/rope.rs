//! Cases of the rotary position embedding.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Rope, RopeScaling};

/// (B, T, HD, NH, NKV)
const SHAPES: [[usize; 5]; 11] = [
    [1, 1, 2, 1, 1],
    [2, 5, 2, 3, 3],
    [2, 31, 6, 4, 1],
    [1, 33, 10, 6, 2],
    [3, 37, 16, 4, 1],
    [1, 65, 62, 2, 1],
    [2, 130, 64, 12, 1],
    [1, 64, 64, 6, 3],
    [1, 33, 128, 4, 4],
    [0, 7, 16, 4, 1],
    [2, 0, 16, 4, 1],
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for back in [false, true] {
            cases.push(rope(p, shape, back, 1.0, None));
            cases.push(rope(p, shape, back, 8.0, None));
        }
    }
    for (shape, position) in
        [([3, 1, 16, 4, 1], 0), ([3, 1, 16, 4, 1], 299), ([1, 7, 64, 12, 1], 200), ([2, 1, 64, 6, 3], 32_767)]
    {
        cases.push(rope(p, shape, false, 8.0, Some(position)));
    }
    cases.push(rope(p, [1, 7, 64, 12, 1], true, 1.0, Some(100)));
    // of these 32 pairs some keep their speed, some are between, some are slowed down
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64 };
    for scaling in [RopeScaling::Linear { factor: 2.5 }, llama3] {
        cases.push(made(p, [2, 33, 64, 4, 2], (false, None), 1.0, scaling));
        cases.push(made(p, [1, 7, 10, 3, 1], (true, Some(500)), 1.0, scaling));
    }
    for (shape, longest) in
        [([2, 31, 6, 4, 1], 9), ([1, 65, 64, 6, 3], 1), ([2, 130, 64, 12, 1], 70), ([0, 7, 16, 4, 1], 3)]
    {
        cases.extend([false, true].map(|back| packed(p, shape, back, longest)));
    }
    for shape in [[1, 1, 2, 1, 1], [5, 1, 16, 4, 1], [5, 1, 64, 6, 3], [3, 2, 62, 2, 1], [0, 1, 16, 4, 1]] {
        cases.push(placed(p, shape));
    }
    cases
}

/// A case of documents of up to `longest` tokens.
fn packed(p: Precision, [b, t, hd, heads, kv_heads]: [usize; 5], back: bool, longest: usize) -> Case {
    let name = format!("B{b} T{t} HD{hd} NH{heads} NKV{kv_heads} documents to {longest} back {back}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.position = u32::MAX;
    let positions = Some(kit.documents([b, t], longest));
    let qkv = kit.slot([b, t, (heads + 2 * kv_heads) * hd]);
    let (base, alpha, scaling, at_position) = (10_000.0, 1.0, RopeScaling::None, false);
    kit.finish(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context: t })
}

/// A case of tokens that continue sequences in a cache, each at its own position; a token at -1 is not used.
fn placed(p: Precision, [b, t, hd, heads, kv_heads]: [usize; 5]) -> Case {
    let mut kit =
        Kit::with_precision(p, format!("B{b} T{t} HD{hd} NH{heads} NKV{kv_heads} at their positions"));
    kit.scalars.position = u32::MAX; // must not be used
    let places: Vec<i32> = [700, 0, -1, 31, 32, 699].into_iter().take(b * t).collect();
    let positions = Some(kit.i32s([b, t], &places));
    let qkv = kit.slot([b, t, (heads + 2 * kv_heads) * hd]);
    let (base, alpha, scaling, back) = (10_000.0, 1.0, RopeScaling::None, false);
    let (at_position, context) = (true, 701);
    kit.finish(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context })
}

fn rope(p: Precision, shape: [usize; 5], back: bool, alpha: f32, at: Option<u32>) -> Case {
    made(p, shape, (back, at), alpha, RopeScaling::None)
}

fn made(
    p: Precision,
    [b, t, hd, heads, kv_heads]: [usize; 5],
    (back, at): (bool, Option<u32>),
    alpha: f32,
    scaling: RopeScaling,
) -> Case {
    let kind = match scaling {
        RopeScaling::None => String::new(),
        other => format!(" {other:?}"),
    };
    let place = at.map_or(String::new(), |position| format!(" at position {position}"));
    let name = format!("B{b} T{t} HD{hd} NH{heads} NKV{kv_heads} alpha {alpha} back {back}{place}{kind}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.position = at.unwrap_or(u32::MAX); // must not be used if `at_position` is false
    let op = Rope {
        qkv: kit.slot([b, t, (heads + 2 * kv_heads) * hd]),
        heads,
        kv_heads,
        base: 10_000.0,
        alpha,
        scaling,
        back,
        at_position: at.is_some(),
        positions: None,
        context: at.map_or(t.max(1), |position| position as usize + t),
    };
    kit.finish(op)
}
