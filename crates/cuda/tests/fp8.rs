//! A loss or SwiGLU, and the tensors in 8 bits made of its result or its gradient, computed together on a real GPU: the same bits as one
//! after the other; norms are in `fp8_norms.rs`. And gradients of experts' weights by pairs of blocks: those of single ones.
//! `cargo test -p ironhorse-cuda --test fp8 -- --ignored --nocapture`

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod joined;

use ironhorse_core::op::{
    Accum, Add, Amax, CrossEntropy, Gate, GroupedFp8, GroupedFp8BwdWeight, IGNORED, Permute, Quantize,
    SwigluBwd, SwigluFwd,
};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Fp8, Precision, Program, Scalars, Slot};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;

/// The largest elements of several weights, then all of them in 8 bits; and what is written.
fn weights_program(sizes: &[[usize; 2]], dtype: DType) -> (Program, Vec<Slot>, Vec<Slot>) {
    let precision = if dtype == DType::BF16 { Precision::BF16 } else { Precision::F32 };
    let mut builder = Builder::with_precision(precision);
    let format = DType::F8(Fp8::E4M3);
    let weights: Vec<_> =
        sizes.iter().enumerate().map(|(i, &size)| builder.param(format!("w{i}"), size, false)).collect();
    let mut outputs = Vec::new();
    let ops: Vec<_> = weights
        .iter()
        .enumerate()
        .map(|(i, &inp)| {
            let [rows, cols] = sizes[i];
            let [inverse, amax] =
                ["inverse", "amax"].map(|name| builder.io(format!("{name}{i}"), [1], DType::F32));
            let out = builder.io(format!("q{i}"), [rows, cols], format);
            let out_t = builder.io(format!("q_t{i}"), [cols, rows], format);
            outputs.extend([inverse, amax, out_t]);
            let by_rows = (i != 1).then_some(out);
            outputs.extend(by_rows);
            let op = joined::quantize(inp, out, [inverse, amax, amax]);
            // all different, so that no two can be taken for each other
            let (margin, unknown) = (i as i32, 10 + i as i32);
            Quantize { out: by_rows, out_t: Some(out_t), seen: None, margin, unknown, ..op }
        })
        .collect();
    ops.iter().for_each(|op| builder.push(Amax { amax: op.amax, inp: op.inp }).unwrap());
    ops.iter().for_each(|op| builder.push(*op).unwrap());
    (builder.finish().unwrap(), weights, outputs)
}

#[test]
#[ignore = "needs a GPU"]
fn weights_in_one_launch_have_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let sizes = [[16, 16], [768, 2304], [48, 1040], [4112, 256], [272, 144]];
    for (dtype, count) in [(DType::BF16, 5), (DType::F32, 5), (DType::BF16, 2), (DType::BF16, 1)] {
        let (program, weights, outputs) = weights_program(&sizes[..count], dtype);
        engine.reserve(program.layout()).unwrap();
        let runs = [true, false].map(|together| {
            let mut rng = Rng::new(11);
            joined::set(&mut engine, &outputs, f32::NAN);
            for (i, slot) in weights.iter().enumerate() {
                // One of zeros; the others differ in their largest element by powers of two and more.
                let size = [0.0, 1.0, 3e-3, 700.0, 1e-9][i];
                engine.write_f32(*slot, &rng.uniforms(slot.numel(), -size, size)).unwrap();
            }
            // The first run is eager, the second recorded, the third replayed.
            (0..3).for_each(|_| joined::run(&mut engine, &program, together, &Scalars::default()));
            joined::bits(&mut engine, &outputs)
        });
        assert!(runs[0] == runs[1], "{count} weights in {dtype}");
        let names = joined::kernels(&mut engine, &program);
        for (many, one) in [("amax_many", "amax"), ("quantize_many", "quantize")] {
            assert_eq!(
                names.iter().filter(|name| *name == many).count(),
                usize::from(count > 1),
                "{names:?}"
            );
            assert_eq!(
                names.iter().filter(|name| *name == one).count(),
                usize::from(count == 1),
                "{names:?}"
            );
        }
    }
}

/// A loss of rows of `vocab` and 47 columns of padding, its gradient in 8 bits, and perhaps another use of that gradient.
#[derive(Clone, Copy, Debug)]
struct Loss {
    rows: usize,
    vocab: usize,
    format: Fp8,
    read: bool,
}

/// The bits of losses, of the gradient in 8 bits, of its scale and of its largest element, and of the gradient where it is read; and how
/// many kernels it took.
fn loss(engine: &mut CudaEngine, case: Loss, together: bool) -> (Vec<Vec<u32>>, usize) {
    let Loss { rows, vocab, format, read } = case;
    let padded = vocab + 47;
    let mut builder = Builder::with_precision(Precision::BF16);
    let losses = builder.io("losses", [rows, 1], DType::F32);
    let targets = builder.io("targets", [rows, 1], DType::I32);
    let [logits, twice] = ["logits", "twice"].map(|name| builder.io(name, [rows, 1, padded], DType::BF16));
    let by_rows = builder.io("q", [rows, padded], DType::F8(format));
    let by_columns = builder.io("q_t", [padded, rows], DType::F8(format));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    builder.push(CrossEntropy { losses, logits, targets, vocab, grad: true }).unwrap();
    let quantize = Quantize {
        out_t: Some(by_columns),
        unknown: 16,
        ..joined::quantize(logits, by_rows, [inverse, amax, seen])
    };
    builder.push(quantize).unwrap();
    let mut outputs = vec![losses, by_rows, by_columns, inverse, seen];
    if read {
        builder.push(Add { out: twice, a: logits, b: logits }).unwrap();
        outputs.extend([logits, twice]);
    }
    let program = builder.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(11);
    let values = rng.uniforms(rows * padded, -9.0, 9.0);
    let mut wanted: Vec<i32> = (0..rows).map(|row| (row * 7919 % vocab) as i32).collect();
    wanted[3] = IGNORED;
    let scalars = Scalars { loss_scale: 1.0 / rows as f32, ..Scalars::default() };
    joined::set(engine, &outputs, f32::NAN);
    for _ in 0..3 {
        engine.write_f32(logits, &values).unwrap();
        engine.write_i32(targets, &wanted).unwrap();
        engine.write_f32(amax, &[0.5 / rows as f32]).unwrap();
        engine.write_f32(seen, &[0.0]).unwrap();
        joined::run(engine, &program, together, &scalars);
    }
    let bits = joined::bits(engine, &outputs);
    let mut record = Vec::new();
    engine.profile(&program, 0..2, &[], &scalars, &mut record).unwrap();
    let joined = record.iter().filter(|timed| timed.name == "cross_entropy_quantize").count();
    (bits, joined)
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_logits_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    // 151,936 columns need a cluster of blocks for a row; a million take the path for any length, which is not joined
    for (rows, vocab, fits) in
        [(16, 1, true), (48, 305, true), (272, 50_257, true), (32, 151_889, true), (16, 999_953, false)]
    {
        for format in Fp8::ALL {
            for read in [false, true] {
                let case = Loss { rows, vocab, format, read };
                let (together, joined) = loss(&mut engine, case, true);
                let (apart, _) = loss(&mut engine, case, false);
                assert_eq!(joined == 1, fits && !read, "{case:?}");
                assert!(together == apart, "{case:?}");
            }
        }
    }
}

/// A product of experts with SwiGLU behind it, and its backward, each with its tensors in 8 bits.
#[derive(Clone, Copy, Debug)]
struct Experts {
    rows: [usize; 3],
    width: usize,
    ffn: usize,
    gradients: Fp8,
    /// Another op reads the bf16 result of SwiGLU and the bf16 gradient too.
    read: bool,
}

/// The bits of everything that is read later, and the names of the kernels.
fn experts(engine: &mut CudaEngine, case: Experts, together: bool) -> (Vec<Vec<u32>>, Vec<String>) {
    let Experts { rows: counts, width, ffn, gradients, read } = case;
    let rows = counts.iter().sum();
    let mut builder = Builder::with_precision(Precision::BF16);
    let fp8 = |builder: &mut Builder, name: &str, shape: [usize; 2], format| {
        builder.io(name, shape, DType::F8(format))
    };
    let a = fp8(&mut builder, "a", [rows, width], Fp8::E4M3);
    let b = builder.io("b", [3, 2 * ffn, width], DType::F8(Fp8::E4M3));
    let offsets = builder.io("offsets", [4], DType::I32);
    let names =
        ["a_inverse", "b_inverse", "amax", "seen", "d_amax", "d_seen", "inverse", "d_inverse", "act_inverse"];
    let [a_inverse, b_inverse, amax, seen, d_amax, d_seen, inverse, d_inverse, act_inverse] =
        names.map(|name| builder.io(name, [1], DType::F32));
    let [wide, twice] = ["wide", "twice"].map(|name| builder.io(name, [rows, 2 * ffn], DType::BF16));
    let [act, d_act, act_twice] =
        ["act", "d_act", "act_twice"].map(|name| builder.io(name, [rows, ffn], DType::BF16));
    let q = fp8(&mut builder, "q", [rows, ffn], Fp8::E4M3);
    let q_t = fp8(&mut builder, "q_t", [ffn, rows], Fp8::E4M3);
    let d_q = fp8(&mut builder, "d_q", [rows, 2 * ffn], gradients);
    let d_q_t = fp8(&mut builder, "d_q_t", [2 * ffn, rows], gradients);
    let (beside, fast, gate) = (false, true, Gate::Silu);
    builder.push(GroupedFp8 { out: wide, a, b, a_inverse, b_inverse, offsets, beside, fast }).unwrap();
    builder.push(SwigluFwd { out: act, inp: wide, gate }).unwrap();
    let plain = joined::quantize(act, q, [inverse, amax, seen]);
    builder.push(plain).unwrap();
    if read {
        builder.push(Add { out: act_twice, a: act, b: act }).unwrap();
    }
    builder.push(SwigluBwd { d_inp: wide, act: Some(d_act), d_out: d_act, inp: wide, gate }).unwrap();
    let backward = joined::quantize(wide, d_q, [d_inverse, d_amax, d_seen]);
    builder.push(Quantize { out_t: Some(d_q_t), unknown: 20, ..backward }).unwrap();
    let columns =
        Quantize { out: None, out_t: Some(q_t), inverse: act_inverse, inp: d_act, seen: None, ..plain };
    builder.push(columns).unwrap();
    let mut outputs = vec![q, inverse, seen, d_q, d_q_t, d_inverse, d_seen, q_t, act_inverse];
    if read {
        builder.push(Add { out: twice, a: wide, b: wide }).unwrap();
        outputs.extend([act_twice, twice]);
    }
    let program = builder.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(13);
    let inputs: Vec<(Slot, Vec<f32>)> = [(a, 4.0), (b, 4.0), (d_act, 1e-3)]
        .map(|(slot, most)| (slot, rng.uniforms(slot.numel(), -most, most)))
        .into();
    joined::set(engine, &outputs, f32::NAN);
    let ends = joined::offsets(&counts);
    for _ in 0..3 {
        for (slot, values) in &inputs {
            engine.write_f32(*slot, values).unwrap();
        }
        engine.write_i32(offsets, &ends).unwrap();
        let numbers = [
            (a_inverse, 0.25),
            (b_inverse, 0.0625),
            (amax, 40.0),
            (d_amax, 0.01),
            (seen, 0.0),
            (d_seen, 0.0),
        ];
        for (slot, value) in numbers {
            engine.write_f32(slot, &[value]).unwrap();
        }
        joined::run(engine, &program, together, &Scalars::default());
    }
    (joined::bits(engine, &outputs), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn swiglu_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    // rows of an expert end inside a tile; columns that the product's kernel takes, and some that it does not
    for (rows, width, ffn, in_product) in [
        ([130, 0, 14], 128, 64, true),
        ([1, 300, 723], 768, 384, true),
        ([1000, 24, 0], 80, 192, true),
        ([31, 16, 1], 64, 48, false),
    ] {
        for gradients in Fp8::ALL {
            for read in [false, true] {
                let case = Experts { rows, width, ffn, gradients, read };
                let (together, names) = experts(&mut engine, case, true);
                let (apart, _) = experts(&mut engine, case, false);
                assert!(together == apart, "{case:?}");
                let has = |name: &str| joined::has(&names, name);
                assert_eq!(has("grouped_fp8_swiglu"), in_product && !read, "{case:?} {names:?}");
                assert_eq!(has("swiglu_quantize"), !in_product && !read, "{case:?} {names:?}");
                assert_eq!(has("swiglu_bwd_quantize"), !read, "{case:?} {names:?}");
            }
        }
    }
}

/// The bits of tokens permuted to their experts, and the names of the kernels.
fn permuted(
    engine: &mut CudaEngine,
    [tokens, chosen, width]: [usize; 3],
    together: bool,
) -> (Vec<Vec<u32>>, Vec<String>) {
    let rows = tokens * chosen;
    let mut builder = Builder::with_precision(Precision::BF16);
    let inp = builder.io("inp", [tokens, 1, width], DType::BF16);
    let out = builder.io("out", [rows, width], DType::BF16);
    let order = builder.io("order", [rows], DType::I32);
    let q = builder.io("q", [rows, width], DType::F8(Fp8::E4M3));
    let q_t = builder.io("q_t", [width, rows], DType::F8(Fp8::E4M3));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    builder.push(Permute { out, inp, order }).unwrap();
    let quantize = Quantize { out_t: Some(q_t), ..joined::quantize(out, q, [inverse, amax, seen]) };
    builder.push(quantize).unwrap();
    let program = builder.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let values = Rng::new(17).uniforms(inp.numel(), -3.0, 3.0);
    engine.write_f32(inp, &values).unwrap();
    // a permutation: 7 has no divisor in common with a power of two
    let routes: Vec<i32> = (0..rows).map(|r| ((7 * r + 3) % rows) as i32).collect();
    engine.write_i32(order, &routes).unwrap();
    for (slot, value) in [(amax, 2.0), (seen, 0.0), (inverse, f32::NAN)] {
        engine.write_f32(slot, &[value]).unwrap();
    }
    joined::run(engine, &program, together, &Scalars::default());
    (joined::bits(engine, &[q, q_t, inverse, seen]), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn rows_of_experts_that_are_quantised_on_the_way_have_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    for sizes in [[16, 1, 16], [64, 4, 768], [256, 2, 144]] {
        let (together, names) = permuted(&mut engine, sizes, true);
        assert!(together == permuted(&mut engine, sizes, false).0, "{sizes:?}");
        assert_eq!(names, ["permute_quantize"], "{sizes:?}");
    }
}

/// Compares the gradient of experts' weights of `parts` times 128 rows, in one op, and in one op for each 128 rows, which single blocks
/// compute: the names of the kernels.
fn weights(
    engine: &mut CudaEngine,
    counts: &[usize],
    [parts, ic]: [usize; 2],
    (out, adds): (DType, bool),
) -> Vec<String> {
    const PART: usize = 128;
    let (rows, experts) = (counts.iter().sum::<usize>(), counts.len());
    let accum = if adds { Accum::Add } else { Accum::Write };
    let mut b = Builder::with_precision(Precision::BF16);
    let whole = b.io("d_out", [parts * PART, rows], DType::F8(Fp8::E5M2));
    let inp = b.io("inp", [ic, rows], DType::F8(Fp8::E4M3));
    let [d_out_inverse, inp_inverse] = ["of d_out", "of inp"].map(|name| b.io(name, [1], DType::F32));
    let offsets = b.io("offsets", [experts + 1], DType::I32);
    let mut product = |d_out: Slot, name: String| {
        let d_weight = b.io(name, [experts, d_out.shape.rows(), ic], out);
        b.push(GroupedFp8BwdWeight { d_weight, d_out, inp, d_out_inverse, inp_inverse, offsets, accum })
            .unwrap();
        d_weight
    };
    let of_whole = product(whole, "whole".into());
    let part =
        |at: usize| Slot { offset: at * PART * rows + whole.offset, shape: [PART, rows].into(), ..whole };
    let single: Vec<Slot> = (0..parts).map(|at| product(part(at), at.to_string())).collect();
    let program = b.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(37);
    for slot in [whole, inp] {
        joined::fill(engine, &mut rng, slot, 1.0);
    }
    engine.write_f32(d_out_inverse, &[0.25]).unwrap();
    engine.write_f32(inp_inverse, &[3.0]).unwrap();
    engine.write_i32(offsets, &joined::offsets(counts)).unwrap();
    let (old, case) = (if adds { 0.75 } else { f32::NAN }, (counts, parts, ic, out, adds));
    joined::check_parts(engine, &program, (of_whole, &single), old, case)
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_weights_has_the_same_bits_by_pairs_of_blocks() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let hopper = joined::is_hopper();
    // An expert without rows, first rows and ends inside a stage, more tiles than blocks, columns that end inside a tile.
    for (rows, size) in
        [([130, 0, 3, 203], [2, 64]), ([1, 300, 2, 721], [6, 768]), ([1000, 0, 501, 19], [40, 1344])]
    {
        for how in joined::WAYS {
            let names = weights(&mut engine, &rows, size, how);
            for name in ["grouped_fp8_bwd_weight_pair", "grouped_fp8_bwd_weight"] {
                assert_eq!(joined::has(&names, name), hopper, "{names:?}");
            }
        }
    }
}
