//! Bias gradients from sums that the op before left, on a real GPU:
//! `IRONHORSE_GELU_PRODUCTS=own cargo test -p ironhorse-cuda --test bias_sums -- --ignored`
//!
//! The variable selects our own product with GELU's derivative, which a Hopper GPU has; without it that product may be the library's,
//! and its bias gradient is summed by itself.

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::{
    Accum, Act, AttentionBwd, AttentionMask, LayerNormBwd, LinearBwdInput, LinearBwdWeight, PreAct,
};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Shape, Slot};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::Rng;

const FFN: usize = 1024;

/// Some ops of a block's backward.
struct Net {
    program: Program,
    random: Vec<Slot>,
    /// What is summed over rows, and where the sums go.
    sums: Vec<(Slot, Slot)>,
}

/// GELU's derivative behind a product, a norm's, and the gradients of two biases.
fn net(rows: usize, width: usize) -> Net {
    let mut b = Builder::new();
    let mut slot = |name: &str, shape: Shape, dtype| b.io(name, shape, dtype);
    let bf16 = DType::BF16;
    let [d_out, d_norm, d_res, inp] =
        ["d_out", "d_norm", "d_res", "inp"].map(|x| slot(x, [rows, width].into(), bf16));
    let [pre, d_pre] = ["pre", "d_pre"].map(|x| slot(x, [rows, FFN].into(), bf16));
    let (weight, gain) = (slot("weight", [width, FFN].into(), bf16), slot("gain", [width].into(), bf16));
    let [mean, rstd] = ["mean", "rstd"].map(|x| slot(x, [rows].into(), DType::F32));
    let [d_gain, d_shift, bias_2] =
        ["d_gain", "d_shift", "bias_2"].map(|x| slot(x, [width].into(), DType::F32));
    let (d_fc, bias_1) =
        (slot("d_fc", [FFN, width].into(), DType::F32), slot("bias_1", [FFN].into(), DType::F32));
    let d_proj = slot("d_proj", [width, width].into(), DType::F32);
    let accum = Accum::Write;
    let act = Some(PreAct { act: Act::Gelu, slot: pre });
    b.push(LinearBwdInput { d_inp: d_pre, d_out, weight, pre: act }).unwrap();
    b.push(LinearBwdWeight { d_weight: d_fc, d_bias: Some(bias_1), d_out: d_pre, inp, accum }).unwrap();
    b.push(LayerNormBwd {
        d_inp: d_res,
        d_weight: d_gain,
        d_bias: d_shift,
        d_out: d_norm,
        inp,
        mean,
        rstd,
        weight: gain,
        accum_inp: Accum::Add,
        accum,
    })
    .unwrap();
    b.push(LinearBwdWeight { d_weight: d_proj, d_bias: Some(bias_2), d_out: d_res, inp, accum }).unwrap();
    let random = vec![d_out, d_norm, d_res, inp, pre, weight, gain, mean, rstd];
    Net { program: b.finish().unwrap(), random, sums: vec![(d_pre, bias_1), (d_res, bias_2)] }
}

/// The backward of attention, and the gradient of the bias ahead of it.
fn attention([batch, seq, heads, kv_heads]: [usize; 4]) -> Net {
    let mut b = Builder::new();
    let mut slot = |name: &str, shape: Shape, dtype| b.io(name, shape, dtype);
    let (bf16, width, wide) = (DType::BF16, heads * 64, (heads + 2 * kv_heads) * 64);
    let [d_qkv, qkv] = ["d_qkv", "qkv"].map(|x| slot(x, [batch, seq, wide].into(), bf16));
    let [d_out, out] = ["d_out", "out"].map(|x| slot(x, [batch, seq, width].into(), bf16));
    let inp = slot("inp", [batch, seq, 64].into(), bf16);
    let lse = slot("lse", [batch, heads, seq].into(), DType::F32);
    let (d_weight, bias) =
        (slot("d_weight", [wide, 64].into(), DType::F32), slot("bias", [wide].into(), DType::F32));
    b.push(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask: AttentionMask::CAUSAL })
        .unwrap();
    b.push(LinearBwdWeight { d_weight, d_bias: Some(bias), d_out: d_qkv, inp, accum: Accum::Write }).unwrap();
    let random = vec![qkv, d_out, out, inp, lse];
    Net { program: b.finish().unwrap(), random, sums: vec![(d_qkv, bias)] }
}

/// Runs the ops from the same numbers, in ranges that begin and end at `cuts`; gives the bias gradients, each checked against sums in
/// f64.
fn bias_gradients(engine: &mut CudaEngine, net: &Net, cuts: &[usize]) -> Vec<Vec<f32>> {
    let mut rng = Rng::new(5);
    for &slot in &net.random {
        engine.write_f32(slot, &rng.uniforms(slot.numel(), -1.0, 1.0)).unwrap();
    }
    for cut in cuts.windows(2) {
        engine.run(&net.program, cut[0]..cut[1], &Scalars::default()).unwrap();
    }
    let read = |engine: &mut CudaEngine, slot: Slot| {
        let mut out = vec![0.0; slot.numel()];
        engine.read_f32(slot, &mut out).unwrap();
        out
    };
    net.sums
        .iter()
        .map(|&(of, to)| {
            let (x, got) = (read(engine, of), read(engine, to));
            for (column, &got) in got.iter().enumerate() {
                let all = x.iter().skip(column).step_by(of.shape.cols()).map(|&x| f64::from(x));
                let (sum, size) = all.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                assert!(
                    size > 0.0 && (f64::from(got) - sum).abs() <= 1e-6 * size,
                    "{of:?} {column}: {got} {sum}"
                );
            }
            got
        })
        .collect()
}

#[test]
#[ignore = "needs a GPU"]
fn sums_left_by_the_op_before_are_those_of_its_result() {
    for [rows, width] in [[128, 256], [256, 256], [4096, 256], [130, 256], [4096, 1600]] {
        let net = net(rows, width);
        let mut engine = CudaEngine::new(Settings::default()).unwrap();
        engine.reserve(net.program.layout()).unwrap();
        let whole = bias_gradients(&mut engine, &net, &[0, 4]);
        let again = bias_gradients(&mut engine, &net, &[0, 4]);
        assert_eq!(whole, again, "{rows} rows: the same bits");
        bias_gradients(&mut engine, &net, &[0, 1, 2, 3, 4]);

        let mut kernels = Vec::new();
        engine.profile(&net.program, 0..4, &[], &Scalars::default(), &mut kernels).unwrap();
        let partials = |op: usize| kernels.iter().any(|at| at.op == op && at.name.contains("bias_partials"));
        assert!(!partials(3), "{rows} rows: the norm has summed its result");
        let own = kernels.iter().any(|at| at.name.contains("linear_gelu_bwd"));
        assert!(!own || !partials(1), "{rows} rows: our own product has summed its result");
        let asked = std::env::var("IRONHORSE_GELU_PRODUCTS").is_ok_and(|choice| choice == "own");
        let takes = ironhorse_cuda::devices().unwrap()[0].compute == (9, 0) && rows % 128 == 0;
        assert!(!asked || own || !takes, "{rows} rows: our own product was asked for");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn attention_leaves_the_sums_of_its_result() {
    // so many heads of keys that the kernel for Hopper takes them: of one tile, of several, of queries that share keys; and more of them than
    // an H200 has multiprocessors, so that some are cut between two blocks
    let whole = [[40, 128, 2, 2], [17, 512, 5, 5], [24, 256, 9, 3], [128, 128, 2, 1]];
    let cut = [[50, 384, 3, 3], [28, 1024, 5, 5]];
    for sizes in whole.into_iter().chain(cut) {
        let net = attention(sizes);
        let mut engine = CudaEngine::new(Settings::default()).unwrap();
        engine.reserve(net.program.layout()).unwrap();
        let whole = bias_gradients(&mut engine, &net, &[0, 2]);
        assert_eq!(whole, bias_gradients(&mut engine, &net, &[0, 2]), "{sizes:?}: the same bits");
        bias_gradients(&mut engine, &net, &[0, 1, 2]);

        let mut kernels = Vec::new();
        engine.profile(&net.program, 0..2, &[], &Scalars::default(), &mut kernels).unwrap();
        let any = |name: &str| kernels.iter().any(|at| at.name.contains(name));
        let hopper = ironhorse_cuda::devices().unwrap()[0].compute == (9, 0);
        assert_eq!(any("flash_bwd_wgmma"), hopper, "{sizes:?}");
        // keys that several heads of queries share may be summed in parts, which no bias is summed from
        let summed = hopper && !any("flash_bwd_join");
        assert_eq!(any("bias_partials"), !summed, "{sizes:?}: the attention has summed its result");
    }
}
