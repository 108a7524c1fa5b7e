//! Microseconds of the one-call ops on about 10^6 elements.
//!
//!     cargo bench -p ironhorse-cpu --bench flat -- [threads]
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_cpu::flat::{self, Attention, Choice, Pairs, Product, Rope, Span};
use std::time::Instant;

const N: usize = 1 << 20;
const ROWS: usize = 1024;

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn span(x: &mut [f32]) -> Span<f32> {
    // SAFETY: the arrays of `main` live as long as their spans.
    unsafe { Span::from_raw(x.as_mut_ptr(), x.len()) }
}

fn ints(x: &mut [i32]) -> Span<i32> {
    // SAFETY: as in `span`.
    unsafe { Span::from_raw(x.as_mut_ptr(), x.len()) }
}

fn time(name: &str, mut op: impl FnMut()) {
    op();
    let mut micros: Vec<f64> = (0..30)
        .map(|_| {
            let start = Instant::now();
            op();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    println!("{name:<24}{:>10.0} us (best {:.0})", micros[micros.len() / 2], micros[0]);
}

fn main() {
    let threads = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    flat::set_threads(threads);
    let (mut x, mut w, mut out, mut out2) = (random(N, 1), random(N, 2), vec![0.0; N], vec![0.0; N]);
    let (mut one, mut bias) = ([0.0], random(ROWS, 3));
    let (mut targets, mut chosen, mut top) = (vec![5; ROWS], vec![0; ROWS], vec![0; 8 * ROWS]);
    let mut gain = random(ROWS, 4);
    let (x, w, y, z, one) = (span(&mut x), span(&mut w), span(&mut out), span(&mut out2), span(&mut one));
    let (bias, gain) = (span(&mut bias), span(&mut gain));
    let (targets, chosen, top) = (ints(&mut targets), ints(&mut chosen), ints(&mut top));
    // SAFETY: every span has the length its op asks for, and no two that must be apart overlap.
    unsafe {
        let part = |s: Span<f32>, len: usize| Span::from_raw(s.ptr(), len);
        time("silu", || flat::silu(x, y).unwrap());
        time("gelu", || flat::gelu(x, y).unwrap());
        time("swiglu", || flat::swiglu(x, w, y).unwrap());
        time("add", || flat::add(x, w, y).unwrap());
        time("scale", || flat::scale(x, y, 2.0).unwrap());
        time("softmax 1024 rows", || flat::softmax(x, y, ROWS).unwrap());
        time("softmax 1 row", || flat::softmax(x, y, 1).unwrap());
        time("softmax_topk 8", || flat::softmax_topk(x, part(y, 8 * ROWS), top, ROWS, 8).unwrap());
        time("rmsnorm", || flat::rmsnorm(x, gain, y, 1e-5).unwrap());
        time("rmsnorm_residual", || flat::rmsnorm_residual([x, w, gain], y, z, 1e-5).unwrap());
        time("layernorm", || flat::layernorm([x, gain, bias], y, 1e-5).unwrap());
        time("cross_entropy", || flat::cross_entropy_forward(x, targets, one, y).unwrap());
        time("cross_entropy_backward", || flat::cross_entropy_backward(x, targets, y, 1.0).unwrap());
        time("grad_clip", || flat::grad_clip(x, one, 1e9).unwrap());
        time("argmax", || flat::argmax(x, chosen).unwrap());
        time("argmax 1 row", || flat::argmax(x, Span::from_raw(chosen.ptr(), 1)).unwrap());
        let rope =
            Rope { batch: 1, seq: ROWS, heads: 16, head_dim: 64, offset: 0, pairs: Pairs::Interleaved };
        let freqs = part(z, ROWS * 32);
        flat::rope_freqs(freqs, 64, 1e4, 1.0).unwrap();
        time("rope", || flat::rope_forward(x, freqs, y, &rope).unwrap());
        time("rope halves", || {
            flat::rope_forward(x, freqs, y, &Rope { pairs: Pairs::Halves, ..rope }).unwrap()
        });
        let at = Attention {
            batch: 1,
            q_len: ROWS,
            kv_len: ROWS,
            heads: 16,
            kv_heads: 16,
            head_dim: 64,
            scale: 0.125,
            causal: true,
        };
        time("attention", || flat::attention([x, w, w], y, &at).unwrap());
        let p = Product { m: ROWS, n: ROWS, k: ROWS, alpha: 1.0, beta: 0.0, transposed: [false; 2] };
        time("gemm 1024^3", || flat::gemm(x, w, y, &p).unwrap());
        let all = Choice { temperature: 1.0, top_k: None, top_p: None };
        let mut seeds: Vec<u64> = (0..ROWS as u64).collect();
        let seeds = Span::from_raw(seeds.as_mut_ptr(), ROWS);
        let single = Span::from_raw(chosen.ptr(), 1);
        time("sample 1 row", || assert!(flat::choose(x, single, seeds, &all).unwrap().is_none()));
        let k50 = Choice { top_k: Some(50), ..all };
        time("topk_sample 1 row", || assert!(flat::choose(x, single, seeds, &k50).unwrap().is_none()));
        let p9 = Choice { top_p: Some(0.9), ..all };
        time("topp_sample 1 row", || assert!(flat::choose(x, single, seeds, &p9).unwrap().is_none()));
        time("topp_sample 1024 rows", || assert!(flat::choose(x, chosen, seeds, &p9).unwrap().is_none()));
    }
}
