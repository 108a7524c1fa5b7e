//! The bits of every op depend neither on the number of threads nor on concurrent callers.
//!
//! This is the only test of its binary, because the number of threads is a setting of the process.

#![allow(clippy::unwrap_used)]

use ironhorse::ops::{self, Stream};

const S: Stream = Stream::DEFAULT;

fn random(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A hash of all bits.
fn digest(bits: impl Iterator<Item = u32>) -> u64 {
    bits.fold(14_695_981_039_346_656_037, |hash, bits| {
        (hash ^ u64::from(bits)).wrapping_mul(1_099_511_628_211)
    })
}

/// The results of every op on arrays large enough for several threads.
fn everything() -> Vec<u64> {
    const N: usize = 2_200_000;
    let (x, w) = (random(N, 1), random(N, 2));
    let targets: Vec<i32> = (0..1000).map(|i| (i * 37) % 300).collect();
    let seeds: Vec<u64> = (0..1000).collect();
    let (mut y, mut z, mut chosen) = (vec![0.0_f32; N], vec![0.0_f32; N], vec![0_i32; 2000]);
    let mut bits = Vec::new();
    let (xp, wp, t, s) = (x.as_ptr(), w.as_ptr(), targets.as_ptr(), seeds.as_ptr());
    let mut run = |op: &dyn Fn(*mut f32, *mut f32, *mut i32) -> ops::Result| {
        y.fill(0.25);
        z.fill(0.25);
        op(y.as_mut_ptr(), z.as_mut_ptr(), chosen.as_mut_ptr()).unwrap();
        let floats = y.iter().chain(&z).map(|x| x.to_bits());
        bits.push(digest(floats.chain(chosen.iter().map(|&i| i as u32))));
    };
    // SAFETY: every array has the elements the op uses: 2200000, or 1000 rows of 2200.
    unsafe {
        run(&|y, _, _| ops::silu(xp, y, N as i64, S));
        run(&|y, _, _| ops::gelu(xp, y, N as i64, S));
        run(&|y, _, _| ops::swiglu(xp, wp, y, N as i64, S));
        run(&|y, _, _| ops::add(xp, wp, y, N as i64, S));
        run(&|y, _, _| ops::softmax(xp, y, 1000, 2200, S));
        run(&|y, _, i| ops::softmax_topk(xp, y, i, 1000, 2200, 2, S));
        run(&|y, z, _| ops::rmsnorm_residual(xp, wp, wp, y, z, 1000, 2200, 1e-5, S));
        run(&|y, _, _| ops::layernorm(xp, wp, wp, y, 1000, 2200, 1e-5, S));
        run(&|y, _, _| ops::gemm(xp, wp, y, 500, 500, 600, 1.0, 0.0, S));
        run(&|y, _, _| ops::gemm(xp, wp, y, 1, 500, 600, 1.0, 0.5, S));
        run(&|y, _, _| ops::gemm_batched(xp, wp, y, 30, 100, 100, 100, 1.0, 0.0, S));
        run(&|y, _, _| ops::rope_freqs(y, 3000, 200, 1e4, 1.0, S));
        run(&|y, _, _| ops::rope_forward(xp, wp, y, 2, 1000, 6, 100, 3, S));
        run(&|y, _, _| ops::flash_attention(xp, wp, wp, y, 2, 250, 6, 100, 0.1, true, S));
        run(&|y, z, _| ops::cross_entropy_forward(xp, t, y, z, 1000, 2200, S));
        run(&|y, _, _| ops::cross_entropy_backward(xp, t, y, 1000, 2200, 1.0, S));
        run(&|y, z, _| ops::grad_clip(y, z, z, 1.0, N as i64, S));
        run(&|y, _, _| ops::scatter_add(xp, t, y, 1000, 2200, S));
        run(&|_, _, i| ops::argmax(xp, i, 1000, 2200, S));
        run(&|_, _, i| ops::topp_sample(xp, i, s, 1000, 2200, 0.9, 1.0, S));
        let m = std::cell::RefCell::new(vec![0.1_f32; N]);
        let step = |y, z| {
            ops::adamw_step(y, xp, m.borrow_mut().as_mut_ptr(), z, 0.1, 0.9, 0.99, 1e-8, 0.1, 3, N as i64, S)
        };
        run(&|y, z, _| step(y, z));
    }
    bits
}

#[test]
fn bits_do_not_depend_on_threads() {
    ops::set_threads(1);
    let one = everything();
    for threads in [4, 0] {
        ops::set_threads(threads);
        assert!(everything() == one, "{threads} threads");
    }
    ops::set_threads(3);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4).map(|_| scope.spawn(everything)).collect();
        callers.into_iter().for_each(|caller| assert!(caller.join().unwrap() == one, "callers at once"));
    });
}
