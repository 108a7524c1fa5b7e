//! Attention and its gradients by size of a head, in GFLOP/s of the scores that queries reach.
//!
//!     cargo bench -p ironhorse-cpu --bench attention -- [threads] [bf16]
//!     ONLY="heads of 32" cargo bench -p ironhorse-cpu --bench attention    sizes whose names have these words

mod frame;

use ironhorse_core::op::*;

/// Sequences, tokens, heads of queries, heads of keys, elements of a head.
type Size = [usize; 5];

const SIZES: [(&str, Size); 7] = [
    ("moe-tiny, 512 tokens", [1, 512, 4, 1, 16]),
    ("moe-tiny, 128 tokens", [1, 128, 4, 1, 16]),
    ("heads of 32", [1, 512, 2, 2, 32]),
    ("heads of 64", [1, 512, 1, 1, 64]),
    ("heads of 64, d12", [1, 1024, 2, 2, 64]),
    ("heads of 128", [1, 512, 1, 1, 128]),
    ("heads of 24", [1, 500, 2, 2, 24]),
];

fn program([b, t, heads, kv_heads, hd]: Size) -> frame::Timed {
    let mut ops = frame::Ops::default();
    let [qkv, d_qkv] = ops.f32s([b, t, (heads + 2 * kv_heads) * hd]);
    let [out, d_out] = ops.f32s([b, t, heads * hd]);
    let [lse] = ops.f32s([b, heads, t]);
    let mask = AttentionMask::default();
    ops.push(AttentionFwd { out, lse, qkv, heads, kv_heads, mask });
    ops.push(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask });
    ops.finish(vec![qkv, d_out])
}

fn main() {
    frame::run(&SIZES, program, (0.7, 3000));
}
