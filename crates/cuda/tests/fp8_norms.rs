//! A norm or its backward, and the tensor in 8 bits made of its result, computed together on a real GPU: the same bits as one after the
//! other. `cargo test -p ironhorse-cuda --test fp8_norms -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

mod joined;

use ironhorse_core::op::{
    Accum, Add, Gain, LayerNormBwd, Quantize, ResidualLayerNormFwd, ResidualRmsNormFwd, RmsNormBwd,
};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Fp8, Precision, Program, Scalars, Slot};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;

/// What a case varies.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    /// The gain of an RMS norm; `None` is a layer norm.
    rms: Option<Gain>,
    /// The residual replaces `a`.
    in_place: bool,
    /// Another op reads the norm's result too.
    read: bool,
    /// The largest element of earlier steps.
    amax: f32,
}

/// A norm, its result in 8 bits and perhaps another use of it; also their inputs and their outputs.
fn program(case: Case) -> (Program, Vec<Slot>, Vec<Slot>) {
    let Case { rows, width, rms, in_place, read, .. } = case;
    let mut builder = Builder::with_precision(Precision::BF16);
    let [weight, bias] = ["norm.w", "norm.b"].map(|name| builder.param(name, [width], false));
    let [a, b, out] = ["a", "b", "out"].map(|name| builder.io(name, [rows, 1, width], DType::BF16));
    let residual = if in_place { a } else { builder.io("residual", [rows, 1, width], DType::BF16) };
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows, 1], DType::F32));
    let format = Fp8::E4M3;
    let by_rows = builder.io("q", [rows, width], DType::F8(format));
    let by_columns = builder.io("q_t", [width, rows], DType::F8(format));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    let twice = builder.io("twice", [rows, 1, width], DType::BF16);
    let mut outputs = vec![residual, rstd, by_rows, by_columns, inverse, seen];
    let eps = 1e-5;
    match rms {
        Some(gain) => {
            builder.push(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps, gain }).unwrap()
        }
        None => {
            outputs.push(mean);
            builder
                .push(ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps })
                .unwrap();
        }
    }
    let quantize =
        Quantize { out_t: Some(by_columns), ..joined::quantize(out, by_rows, [inverse, amax, seen]) };
    builder.push(quantize).unwrap();
    if read {
        builder.push(Add { out: twice, a: out, b: out }).unwrap();
        outputs.extend([out, twice]);
    }
    (builder.finish().unwrap(), vec![weight, bias, a, b, amax, seen], outputs)
}

/// The bits of all outputs after running the ops, in one range or each by itself, and the names of the kernels of one range.
fn run(engine: &mut CudaEngine, case: Case, together: bool) -> (Vec<Vec<u32>>, Vec<String>) {
    let (program, inputs, outputs) = program(case);
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(7);
    let mut values: Vec<Vec<f32>> = inputs.iter().map(|slot| rng.uniforms(slot.numel(), -1.0, 1.0)).collect();
    values[4] = vec![case.amax];
    values[5] = vec![0.0];
    joined::set(engine, &outputs, f32::NAN);
    // The first run is eager, the second recorded, the third replayed.
    for _ in 0..3 {
        for (slot, values) in inputs.iter().zip(&values) {
            engine.write_f32(*slot, values).unwrap();
        }
        joined::run(engine, &program, together, &Scalars::default());
    }
    (joined::bits(engine, &outputs), joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn a_norm_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    for (rows, width, joined) in [
        (32, 768, true),
        (1024, 768, true),
        (96, 1600, true),
        (64, 2048, true),
        (48, 768, false),
        (64, 240, false),
    ] {
        for rms in [None, Some(Gain::Weight), Some(Gain::OnePlusWeight)] {
            for (in_place, read, amax) in [(false, false, 3.0), (true, false, 0.0), (false, true, 0.4)] {
                let case = Case { rows, width, rms, in_place, read, amax };
                let (together, names) = run(&mut engine, case, true);
                assert_eq!(together, run(&mut engine, case, false).0, "{case:?}");
                assert_eq!(names.len() == 1 + usize::from(read), joined, "{case:?} {names:?}");
            }
        }
    }
}

/// The backward of a norm, and its result in 8 bits.
#[derive(Clone, Copy, Debug)]
struct NormBwd {
    rows: usize,
    width: usize,
    /// A layer norm, whose result is summed over rows for a bias; else an RMS norm.
    centred: bool,
    accum_inp: Accum,
    format: Fp8,
    amax: f32,
}

/// The bits of the result in bf16 and in 8 bits, of its scale and of its largest element; sums over rows; and the names of the kernels.
fn norm_bwd(
    engine: &mut CudaEngine,
    case: NormBwd,
    together: bool,
) -> (Vec<Vec<u32>>, Vec<f32>, Vec<String>) {
    let NormBwd { rows, width, centred, accum_inp, format, amax: earlier } = case;
    let mut builder = Builder::with_precision(Precision::BF16);
    let [inp, d_out, d_inp] =
        ["inp", "d_out", "d_inp"].map(|name| builder.io(name, [rows, 1, width], DType::BF16));
    let weight = builder.io("weight", [width], DType::BF16);
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows, 1], DType::F32));
    let sums = ["d_weight", "d_shift", "d_bias"].map(|name| builder.io(name, [width], DType::F32));
    let [d_weight, d_shift, d_bias] = sums;
    let q = builder.io("q", [rows, width], DType::F8(format));
    let q_t = builder.io("q_t", [width, rows], DType::F8(format));
    let [inverse, amax, seen] = ["inverse", "amax", "seen"].map(|name| builder.io(name, [1], DType::F32));
    let accum = Accum::Write;
    if centred {
        let d_bias = d_shift;
        builder.push(LayerNormBwd {
            d_inp,
            d_weight,
            d_bias,
            d_out,
            inp,
            mean,
            rstd,
            weight,
            accum_inp,
            accum,
        })
    } else {
        let gain = Gain::Weight;
        builder.push(RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain })
    }
    .unwrap();
    let plain = joined::quantize(d_inp, q, [inverse, amax, seen]);
    builder
        .push(Quantize { out_t: Some(q_t), d_bias: centred.then_some(d_bias), unknown: 6, ..plain })
        .unwrap();
    let program = builder.finish().unwrap();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(23);
    for slot in [inp, d_out, weight, mean, rstd] {
        joined::fill(engine, &mut rng, slot, 1.0);
    }
    let old = rng.uniforms(d_inp.numel(), -1.0, 1.0);
    let outputs = [d_inp, q, q_t, inverse, seen];
    joined::set(engine, outputs.iter().chain(&sums), f32::NAN);
    for _ in 0..3 {
        engine.write_f32(d_inp, &old).unwrap();
        engine.write_f32(amax, &[earlier]).unwrap();
        engine.write_f32(seen, &[0.0]).unwrap();
        joined::run(engine, &program, together, &Scalars::default());
    }
    let bits = joined::bits(engine, &outputs);
    let used = if centred { &sums[..] } else { &sums[..1] };
    let sums = used.iter().flat_map(|slot| {
        let mut sums = vec![0.0; width];
        engine.read_f32(*slot, &mut sums).unwrap();
        sums
    });
    let sums = sums.collect();
    (bits, sums, joined::kernels(engine, &program))
}

#[test]
#[ignore = "needs a GPU"]
fn a_gradient_of_a_norm_that_is_quantised_on_the_way_has_the_same_bits() {
    let _alone = joined::alone();
    let mut engine = joined::engine();
    let plain =
        NormBwd { rows: 96, width: 768, centred: true, accum_inp: Accum::Add, format: Fp8::E5M2, amax: 2.0 };
    for (case, takes) in [
        (plain, true),
        // more chunks of rows than blocks, and one chunk
        (NormBwd { rows: 12_832, ..plain }, true),
        (NormBwd { rows: 32, width: 1024, format: Fp8::E4M3, ..plain }, true),
        (NormBwd { width: 256, accum_inp: Accum::Write, ..plain }, true),
        (NormBwd { rows: 6432, width: 512, centred: false, ..plain }, true),
        (NormBwd { width: 1024, centred: false, accum_inp: Accum::Write, amax: 0.0, ..plain }, true),
        (NormBwd { amax: 1e-3, ..plain }, true),
        // rows that are no whole chunks, and widths that leave lanes without work
        (NormBwd { rows: 48, ..plain }, false),
        (NormBwd { width: 1600, ..plain }, false),
        (NormBwd { width: 784, ..plain }, false),
    ] {
        let (together, sums, names) = norm_bwd(&mut engine, case, true);
        let (apart, wanted, _) = norm_bwd(&mut engine, case, false);
        joined::check_same(&together, &apart, case);
        let kernel = if case.centred { "layernorm_bwd_fp8" } else { "rmsnorm_bwd_fp8" };
        assert_eq!(joined::has(&names, kernel), takes && joined::is_hopper(), "{case:?} {names:?}");
        // of numbers of some units
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * case.rows as f32;
        assert!(sums.len() >= case.width && sums.iter().zip(&wanted).all(close), "{case:?}");
    }
}
