//! Attention and its gradients by size of a head: the best of many runs, in GFLOP/s of the scores that queries reach.
//!
//!     cargo bench -p ironhorse-cpu --bench attention -- [threads]
//!     ONLY="heads of 32" cargo bench -p ironhorse-cpu --bench attention    sizes whose names have these words
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_core::op::*;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cpu::CpuEngine;
use std::time::Instant;

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

fn program([b, t, heads, kv_heads, hd]: Size) -> (Program, Vec<Slot>) {
    let mut p = Builder::new();
    let mut count = 0;
    let mut io = |p: &mut Builder, shape: [usize; 3]| {
        count += 1;
        p.io(format!("{count}"), shape, DType::F32)
    };
    let [qkv, d_qkv] = [(); 2].map(|()| io(&mut p, [b, t, (heads + 2 * kv_heads) * hd]));
    let [out, d_out] = [(); 2].map(|()| io(&mut p, [b, t, heads * hd]));
    let lse = io(&mut p, [b, heads, t]);
    let mask = AttentionMask::default();
    p.push(AttentionFwd { out, lse, qkv, heads, kv_heads, mask }).unwrap();
    p.push(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask }).unwrap();
    (p.finish().unwrap(), vec![qkv, d_out])
}

fn main() {
    let threads = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    let only = std::env::var("ONLY").ok();
    for (name, size) in SIZES.into_iter().filter(|(name, _)| only.as_ref().is_none_or(|o| name.contains(o))) {
        let (program, given) = program(size);
        let mut engine = CpuEngine::new(threads);
        engine.reserve(program.layout()).unwrap();
        for slot in given {
            let value = |i: usize| ((i * 7919 + i / 977) % 1000) as f32 / 500.0 - 1.0;
            engine.write_f32(slot, &(0..slot.numel()).map(value).collect::<Vec<_>>()).unwrap();
        }
        println!("{name}: {size:?}, {} threads", engine.threads());
        for (i, node) in program.nodes().iter().enumerate() {
            let mut best = f64::INFINITY;
            let begun = Instant::now();
            let mut runs = 0;
            while runs < 5 || (begun.elapsed().as_secs_f64() < 0.7 && runs < 3000) {
                let start = Instant::now();
                engine.run(&program, i..i + 1, &Scalars::default()).unwrap();
                best = best.min(start.elapsed().as_secs_f64());
                runs += 1;
            }
            let flops = node.op.flops() as f64 / best * 1e-9;
            println!("  {:<18}{:>10.1} us {flops:>8.1} GFLOP/s", node.op.name(), best * 1e6);
        }
    }
}
