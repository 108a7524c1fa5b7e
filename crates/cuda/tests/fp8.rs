//! A norm and the tensor in 8 bits made of its result as one kernel, on a real GPU: the same bits as one after the other.
//! `cargo test -p ironhorse-cuda --test fp8 -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::{Accum, Add, Gain, Quantize, ResidualLayerNormFwd, ResidualRmsNormFwd};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Fp8, Precision, Program, Scalars, Slot};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::Rng;

/// What a case varies.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    /// Of an RMS norm; `None` is a layer norm.
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
    let quantize = Quantize {
        out: Some(by_rows),
        out_t: Some(by_columns),
        inverse,
        d_bias: None,
        inp: out,
        pre: None,
        amax,
        seen: Some(seen),
        act: None,
        format,
        margin: 1,
        unknown: 3,
        accum: Accum::Write,
    };
    builder.push(quantize).unwrap();
    if read {
        builder.push(Add { out: twice, a: out, b: out }).unwrap();
        outputs.extend([out, twice]);
    }
    (builder.finish().unwrap(), vec![weight, bias, a, b, amax, seen], outputs)
}

/// The bits of all outputs after running the ops, in one range or each by itself.
fn run(engine: &mut CudaEngine, case: Case, together: bool) -> Vec<Vec<u32>> {
    let (program, inputs, outputs) = program(case);
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(7);
    let mut values: Vec<Vec<f32>> = inputs.iter().map(|slot| rng.uniforms(slot.numel(), -1.0, 1.0)).collect();
    values[4] = vec![case.amax];
    values[5] = vec![0.0];
    for slot in &outputs {
        engine.write_f32(*slot, &vec![f32::NAN; slot.numel()]).unwrap();
    }
    let count = program.nodes().len();
    // The first run is eager, the second recorded, the third replayed.
    for _ in 0..3 {
        for (slot, values) in inputs.iter().zip(&values) {
            engine.write_f32(*slot, values).unwrap();
        }
        let length = if together { count } else { 1 };
        for start in (0..count).step_by(length) {
            engine.run(&program, start..start + length, &Scalars::default()).unwrap();
        }
    }
    let read = |slot: &Slot| {
        let mut data = vec![0.0; slot.numel()];
        engine.read_f32(*slot, &mut data).unwrap();
        data.iter().map(|value: &f32| value.to_bits()).collect()
    };
    outputs.iter().map(read).collect()
}

fn kernels(engine: &mut CudaEngine, case: Case) -> usize {
    let (program, ..) = program(case);
    engine.reserve(program.layout()).unwrap();
    let mut record = Vec::new();
    engine.profile(&program, 0..2, &[], &Scalars::default(), &mut record).unwrap();
    record.len()
}

#[test]
#[ignore = "needs a GPU"]
fn a_norm_that_is_quantised_on_the_way_has_the_same_bits() {
    let mut engine = CudaEngine::new(Settings::default()).unwrap();
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
                assert_eq!(run(&mut engine, case, true), run(&mut engine, case, false), "{case:?}");
                assert_eq!(kernels(&mut engine, case) == 1, joined, "{case:?}");
            }
        }
    }
}
