//! GFLOP/s of the matrix products of one GPT-2 124M training step (B = 4, T = 64), and the time they take in all.
//!
//!     cargo bench -p ironhorse-cpu --bench gemm -- [threads=1,2] [rounds=7] [isa=avx512] [only=qkv,fc] [operands=bf16]
//!         [rows=1,16,64] [order=kept|packed|dots]
//!
//! Each round runs every product once, so operands are as cold as they are in a real step; the median is printed. With `rows` it is the
//! forward products of serving so many tokens instead, over weights of twelve layers, which no cache holds: weights packed once (with
//! `operands=bf16` in bf16, where the machine multiplies it), packed for each product, or by dot products.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_core::Operands;
use ironhorse_cpu::buffer::Buffer;
use ironhorse_cpu::gemm::{Arrangement, Beta, Gemm, Kept, MatMut, MatRef, Workspace, gemm};
use ironhorse_cpu::isa::Isa;
use ironhorse_cpu::team::Team;
use std::time::Instant;

const N: usize = 256;

/// (name, input channels, output channels, how many in a model of 12 layers)
const LAYERS: [(&str, usize, usize, usize); 5] = [
    ("qkv", 768, 2304, 12),
    ("proj", 768, 768, 12),
    ("fc", 768, 3072, 12),
    ("fc2", 3072, 768, 12),
    ("head", 768, 50304, 1),
];

struct Layer {
    c: usize,
    oc: usize,
    inp: Buffer,
    weight: Buffer,
    out: Buffer,
    d_inp: Buffer,
    d_weight: Buffer,
}

fn random(len: usize) -> Buffer {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut buffer = Buffer::zeroed(len);
    buffer.as_mut_slice().fill_with(&mut next);
    buffer
}

impl Layer {
    fn new(c: usize, oc: usize) -> Self {
        Self {
            c,
            oc,
            inp: random(N * c),
            weight: random(oc * c),
            out: random(N * oc),
            d_inp: Buffer::zeroed(N * c),
            d_weight: Buffer::zeroed(oc * c),
        }
    }

    /// Forward, input gradient, weight gradient.
    fn product(&mut self, kind: usize) -> Gemm<'static> {
        let (c, oc) = (self.c, self.oc);
        let inp = MatRef::row_major(self.inp.as_mut_ptr(), c);
        let weight = MatRef::row_major(self.weight.as_mut_ptr(), c);
        let out = MatRef::row_major(self.out.as_mut_ptr(), oc);
        match kind {
            0 => {
                Gemm::new((N, oc, c), inp, weight.transposed(), MatMut { ptr: self.out.as_mut_ptr(), rs: oc })
            }
            1 => Gemm::new((N, c, oc), out, weight, MatMut { ptr: self.d_inp.as_mut_ptr(), rs: c }),
            _ => Gemm::new(
                (oc, c, N),
                out.transposed(),
                inp,
                MatMut { ptr: self.d_weight.as_mut_ptr(), rs: c },
            )
            .beta(Beta::Accumulate),
        }
    }
}

/// The forward products of serving, by rows.
fn serving(
    rows: &[usize],
    rounds: usize,
    threads: usize,
    (isa, only, order, operands): (Isa, &str, &str, Operands),
) {
    let most = rows.iter().copied().max().unwrap_or(1);
    let chosen = LAYERS.iter().filter(|layer| only.is_empty() || only.split(',').any(|name| name == layer.0));
    let layers: Vec<_> = chosen
        .flat_map(|&(_, c, oc, count)| (0..count).map(move |_| (c, oc)))
        .map(|(c, oc)| (c, oc, random(most * c), random(oc * c), Buffer::zeroed(most * oc)))
        .collect();
    let weights: usize = layers.iter().map(|&(c, oc, ..)| c * oc).sum();
    let (team, mut ws) = (Team::new(threads), Workspace::new());
    println!(
        "{threads} threads, {}: {:.0} MB of weights, median (best) of {rounds}",
        isa.name(),
        weights as f64 * 4e-6
    );
    for (c, oc, _, weight, _) in layers.iter().filter(|_| order == "kept") {
        let size = [*oc, *c];
        // SAFETY: the weight has so many floats.
        unsafe {
            Kept::of(isa, operands, size).bring(
                Arrangement::Packed,
                &team,
                &mut ws,
                isa,
                (weight.start(), size),
            )
        }
        .unwrap();
    }
    println!("{:>5} {:>16} {:>8} {:>8}", "rows", "ms", "GB/s", "GFLOP/s");
    for &m in rows {
        let mut times: Vec<f64> = (0..=rounds)
            .map(|_| {
                let start = Instant::now();
                for (c, oc, inp, weight, out) in &layers {
                    let (inp, weight) =
                        (MatRef::row_major(inp.start(), *c), MatRef::row_major(weight.start(), *c));
                    let out = MatMut { ptr: out.start(), rs: *oc };
                    let g = Gemm::new((m, *oc, *c), inp, weight.transposed(), out);
                    let g = match order {
                        "kept" => g.kept(Kept::of(isa, operands, [*oc, *c])),
                        "packed" => g.rows_as_many(true),
                        _ => g.rows_apart(true),
                    };
                    // SAFETY: the matrices have these sizes, and `out` is written here only.
                    unsafe { gemm(&team, &mut ws, isa, &g) }.unwrap();
                }
                start.elapsed().as_secs_f64()
            })
            .skip(1)
            .collect();
        let middle = median(&mut times);
        let (bytes, flops) = (weights as f64 * 4.0, (2 * weights * m) as f64);
        let ms = format!("{:.2} ({:.2})", middle * 1e3, times[0] * 1e3);
        println!("{m:>5} {ms:>16} {:>8.1} {:>8.0}", bytes / middle / 1e9, flops / middle / 1e9);
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let mut threads = vec![1, 2];
    let mut rounds = 7;
    let mut isa = Isa::detect();
    let mut only = String::new();
    let mut operands = Operands::F32;
    let mut rows = Vec::new();
    let mut order = "kept".to_owned();
    for arg in std::env::args().skip(1) {
        match arg.split_once('=') {
            Some(("threads", list)) => threads = list.split(',').map(|n| n.parse().unwrap()).collect(),
            Some(("rows", list)) => rows = list.split(',').map(|n| n.parse().unwrap()).collect(),
            Some(("rounds", n)) => rounds = n.parse().unwrap(),
            Some(("operands", "bf16")) => operands = Operands::Bf16,
            Some(("order", name)) => order = name.to_owned(),
            Some(("only", names)) => only = names.to_owned(),
            Some(("isa", name)) => isa = Isa::supported().find(|isa| isa.name() == name).unwrap(),
            _ => {}
        }
    }
    if !rows.is_empty() {
        return threads
            .into_iter()
            .for_each(|threads| serving(&rows, rounds, threads, (isa, &only, &order, operands)));
    }
    let chosen: Vec<_> = LAYERS
        .into_iter()
        .filter(|layer| only.is_empty() || only.split(',').any(|name| name == layer.0))
        .collect();
    let mut layers: Vec<Layer> = chosen.iter().map(|&(_, c, oc, _)| Layer::new(c, oc)).collect();
    let mut ws = Workspace::new();
    for threads in threads {
        let team = Team::new(threads);
        let mut times = vec![[const { Vec::new() }; 3]; layers.len()];
        for round in 0..=rounds {
            for (layer, times) in layers.iter_mut().zip(&mut times) {
                for (kind, times) in times.iter_mut().enumerate() {
                    let g = layer.product(kind).operands(operands);
                    let start = Instant::now();
                    // SAFETY: the matrices of the layer have these sizes.
                    unsafe { gemm(&team, &mut ws, isa, &g) }.unwrap();
                    if round > 0 {
                        times.push(start.elapsed().as_secs_f64());
                    }
                }
            }
        }
        println!("{threads} threads, {}, {operands:?}: GFLOP/s, median (best) of {rounds}", isa.name());
        println!("{:6} {:>14} {:>14} {:>14}", "", "forward", "d_input", "d_weight");
        let (mut total, mut least, mut flops) = (0.0, 0.0, 0.0);
        for (&(name, c, oc, count), times) in chosen.iter().zip(&mut times) {
            let work = 2.0 * (N * c * oc) as f64;
            print!("{name:6}");
            for times in times {
                let middle = median(times);
                print!(" {:>6.0} ({:>5.0})", work / middle / 1e9, work / times[0] / 1e9);
                total += middle * count as f64;
                least += times[0] * count as f64;
                flops += work * count as f64;
            }
            println!();
        }
        println!(
            "one step: {:.1} GFLOP in {:.0} ms (best {:.0} ms): {:.0} GFLOP/s\n",
            flops / 1e9,
            total * 1e3,
            least * 1e3,
            flops / total / 1e9
        );
    }
}
