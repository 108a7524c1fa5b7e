//! The ops of a mixture of experts: products in GFLOP/s beside one dense product of the same work, the others in GB/s
//! beside a copy.
//!
//!     cargo bench -p ironhorse-cpu --bench experts -- [threads]
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_core::op::*;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cpu::CpuEngine;
use std::time::Instant;

/// Tokens, width, width of an expert, experts, chosen.
type Size = [usize; 5];

const SIZES: [(&str, Size); 4] = [
    ("moe-tiny, 2×32 tokens", [64, 64, 256, 4, 2]),
    ("moe-tiny, 8×512 tokens", [4096, 64, 256, 4, 2]),
    ("768 wide, 16 experts", [1024, 768, 1536, 16, 4]),
    ("768 wide, 64 experts", [1024, 768, 384, 64, 4]),
];

fn program([n, c, f, e, k]: Size) -> (Program, Vec<Slot>) {
    let mut b = Builder::new();
    let (mut count, r) = (0, n * k);
    let mut io = |b: &mut Builder, shape: [usize; 3], dtype| {
        count += 1;
        b.io(format!("{count}"), shape, dtype)
    };
    let mut f32s = |b: &mut Builder, shape: [usize; 3]| io(b, shape, DType::F32);
    let [x, y, d_y] = [(); 3].map(|()| f32s(&mut b, [1, n, c]));
    let norm = f32s(&mut b, [1, 1, c]).view([c]);
    let rstd = f32s(&mut b, [1, 1, n]);
    let [logits, probs] = [(); 2].map(|()| f32s(&mut b, [1, n, e]));
    let [weights, d_weights] = [(); 2].map(|()| f32s(&mut b, [1, n, k]));
    let (load, aux) = (f32s(&mut b, [1, 1, e]), f32s(&mut b, [1, 1, 1]));
    let [rows, d_rows] = [(); 2].map(|()| f32s(&mut b, [1, r, c]));
    let [h, d_h] = [(); 2].map(|()| f32s(&mut b, [1, r, 2 * f]));
    let a = f32s(&mut b, [1, r, f]);
    let [w13, d_w13] = [(); 2].map(|()| f32s(&mut b, [e, 2 * f, c]));
    let [experts, places] = [(); 2].map(|()| io(&mut b, [1, n, k], DType::I32));
    let (order, offsets) = (io(&mut b, [1, 1, r], DType::I32), io(&mut b, [1, 1, e + 1], DType::I32));
    let (accum, eps) = (Accum::Write, 1e-5);
    let dense = Slot { shape: [2 * f, c].into(), ..w13 };
    let d_dense = Slot { shape: [2 * f, c].into(), ..d_w13 };
    let ops: Vec<Op> = vec![
        RouterFwd { probs, weights, experts, logits }.into(),
        RouteSort { order, places, offsets, experts }.into(),
        RouterLoad { load, aux, entropy: None, probs, offsets, alpha: 0.01, accum }.into(),
        RouterBwd { d_logits: logits, d_weights, probs, weights, experts, load, alpha: 0.01 }.into(),
        CopySlot { out: d_rows, inp: rows }.into(),
        RmsNormFwd { out: y, rstd, inp: x, weight: norm, eps, gain: Gain::Weight }.into(),
        Permute { out: rows, inp: x, order }.into(),
        PermuteBwd { d_inp: d_y, d_out: rows, places, accum }.into(),
        Combine { out: y, rows, places, weights }.into(),
        CombineBwd { d_rows, d_weights, d_out: y, rows, places, weights }.into(),
        SwigluFwd { out: a, inp: h, gate: Gate::Silu }.into(),
        SwigluBwd { d_inp: d_h, act: None, d_out: a, inp: h, gate: Gate::Silu }.into(),
        LinearFwd { out: h, pre: None, inp: rows, weight: dense, bias: None }.into(),
        GroupedLinearFwd { out: h, act: None, inp: rows, weight: w13, offsets }.into(),
        LinearBwdInput { d_inp: d_rows, d_out: h, weight: dense, pre: None }.into(),
        GroupedLinearBwdInput { d_inp: d_rows, d_out: h, weight: w13, offsets }.into(),
        LinearBwdWeight { d_weight: d_dense, d_bias: None, d_out: h, inp: rows, accum }.into(),
        GroupedLinearBwdWeight { d_weight: d_w13, d_out: h, inp: rows, offsets, accum }.into(),
    ];
    ops.into_iter().for_each(|op| b.push(op).unwrap());
    (b.finish().unwrap(), vec![x, norm, logits, h, w13, d_weights])
}

fn main() {
    let threads = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    for (name, size) in SIZES {
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
            while runs < 5 || (begun.elapsed().as_secs_f64() < 0.5 && runs < 500) {
                let start = Instant::now();
                engine.run(&program, i..i + 1, &Scalars::default()).unwrap();
                best = best.min(start.elapsed().as_secs_f64());
                runs += 1;
            }
            let (flops, bytes) = (node.op.flops() as f64 / best * 1e-9, node.op.bytes() as f64 / best * 1e-9);
            println!(
                "  {:<28}{:>10.1} us {flops:>8.1} GFLOP/s {bytes:>8.1} GB/s",
                node.op.name(),
                best * 1e6
            );
        }
    }
}
