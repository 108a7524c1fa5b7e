//! Attention in bf16 on a real GPU, with cuDNN and with our own kernels for Hopper: `cargo test -p ironhorse-cuda --test attention_cudnn -- --ignored --nocapture`

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]

use ironhorse_core::op::{AttentionBwd, AttentionFwd, AttentionMask};
use ironhorse_core::{
    Builder, DType, Engine, EngineExt, Program, Scalars, Section, Slot, bf16_to_f32, f32_to_bf16,
};
use ironhorse_cuda::{Attention, CudaEngine, Settings};

#[derive(Clone, Copy)]
struct Size {
    b: usize,
    t: usize,
    heads: usize,
    kv_heads: usize,
    hd: usize,
}

impl Size {
    /// Elements of a token's queries, keys and values.
    fn packed(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.hd
    }
}

struct Bench {
    size: Size,
    engine: CudaEngine,
    program: Program,
    slots: [Slot; 5],
}

/// The results of one run.
#[derive(PartialEq)]
struct Results {
    out: Vec<f32>,
    lse: Vec<f32>,
    d_qkv: Vec<f32>,
}

impl Bench {
    fn new(size: Size, attention: Attention, fast: bool) -> Self {
        let Size { b, t, heads, kv_heads, hd } = size;
        let (c, packed) = (heads * hd, size.packed());
        let mut builder = Builder::new();
        let qkv = builder.io("qkv", [b, t, packed], DType::BF16);
        let d_out = builder.io("d_out", [b, t, c], DType::BF16);
        let out = builder.io("out", [b, t, c], DType::BF16);
        let lse = builder.io("lse", [b, heads, t], DType::F32);
        let d_qkv = builder.io("d_qkv", [b, t, packed], DType::BF16);
        builder.push(AttentionFwd { out, lse, qkv, heads, kv_heads, mask: AttentionMask::CAUSAL }).unwrap();
        builder.section(Section::Backward);
        builder
            .push(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask: AttentionMask::CAUSAL })
            .unwrap();
        let program = builder.finish().unwrap();
        let settings = Settings { fast, attention, ..Settings::default() };
        let mut engine = CudaEngine::new(settings).unwrap();
        engine.reserve(program.layout()).unwrap();
        Self { size, engine, program, slots: [qkv, d_out, out, lse, d_qkv] }
    }

    fn run(&mut self, qkv: &[f32], d_out: &[f32]) -> Results {
        self.engine.write_f32(self.slots[0], qkv).unwrap();
        self.engine.write_f32(self.slots[1], d_out).unwrap();
        let ops = 0..self.program.nodes().len();
        self.engine.run(&self.program, ops, &Scalars::default()).unwrap();
        let [out, lse, d_qkv] = [2, 3, 4].map(|i| {
            let mut data = vec![f32::NAN; self.slots[i].numel()];
            self.engine.read_f32(self.slots[i], &mut data).unwrap();
            data
        });
        Results { out, lse, d_qkv }
    }

    /// Whether the program launches this kernel.
    fn launches(&mut self, kernel: &str) -> bool {
        let mut record = Vec::new();
        let ops = 0..self.program.nodes().len();
        self.engine.profile(&self.program, ops, &[], &Scalars::default(), &mut record).unwrap();
        record.iter().any(|timed| timed.name.contains(kernel))
    }
}

/// Deterministic numbers between -1 and 1 that are exact in bf16.
fn numbers(count: usize, mut seed: u64) -> Vec<f32> {
    let next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let uniform = (seed >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
        bf16_to_f32(f32_to_bf16(uniform))
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// The reference in f64, from the rounded inputs. `out` is not rounded before the backward.
fn reference(size: Size, qkv: &[f32], d_out: &[f32]) -> Results {
    let Size { b, t, heads, kv_heads, hd } = size;
    let (c, packed) = (heads * hd, size.packed());
    let scale = 1.0 / (hd as f64).sqrt();
    let mut results = Results {
        out: vec![0.0; b * t * c],
        lse: vec![0.0; b * heads * t],
        d_qkv: vec![0.0; b * t * packed],
    };
    let mut sums = vec![0.0_f64; b * t * packed];
    for (batch, head) in (0..b).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        let kv = heads + head / (heads / kv_heads);
        let at = |row: usize, part: usize| (batch * t + row) * packed + [head, kv, kv + kv_heads][part] * hd;
        let dot = |x: &[f32], y: &[f32]| -> f64 {
            x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
        };
        for i in 0..t {
            let (q, o) = (at(i, 0), (batch * t + i) * c + head * hd);
            let s: Vec<f64> =
                (0..=i).map(|j| scale * dot(&qkv[q..q + hd], &qkv[at(j, 1)..at(j, 1) + hd])).collect();
            let max = s.iter().copied().fold(f64::MIN, f64::max);
            let lse = max + s.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
            results.lse[(batch * heads + head) * t + i] = lse as f32;
            let p: Vec<f64> = s.iter().map(|s| (s - lse).exp()).collect();
            let d_o = &d_out[o..o + hd];
            let d_p: Vec<f64> = (0..=i).map(|j| dot(d_o, &qkv[at(j, 2)..at(j, 2) + hd])).collect();
            let row_sum: f64 = p.iter().zip(&d_p).map(|(p, d_p)| p * d_p).sum();
            for d in 0..hd {
                let value = |j: usize| f64::from(qkv[at(j, 2) + d]);
                results.out[o + d] = (0..=i).map(|j| p[j] * value(j)).sum::<f64>() as f32;
            }
            for j in 0..=i {
                let d_s = p[j] * (d_p[j] - row_sum) * scale;
                for d in 0..hd {
                    sums[q + d] += d_s * f64::from(qkv[at(j, 1) + d]);
                    sums[at(j, 1) + d] += d_s * f64::from(qkv[q + d]);
                    sums[at(j, 2) + d] += p[j] * f64::from(d_o[d]);
                }
            }
        }
    }
    results.d_qkv = sums.into_iter().map(|sum| sum as f32).collect();
    results
}

fn close(name: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let pairs = got.iter().zip(expected).enumerate();
    let (at, worst) = pairs
        .map(|(i, (x, y))| (i, (x - y).abs()))
        .fold((0, 0.0), |most, this| if this.1 > most.1 || this.1.is_nan() { this } else { most });
    println!(
        "{name}: largest difference {worst} at {at} ({} for {}), values up to {largest}",
        got[at], expected[at]
    );
    assert!(worst <= tolerance * largest.max(1.0), "{name}");
}

fn values(fast: bool, heads: usize, kv_heads: usize) {
    let size = Size { b: 2, t: 256, heads, kv_heads, hd: 64 };
    let tokens = size.b * size.t;
    let (qkv, d_out) = (numbers(tokens * size.packed(), 1), numbers(tokens * size.heads * size.hd, 2));
    let mut bench = Bench::new(size, Attention::Cudnn, fast);
    let first = bench.run(&qkv, &d_out);
    let expected = reference(bench.size, &qkv, &d_out);
    close("out", &first.out, &expected.out, 1e-2);
    close("lse", &first.lse, &expected.lse, 1e-4);
    close("d_qkv", &first.d_qkv, &expected.d_qkv, 2e-2);
    // The second run is recorded as a CUDA graph, the third replays it.
    for _ in 0..2 {
        let again = bench.run(&qkv, &d_out);
        close("d_qkv again", &again.d_qkv, &expected.d_qkv, 2e-2);
        assert!(again.out == first.out && again.lse == first.lse, "the forward repeats its bits");
        assert!(fast || again.d_qkv == first.d_qkv, "the backward repeats its bits");
    }
}

#[test]
#[ignore = "needs a GPU and cuDNN"]
fn repeatable_attention_is_what_the_definition_says() {
    values(false, 3, 3);
}

#[test]
#[ignore = "needs a GPU and cuDNN"]
fn fast_attention_is_what_the_definition_says() {
    values(true, 3, 3);
}

#[test]
#[ignore = "needs a GPU and cuDNN"]
fn grouped_attention_is_what_the_definition_says() {
    for fast in [false, true] {
        values(fast, 6, 2);
        values(fast, 4, 1);
    }
}

/// 25 sequences do not fit the backward's scratch memory at once. All are equal, so their results must be.
#[test]
#[ignore = "needs a GPU and cuDNN"]
fn every_part_of_a_batch_is_worked_off() {
    let size = Size { b: 25, t: 1024, heads: 12, kv_heads: 12, hd: 64 };
    let width = size.t * size.heads * size.hd;
    let (qkv, d_out) = (numbers(3 * width, 3).repeat(size.b), numbers(width, 4).repeat(size.b));
    for attention in [Attention::Cudnn, Attention::Auto] {
        let results = Bench::new(size, attention, false).run(&qkv, &d_out);
        for all in [&results.out, &results.lse, &results.d_qkv] {
            let (first, rest) = all.split_at(all.len() / size.b);
            assert!(first.iter().all(|x| x.is_finite()) && first.iter().any(|&x| x != 0.0));
            assert!(rest.chunks_exact(first.len()).all(|item| item == first), "{attention:?}");
        }
    }
}

/// The backward for Hopper (attention/flash_bwd_wgmma.cu): one tile, several, heads that share keys, and more heads than an H200 has
/// multiprocessors, so that blocks take a second one. No two sequences are equal: the first, the last and one between them,
/// of a block's second head where there are so many, are compared with the definition.
#[test]
#[ignore = "needs a Hopper GPU"]
fn the_backward_for_hopper_is_what_the_definition_says() {
    let sizes = [
        (89, 128, 3, 3),
        (140, 256, 1, 1),
        (70, 384, 4, 2),
        (44, 128, 3, 3),
        (50, 256, 2, 2),
        (35, 384, 6, 3),
        (70, 640, 4, 1),
        (20, 256, 12, 1),
        (9, 128, 16, 2),
    ];
    for (b, t, heads, kv_heads) in sizes {
        let one = Size { b: 1, t, heads, kv_heads, hd: 64 };
        let (each, each_out) = (t * one.packed(), t * heads * one.hd);
        let (qkv, d_out) = (numbers(b * each, 5), numbers(b * each_out, 6));
        let mut bench = Bench::new(Size { b, ..one }, Attention::Auto, false);
        let first = bench.run(&qkv, &d_out);
        for sequence in [0, b * 3 / 4, b - 1] {
            let (at, at_out) = (sequence * each, sequence * each_out);
            let expected = reference(one, &qkv[at..at + each], &d_out[at_out..at_out + each_out]);
            let got = &first.d_qkv[at..at + each];
            let name = format!("T{t} NH{heads} NKV{kv_heads}: d_qkv of sequence {sequence} of {b}");
            close(&name, got, &expected.d_qkv, 2e-2);
            let of_first_query = &got[..heads * one.hd];
            assert!(of_first_query.iter().all(|&x| x == 0.0), "{name}: the first query sees one key");
        }
        assert!(bench.launches("flash_bwd_wgmma"), "T{t} NH{heads} NKV{kv_heads}");
        for _ in 0..3 {
            assert!(bench.run(&qkv, &d_out) == first, "the same bits every time");
        }
    }
}

/// Few heads are divided among blocks by other kernels, and who asks for cuDNN gets it.
#[test]
#[ignore = "needs a Hopper GPU and cuDNN"]
fn the_backward_for_hopper_leaves_what_others_do_faster() {
    let many = Size { b: 70, t: 128, heads: 1, kv_heads: 1, hd: 64 };
    assert!(Bench::new(many, Attention::Own, false).launches("flash_bwd_wgmma"));
    assert!(!Bench::new(many, Attention::Cudnn, false).launches("flash_bwd_wgmma"));
    for size in [Size { b: 2, ..many }, Size { t: 130, ..many }, Size { hd: 128, ..many }] {
        assert!(!Bench::new(size, Attention::Auto, false).launches("flash_bwd_wgmma"));
    }
}
