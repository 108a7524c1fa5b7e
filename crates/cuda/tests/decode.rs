//! A norm and the layer after it as one kernel, on a real GPU: the same bits as one after the other.
//! `cargo test -p ironhorse-cuda --test decode -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

mod joined;

use ironhorse_core::op::{Act, Gain, LinearFwd, PreAct, ResidualLayerNormFwd, ResidualRmsNormFwd};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Precision, Program, Scalars, Slot};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;

const EPS: f32 = 1e-5;

/// What a case varies.
#[derive(Clone, Copy, Debug)]
struct Case {
    precision: Precision,
    rows: usize,
    width: usize,
    outs: usize,
    /// The gain of an RMS norm before a plain layer; `None` is a layer norm before a layer with bias and GELU.
    rms: Option<Gain>,
    /// The residual replaces `a`.
    in_place: bool,
}

/// A norm and a layer; also their inputs and their outputs.
fn program(case: Case) -> (Program, Vec<Slot>, Vec<Slot>) {
    let Case { precision, rows, width, outs, rms, in_place } = case;
    let act = precision.weights;
    let mut builder = Builder::with_precision(precision);
    let w = builder.param("w", [outs, width], true);
    let [bias, weight, shift] = [("bias", outs), ("norm.w", width), ("norm.b", width)]
        .map(|(name, size)| builder.param(name, [size], false));
    let [a, b, out] = ["a", "b", "out"].map(|name| builder.io(name, [rows, 1, width], act));
    let residual = if in_place { a } else { builder.io("residual", [rows, 1, width], act) };
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows, 1], DType::F32));
    let [pre, result] = ["pre", "result"].map(|name| builder.io(name, [rows, 1, outs], act));
    let (inputs, mut outputs) = (vec![w, bias, weight, shift, a, b], vec![residual, out, rstd, result]);
    if let Some(gain) = rms {
        builder.push(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps: EPS, gain }).unwrap();
        builder.push(LinearFwd { out: result, pre: None, inp: out, weight: w, bias: None }).unwrap();
    } else {
        outputs.extend([mean, pre]);
        builder
            .push(ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias: shift, eps: EPS })
            .unwrap();
        let pre = Some(PreAct { act: Act::Gelu, slot: pre });
        builder.push(LinearFwd { out: result, pre, inp: out, weight: w, bias: Some(bias) }).unwrap();
    }
    (builder.finish().unwrap(), inputs, outputs)
}

/// The bits of all outputs after running the ops, in one range or each by itself, and the names of the kernels of one range.
fn run(engine: &mut CudaEngine, case: Case, together: bool) -> (Vec<Vec<u32>>, Vec<String>) {
    let (program, inputs, outputs) = program(case);
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(7);
    let values: Vec<Vec<f32>> = inputs.iter().map(|slot| rng.uniforms(slot.numel(), -1.0, 1.0)).collect();
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
fn a_norm_inside_the_layer_has_the_same_bits() {
    let mut engine = joined::engine();
    let f32 = Precision::F32;
    let one =
        Case { precision: Precision::BF16, rows: 1, width: 1600, outs: 12000, rms: None, in_place: false };
    let cases = [
        (one, 1),
        (Case { rms: Some(Gain::Weight), ..one }, 1),
        (Case { rms: Some(Gain::OnePlusWeight), width: 1152, outs: 16000, ..one }, 1),
        (Case { width: 768, outs: 22050, ..one }, 1),
        (Case { width: 3072, outs: 6155, ..one }, 1),
        (Case { precision: f32, ..one }, 1),
        (Case { precision: f32, width: 3072, rms: Some(Gain::Weight), ..one }, 1),
        (Case { precision: f32, width: 640, outs: 14001, rms: Some(Gain::OnePlusWeight), ..one }, 1),
        // Weights that are copied in groups, the last block without some of them.
        (Case { outs: 4800, ..one }, 1),
        (Case { outs: 4802, rms: Some(Gain::Weight), ..one }, 1),
        (Case { precision: f32, outs: 2405, ..one }, 1),
        // Not fused: a small weight, in place, several rows, a width without a row block.
        (Case { outs: 3000, ..one }, 2),
        (Case { in_place: true, ..one }, 2),
        (Case { rows: 2, ..one }, 2),
        (Case { width: 64, outs: 300000, ..one }, 2),
    ];
    for (case, expected) in cases {
        let (together, names) = run(&mut engine, case, true);
        joined::check_same(&together, &run(&mut engine, case, false).0, case);
        assert_eq!(names.len(), expected, "{case:?} {names:?}");
    }
}
