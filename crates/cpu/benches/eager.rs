//! Microseconds of the eager ops on about 10^6 elements: the best of many calls.
//!
//!     cargo bench -p ironhorse-cpu --bench eager -- [threads=1] [rounds=40] [only=softmax,gelu]
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_core::eager::*;
use ironhorse_cpu::eager::{Run, set_threads};
use std::time::Instant;

const N: usize = 1 << 20;
const ROWS: usize = 1024;
const ALL: Rows = Rows { rows: ROWS, cols: N / ROWS };
const ONE: Rows = Rows { rows: 1, cols: N };

/// What was asked for on the command line.
struct Bench {
    rounds: usize,
    only: Vec<String>,
}

impl Bench {
    fn time(&self, name: &str, op: &impl Run) {
        if !self.only.is_empty() && !self.only.iter().any(|word| name.contains(word)) {
            return;
        }
        let mut best = f64::INFINITY;
        for _ in 0..self.rounds {
            let start = Instant::now();
            // SAFETY: the arrays of `main` have the lengths the ops ask for, and overlap nowhere.
            unsafe { op.run() }.unwrap();
            best = best.min(start.elapsed().as_secs_f64() * 1e6);
        }
        println!("{name:<24}{best:>10.1} us");
    }
}

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Arrays of the same length in one type.
struct Arrays([Vec<u64>; 5], Float);

impl Arrays {
    fn new(float: Float) -> Self {
        let mut made = [(); 5].map(|()| vec![0_u64; N * float.size() / 8]);
        for (seed, words) in made.iter_mut().enumerate() {
            let x = random(N, seed as u32);
            let bytes = words.as_mut_ptr().cast::<u8>();
            for (i, &x) in x.iter().enumerate() {
                // SAFETY: element i of N, unaligned writes.
                unsafe {
                    let at = bytes.add(i * float.size());
                    match float {
                        Float::F64 => at.cast::<f64>().write_unaligned(x.into()),
                        Float::F32 => at.cast::<f32>().write_unaligned(x),
                        Float::BF16 => at.cast::<u16>().write_unaligned((x.to_bits() >> 16) as u16),
                        // Halves between 1 and 2.
                        Float::F16 => {
                            at.cast::<u16>().write_unaligned(0x3c00 | (x.to_bits() >> 13 & 0x3ff) as u16)
                        }
                    }
                }
            }
        }
        Self(made, float)
    }

    fn get(&mut self) -> [Array; 5] {
        self.0.each_mut().map(|x| Array { at: x.as_mut_ptr().cast(), float: self.1 })
    }
}

fn number(words: &[String], key: &str, default: usize) -> usize {
    words.iter().find_map(|word| word.strip_prefix(key)?.parse().ok()).unwrap_or(default)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    set_threads(number(&words, "threads=", 1));
    let only = words.iter().find_map(|word| word.strip_prefix("only="));
    let only = only.map(|names| names.split(',').map(str::to_owned).collect()).unwrap_or_default();
    let bench = Bench { rounds: number(&words, "rounds=", 40), only };
    for (float, name) in
        [(Float::F32, "f32"), (Float::BF16, "bf16"), (Float::F16, "f16"), (Float::F64, "f64")]
    {
        every_type(&bench, float, name);
    }
    single_precision(&bench);
    optimizer(&bench);
}

fn every_type(bench: &Bench, float: Float, name: &str) {
    let (mut memory, mut sums) = (Arrays::new(float), Arrays::new(float.acc()));
    let [x, w, y, d, z] = memory.get();
    let [rstd, mean, lse, ..] = sums.get();
    let none = Array::none(float);
    let (n, rows, eps) = (N, ALL, 1e-5);
    for (op, function) in [
        ("silu", UnaryFn::Silu),
        ("gelu", UnaryFn::Act(Act::Gelu)),
        ("gelu_erf", UnaryFn::GeluErf),
        ("scale", UnaryFn::Scale(2.0)),
    ] {
        bench.time(&format!("{op} {name}"), &Unary { op: function, x, y, n });
        bench.time(&format!("{op}_bwd {name}"), &UnaryBwd { op: function, d_y: d, x, d_x: y, n });
    }
    for (op, function) in [("add", BinaryFn::Add), ("mul", BinaryFn::Mul), ("swiglu", BinaryFn::Swiglu)] {
        bench.time(&format!("{op} {name}"), &Binary { op: function, a: x, b: w, y, n });
    }
    bench.time(&format!("swiglu_bwd {name}"), &SwigluBwd { d_y: d, gate: x, up: w, d_gate: y, d_up: z, n });
    bench.time(&format!("softmax {name}"), &Softmax { x, y, rows });
    bench.time(&format!("softmax 1 row {name}"), &Softmax { x, y, rows: ONE });
    bench.time(&format!("softmax_bwd {name}"), &SoftmaxBwd { d_y: d, y: w, d_x: z, rows });
    bench.time(&format!("rmsnorm {name}"), &RmsNorm { x, weight: w, y, rstd, rows, eps });
    let rms = RmsNormBwd { d_y: d, x, weight: w, rstd, d_x: y, d_weight: z, rows };
    bench.time(&format!("rmsnorm_bwd {name}"), &rms);
    bench.time(&format!("layernorm {name}"), &LayerNorm { x, weight: w, bias: d, y, mean, rstd, rows, eps });
    let layer = LayerNormBwd { d_y: d, x, weight: w, mean, rstd, d_x: y, d_weight: z, d_bias: none, rows };
    bench.time(&format!("layernorm_bwd {name}"), &layer);
    let targets = vec![5_i32; ROWS];
    let targets = Targets::I32(targets.as_ptr());
    let loss = CrossEntropy { logits: x, targets, losses: mean, lse, rows, ignore: -100 };
    bench.time(&format!("cross_entropy {name}"), &loss);
    let (pairs, head_dim) = (Pairs::Halves, 64);
    let shape = RopeShape { batch: 1, seq: ROWS, heads: 16, head_dim, pairs };
    bench.time(&format!("rope {name}"), &Rope { x, cos: mean, sin: rstd, y, shape, back: false });
    let strides = Strides::position_major(16, ROWS, head_dim);
    let shape = AttentionShape {
        batch: 1,
        heads: 16,
        kv_heads: 16,
        q_len: ROWS,
        kv_len: ROWS,
        head_dim,
        scale: 0.125,
        causal: true,
        q: strides,
        k: strides,
        v: strides,
        out: strides,
    };
    if float != Float::F64 {
        bench.time(&format!("attention {name}"), &Attention { q: x, k: w, v: d, out: y, lse, shape });
        let [_, _, _, _, d_v] = sums.get();
        let d_v = if float == Float::F32 { d_v } else { none };
        let (d_q, d_k) = (z, none);
        let bwd =
            AttentionBwd { d_out: d, q: x, k: w, v: d, out: y, lse, d_q, d_k, d_v, shape, any_order: false };
        bench.time(&format!("attention_bwd {name}"), &bwd);
    }
}

fn single_precision(bench: &Bench) {
    let mut memory = Arrays::new(Float::F32);
    let [x, w, y, z, small] = memory.get();
    let (rows, eps) = (ALL, 1e-5);
    let (mut out, seeds) = (vec![0_i32; 8 * ROWS], (0..ROWS as u64).collect::<Vec<_>>());
    let (targets, indices) = (vec![5_i32; ROWS], out.as_mut_ptr());
    let targets = targets.as_ptr();
    bench.time("rmsnorm_residual", &ResidualRmsNorm { x, residual: w, weight: small, y, sum: z, rows, eps });
    bench.time("softmax_topk 8", &SoftmaxTopk { x, weights: y, indices, rows, k: 8 });
    bench.time("log_probs", &LogProbs { logits: x, targets, loss: small, log_probs: y, rows });
    bench.time("log_probs_bwd", &LogProbsBwd { log_probs: x, targets, d_logits: y, rows, scale: 1.0 });
    bench.time("argmax", &Argmax { logits: x, out: indices, rows });
    bench.time("argmax 1 row", &Argmax { logits: x, out: indices, rows: ONE });
    let all = Sample {
        logits: x,
        seeds: seeds.as_ptr(),
        out: indices,
        rows: ONE,
        temperature: 1.0,
        top_k: None,
        top_p: None,
    };
    bench.time("sample 1 row", &all);
    bench.time("sample top_k 1 row", &Sample { top_k: Some(50), ..all });
    bench.time("sample top_p 1 row", &Sample { top_p: Some(0.9), ..all });
    bench.time("sample top_p", &Sample { top_p: Some(0.9), rows, ..all });
    let shape = RopeShape { batch: 1, seq: ROWS, heads: 16, head_dim: 64, pairs: Pairs::Interleaved };
    let angles = small.at.cast::<f32>();
    bench.time("rope_freqs", &RopeFreqs { freqs: angles, positions: ROWS, head_dim: 64, base: 1e4 });
    bench.time("rope_angles", &RopeAngles { x, angles, y, offset: 0, shape });
    let shape = RopeShape { pairs: Pairs::Halves, ..shape };
    bench.time("rope_angles halves", &RopeAngles { x, angles, y, offset: 0, shape });
    let shape = GemmShape {
        batch: 1,
        m: ROWS,
        n: ROWS,
        k: ROWS,
        alpha: 1.0,
        beta: 0.0,
        transpose_a: false,
        transpose_b: false,
    };
    bench.time("gemm 1024^3", &Gemm { a: x, b: w, c: y, shape });
    let shape = GemmShape { batch: 256, m: 64, n: 64, k: 64, ..shape };
    bench.time("gemm 256 of 64^3", &Gemm { a: x, b: w, c: y, shape });
}

fn optimizer(bench: &Bench) {
    let mut memory = Arrays::new(Float::F32);
    let [param, grad, m, v, norm] = memory.get().map(|x| x.at.cast::<f32>());
    let (n, step) = (N, 3);
    let (lr, beta1, beta2, eps, weight_decay) = (1e-4, 0.9, 0.95, 1e-8, 0.1);
    bench.time("adamw", &AdamWStep { param, grad, m, v, n, lr, beta1, beta2, eps, weight_decay, step });
    bench.time("grad_clip", &GradClip { grad, total_norm: norm, clip: 1e9, n });
    let indices: Vec<i32> = (0..ROWS as i32).map(|i| i * 7 % 512).collect();
    let scatter = ScatterAdd {
        rows: param,
        indices: indices.as_ptr(),
        table: m,
        n: ROWS,
        width: ROWS,
        table_rows: None,
    };
    bench.time("scatter_add", &scatter);
}
