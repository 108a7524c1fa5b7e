//! Times the ops of a mixture of experts at the sizes of the 6.9B model, on a real GPU with 16 GiB free, and compares the bits of a product
//! and SwiGLU's backward, computed together or one after the other, and those of products by pairs of blocks or by single ones:
//! `cargo test --release -p ironhorse-cuda --test experts -- --ignored --nocapture`
//!
//! `IRONHORSE_GROUPED` selects the kernels of the experts' linear layers.

#![allow(clippy::unwrap_used, reason = "a test")]

mod joined;

use ironhorse_core::op::{
    Accum, Add, Combine, CombineBwd, Gain, Gate, GroupedLinearBwdInput, GroupedLinearBwdWeight,
    GroupedLinearFwd, Permute, PermuteBwd, ResidualRmsNormFwd, RmsNormBwd, Rope, RopeScaling, RouteSort,
    RouterBwd, RouterFwd, RouterLoad, SwigluBwd, SwigluFwd,
};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Precision, Program, Scalars, Shape, Slot};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;
use std::time::Instant;

const TOKENS: usize = 16_384;
const CHOSEN: usize = 4;
const ROUTES: usize = TOKENS * CHOSEN;
const WIDTH: usize = 768;
const FFN: usize = 6144;
const EXPERTS: usize = 16;
const SEQ: usize = 1024;
/// Queries of 12 heads, keys and values of one.
const PACKED: usize = 14 * 64;

/// The number of runs of each op.
const TIMES: u32 = 20;

/// The forward and backward of an expert layer, and the slots to fill with random numbers up to the given absolute
/// value.
fn layer() -> (Program, Vec<(Slot, f32)>) {
    let mut b = Builder::new();
    let mut count = 0;
    let mut slot = |b: &mut Builder, shape: Shape, dtype| {
        count += 1;
        b.io(format!("slot {count}"), shape, dtype)
    };
    let mut bf16 = |b: &mut Builder, shape: Shape| slot(b, shape, DType::BF16);
    let [x, y, stream, normal, d_normal, d_stream, mixed, d_mixed] =
        [(); 8].map(|()| bf16(&mut b, [1, TOKENS, WIDTH].into()));
    let [rows, results, d_rows, d_results] = [(); 4].map(|()| bf16(&mut b, [ROUTES, WIDTH].into()));
    let [inner, d_inner] = [(); 2].map(|()| bf16(&mut b, [ROUTES, 2 * FFN].into()));
    let [gated, d_gated] = [(); 2].map(|()| bf16(&mut b, [ROUTES, FFN].into()));
    let [up, d_up] = [(); 2].map(|()| bf16(&mut b, [EXPERTS, 2 * FFN, WIDTH].into()));
    let [down, d_down] = [(); 2].map(|()| bf16(&mut b, [EXPERTS, WIDTH, FFN].into()));
    let [logits, d_logits] = [(); 2].map(|()| bf16(&mut b, [TOKENS, EXPERTS].into()));
    let [weight, d_weight] = [(); 2].map(|()| bf16(&mut b, [WIDTH].into()));
    let qkv = bf16(&mut b, [TOKENS / SEQ, SEQ, PACKED].into());
    let mut f32s = |b: &mut Builder, shape: Shape| slot(b, shape, DType::F32);
    let (probs, rstd) = (f32s(&mut b, [TOKENS, EXPERTS].into()), f32s(&mut b, [TOKENS].into()));
    let [weights, d_weights] = [(); 2].map(|()| f32s(&mut b, [TOKENS, CHOSEN].into()));
    let (load, aux, entropy) =
        (f32s(&mut b, [EXPERTS].into()), f32s(&mut b, [1].into()), f32s(&mut b, [1].into()));
    let mut ints = |b: &mut Builder, shape: Shape| slot(b, shape, DType::I32);
    let [experts, places] = [(); 2].map(|()| ints(&mut b, [TOKENS, CHOSEN].into()));
    let (order, offsets) = (ints(&mut b, [ROUTES].into()), ints(&mut b, [EXPERTS + 1].into()));

    let (accum, alpha, eps) = (Accum::Write, 0.01, 1e-5);
    b.push(ResidualRmsNormFwd {
        residual: stream,
        out: normal,
        rstd,
        a: x,
        b: y,
        weight,
        eps,
        gain: Gain::Weight,
    })
    .unwrap();
    let (heads, kv_heads, base) = (12, 1, 1e4);
    let rope = Rope {
        qkv,
        heads,
        kv_heads,
        base,
        alpha: 8.0,
        scaling: RopeScaling::None,
        back: false,
        at_position: false,
        positions: None,
        context: SEQ,
    };
    b.push(rope).unwrap();
    b.push(RouterFwd { probs, weights, experts, logits }).unwrap();
    b.push(RouteSort { order, places, offsets, experts }).unwrap();
    b.push(RouterLoad { load, aux, entropy: Some(entropy), probs, offsets, alpha, accum }).unwrap();
    b.push(Permute { out: rows, inp: normal, order }).unwrap();
    b.push(GroupedLinearFwd { out: inner, act: None, inp: rows, weight: up, offsets }).unwrap();
    b.push(SwigluFwd { out: gated, inp: inner, gate: Gate::Silu }).unwrap();
    b.push(GroupedLinearFwd { out: results, act: None, inp: gated, weight: down, offsets }).unwrap();
    b.push(Combine { out: mixed, rows: results, places, weights }).unwrap();
    b.push(CombineBwd { d_rows: d_results, d_weights, d_out: d_mixed, rows: results, places, weights })
        .unwrap();
    let d_out = d_results;
    b.push(GroupedLinearBwdWeight { d_weight: d_down, d_out, inp: gated, offsets, accum }).unwrap();
    b.push(GroupedLinearBwdInput { d_inp: d_gated, d_out, weight: down, offsets }).unwrap();
    b.push(SwigluBwd { d_inp: d_inner, act: None, d_out: d_gated, inp: inner, gate: Gate::Silu }).unwrap();
    let d_out = d_inner;
    b.push(GroupedLinearBwdWeight { d_weight: d_up, d_out, inp: rows, offsets, accum }).unwrap();
    b.push(GroupedLinearBwdInput { d_inp: d_rows, d_out, weight: up, offsets }).unwrap();
    b.push(PermuteBwd { d_inp: d_normal, d_out: d_rows, places, accum }).unwrap();
    b.push(RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha }).unwrap();
    let norm = RmsNormBwd {
        d_inp: d_stream,
        d_weight,
        d_out: d_normal,
        inp: stream,
        rstd,
        weight,
        accum_inp: accum,
        accum,
        gain: Gain::Weight,
    };
    b.push(norm).unwrap();
    let scale = |fan: usize| 1.7 / (fan as f32).sqrt();
    let random = vec![
        (x, 1.0),
        (y, 1.0),
        (d_mixed, 1.0),
        (up, scale(WIDTH)),
        (down, scale(FFN)),
        (logits, 2.0),
        (weight, 1.0),
        (qkv, 1.0),
    ];
    (b.finish().unwrap(), random)
}

#[test]
#[ignore = "needs a GPU"]
fn speed() {
    let _alone = joined::alone();
    let (program, random) = layer();
    let mut engine = joined::engine();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(1);
    for (slot, range) in random {
        joined::fill(&mut engine, &mut rng, slot, range);
    }
    let scalars = Scalars { loss_scale: 1.0 / TOKENS as f32, ..Scalars::default() };
    let all = program.nodes().len();
    engine.run(&program, 0..all, &scalars).unwrap();
    engine.synchronize().unwrap();
    println!("{:28} {:>9} {:>9} {:>9}", "op", "ms", "TFLOP/s", "GB/s");
    let mut total = 0.0;
    for at in 0..all {
        let op = &program.nodes()[at].op;
        let mut time = |times: u32| {
            let start = Instant::now();
            for _ in 0..times {
                engine.run(&program, at..at + 1, &scalars).unwrap();
            }
            engine.synchronize().unwrap();
            start.elapsed().as_secs_f64() / f64::from(times)
        };
        time(3);
        let seconds = time(TIMES);
        total += seconds;
        let (flops, bytes) = (op.flops() as f64 / seconds / 1e12, op.bytes() as f64 / seconds / 1e9);
        println!("{:28} {:9.4} {:9.1} {:9.0}", op.name(), 1e3 * seconds, flops, bytes);
    }
    println!("{:28} {:9.4}", "all", 1e3 * total);
}

/// The product in front of SwiGLU's backward and that, as one case of `joined`.
#[derive(Clone, Copy, Debug)]
struct Backward {
    rows: [usize; 4],
    width: usize,
    ffn: usize,
    /// The gradient is written over SwiGLU's input, and its result over the product's.
    in_place: bool,
    /// Something else reads the product's result.
    read: bool,
}

/// The bits of what both write, and the names of the kernels.
fn backward(engine: &mut CudaEngine, case: Backward, together: bool) -> (Vec<Vec<u32>>, Vec<String>) {
    let Backward { rows: counts, width, ffn, in_place, read } = case;
    let rows = counts.iter().sum::<usize>();
    let mut b = Builder::with_precision(Precision::BF16);
    let mut bf16 = |name: &str, shape: Shape| b.io(name, shape, DType::BF16);
    let d_out = bf16("d_out", [rows, width].into());
    let weight = bf16("weight", [counts.len(), width, ffn].into());
    let [inp, d_inp] = ["inp", "d_inp"].map(|name| bf16(name, [rows, 2 * ffn].into()));
    let [d_act, twice] = ["d_act", "twice"].map(|name| bf16(name, [rows, ffn].into()));
    let d_inp = if in_place { inp } else { d_inp };
    let offsets = b.io("offsets", [counts.len() + 1], DType::I32);
    b.push(GroupedLinearBwdInput { d_inp: d_act, d_out, weight, offsets }).unwrap();
    let act = in_place.then_some(d_act);
    b.push(SwigluBwd { d_inp, act, d_out: d_act, inp, gate: Gate::Silu }).unwrap();
    let mut outputs = vec![d_inp];
    outputs.extend(act);
    if read {
        b.push(Add { out: twice, a: d_act, b: d_act }).unwrap();
        outputs.push(twice);
    }
    let program = b.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let ends = joined::offsets(&counts);
    for _ in 0..3 {
        let mut rng = Rng::new(23);
        for slot in &outputs {
            engine.write_f32(*slot, &vec![f32::NAN; slot.numel()]).unwrap();
        }
        for (slot, most) in [(d_out, 1.0), (weight, 1.7 / (width as f32).sqrt()), (inp, 4.0)] {
            joined::fill(engine, &mut rng, slot, most);
        }
        engine.write_i32(offsets, &ends).unwrap();
        joined::run(engine, &program, together, &Scalars::default());
    }
    (joined::bits(engine, &outputs), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn swiglu_behind_the_product_of_its_gradient_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let hopper = joined::is_hopper();
    // Rows of an expert end inside a tile, or are fewer than a warp's; more tiles than blocks; columns that end inside a tile, and
    // some that the kernel does not take.
    for (rows, width, ffn, whole) in [
        ([130, 0, 3, 203], 64, 64, true),
        ([1, 300, 2, 724], 768, 768, true),
        ([7000, 0, 5001, 24], 768, 1344, true),
        ([2000, 17, 129, 900], 128, 1024, true),
        ([31, 16, 1, 0], 64, 48, false),
    ] {
        for (in_place, read) in [(true, false), (false, false), (false, true)] {
            let case = Backward { rows, width, ffn, in_place, read };
            let (together, names) = backward(&mut engine, case, true);
            joined::check_same(&together, &backward(&mut engine, case, false).0, case);
            assert_eq!(
                joined::has(&names, "grouped_swiglu_bwd"),
                hopper && whole && !read,
                "{case:?} {names:?}"
            );
        }
    }
}

/// Compares the gradient of weights of 128·`parts` rows, of all at once and of each 128 by themselves, added to what is there if `adds`:
/// the names of the kernels.
fn weights(
    engine: &mut CudaEngine,
    counts: [usize; 4],
    [parts, ic]: [usize; 2],
    (out, adds): (DType, bool),
) -> Vec<String> {
    const PART: usize = 128;
    let (rows, experts) = (counts.iter().sum::<usize>(), counts.len());
    let accum = if adds { Accum::Add } else { Accum::Write };
    let mut b = Builder::with_precision(Precision::BF16);
    let inp = b.io("inp", [rows, ic], DType::BF16);
    let offsets = b.io("offsets", [experts + 1], DType::I32);
    let mut product = |name: String, oc: usize| {
        let d_out = b.io(format!("d_out {name}"), [rows, oc], DType::BF16);
        let d_weight = b.io(format!("d_weight {name}"), [experts, oc, ic], out);
        b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum }).unwrap();
        (d_out, d_weight)
    };
    let (d_out, whole) = product("whole".into(), parts * PART);
    let (d_outs, single): (Vec<_>, Vec<_>) = (0..parts).map(|part| product(part.to_string(), PART)).unzip();
    let program = b.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(29);
    engine.write_i32(offsets, &joined::offsets(&counts)).unwrap();
    joined::fill(engine, &mut rng, inp, 1.0);
    let (gradients, old) = (rng.uniforms(d_out.numel(), -1.0, 1.0), if adds { 0.75 } else { f32::NAN });
    engine.write_f32(d_out, &gradients).unwrap();
    for (part, d_out) in d_outs.into_iter().enumerate() {
        let columns = |row: &[f32]| row[part * PART..][..PART].to_vec();
        let own: Vec<f32> = gradients.chunks(parts * PART).flat_map(columns).collect();
        engine.write_f32(d_out, &own).unwrap();
    }
    joined::check_parts(engine, &program, (whole, &single), old, (counts, parts, ic, out, adds))
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_weights_has_the_same_bits_by_pairs_of_blocks() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let hopper = joined::is_hopper();
    // An expert without rows, rows that end inside a stage, more tiles than blocks, columns that end inside a tile, and an odd number of
    // tiles, which single blocks compute.
    for (rows, size) in [
        ([130, 0, 3, 203], [2, 64]),
        ([1, 300, 2, 724], [6, 768]),
        ([1000, 0, 501, 24], [40, 1344]),
        ([64, 17, 129, 900], [3, 320]),
    ] {
        for how in joined::WAYS {
            let names = weights(&mut engine, rows, size, how);
            let pairs = joined::has(&names, "grouped_wgmma_bwd_weight_pair");
            assert_eq!(pairs, hopper && size[0].is_multiple_of(2), "{names:?}");
        }
    }
}

/// The products of rows with the weights of experts: forward, forward with SwiGLU, and the input gradient; of all experts in one op each,
/// or of each expert by itself in slices of its rows.
fn rows_products(
    engine: &mut CudaEngine,
    counts: &[usize],
    [oc, ic]: [usize; 2],
    slice: Option<usize>,
) -> (Vec<Vec<u32>>, Vec<String>) {
    let (rows, experts) = (counts.iter().sum::<usize>(), counts.len());
    let mut b = Builder::with_precision(Precision::BF16);
    let mut io = |name: &str, cols| b.io(name, [rows, cols], DType::BF16);
    let (inp, d_out, out, gated) = (io("inp", ic), io("d_out", oc), io("out", oc), io("gated", oc));
    let (act, d_inp) = (io("act", oc / 2), io("d_inp", ic));
    let weight = b.io("weight", [experts, oc, ic], DType::BF16);
    let starts = joined::offsets(counts);
    // first row, rows of each expert, first expert
    let mut parts: Vec<(usize, Vec<usize>, usize)> = Vec::new();
    match slice {
        None => parts.push((0, counts.to_vec(), 0)),
        Some(most) => {
            for (expert, &own) in counts.iter().enumerate() {
                let slices = (0..own).step_by(most);
                let part = |at| (starts[expert] as usize + at, vec![most.min(own - at)], expert);
                parts.extend(slices.map(part));
            }
        }
    }
    let mut offsets = Vec::new();
    for (at, (first, own, expert)) in parts.iter().enumerate() {
        let some = |slot: Slot| {
            let (cols, rows) = (slot.shape.cols(), own.iter().sum::<usize>());
            Slot { offset: slot.offset + first * cols * 2, shape: [rows, cols].into(), ..slot }
        };
        let of = Slot {
            offset: weight.offset + expert * oc * ic * 2,
            shape: [own.len(), oc, ic].into(),
            ..weight
        };
        let ends = b.io(format!("offsets {at}"), [own.len() + 1], DType::I32);
        let (rows, weight) = (some(inp), of);
        b.push(GroupedLinearFwd { out: some(out), act: None, inp: rows, weight, offsets: ends }).unwrap();
        let both =
            GroupedLinearFwd { out: some(gated), act: Some(some(act)), inp: rows, weight, offsets: ends };
        b.push(both).unwrap();
        let back = GroupedLinearBwdInput { d_inp: some(d_inp), d_out: some(d_out), weight, offsets: ends };
        b.push(back).unwrap();
        offsets.push((ends, joined::offsets(own)));
    }
    let program = b.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(31);
    for slot in [inp, d_out, weight] {
        joined::fill(engine, &mut rng, slot, 1.0);
    }
    let outputs = [out, gated, act, d_inp];
    joined::set(engine, &outputs, f32::NAN);
    for (slot, ends) in offsets {
        engine.write_i32(slot, &ends).unwrap();
    }
    joined::run(engine, &program, true, &Scalars::default());
    (joined::bits(engine, &outputs), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_rows_have_the_same_bits_by_pairs_of_blocks() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let hopper = joined::is_hopper();
    // Even and odd numbers of tiles of rows and of columns, an expert without rows, ends inside a tile, more tiles than blocks.
    for (counts, size) in [
        (&[512][..], [128, 64]),
        (&[700, 0, 1029, 513], [384, 320]),
        (&[3000, 1500, 777, 0, 3001, 900], [2048, 128]),
        (&[641, 640, 639], [640, 832]),
    ] {
        let (together, names) = rows_products(&mut engine, counts, size, None);
        let (apart, single) = rows_products(&mut engine, counts, size, Some(384));
        joined::check_same(&together, &apart, (counts, size));
        for name in ["grouped_wgmma_fwd_pair", "grouped_swiglu_fwd_pair", "grouped_wgmma_bwd_input_pair"] {
            assert_eq!(joined::has(&names, name), hopper, "{names:?}");
            assert!(!joined::has(&single, name), "{single:?}");
        }
    }
}
