//! GELU's slopes in the place of the numbers before it, on a real GPU:
//! `IRONHORSE_GELU_PRODUCTS=own cargo test -p ironhorse-cuda --test gelu_slopes -- --ignored`
//!
//! Two ops that run in one range pass slopes, each by itself passes what the slot is said to hold. Without the variable slopes pass only
//! where they are faster.

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::{Accum, Act, LinearBwdInput, LinearBwdWeight, LinearFwd, PreAct};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::Rng;

struct Net {
    program: Program,
    random: Vec<Slot>,
    pre: Slot,
    results: Vec<Slot>,
}

/// A layer with GELU behind it, the input gradient of the layer behind that, and the gradient of the first one's weight and bias.
fn net([rows, width, ffn]: [usize; 3], bias: bool) -> Net {
    let mut b = Builder::new();
    let mut slot = |name: &str, sizes: [usize; 2]| b.io(name, sizes, DType::BF16);
    let [inp, d_out] = ["inp", "d_out"].map(|name| slot(name, [rows, width]));
    let [out, pre, d_pre] = ["out", "pre", "d_pre"].map(|name| slot(name, [rows, ffn]));
    let (weight, next) = (slot("weight", [ffn, width]), slot("next", [width, ffn]));
    let of_bias = bias.then(|| b.io("bias", [ffn], DType::BF16));
    let d_weight = b.io("d_weight", [ffn, width], DType::F32);
    let d_bias = b.io("d_bias", [ffn], DType::F32);
    let act = Some(PreAct { act: Act::Gelu, slot: pre });
    let accum = Accum::Write;
    b.push(LinearFwd { out, pre: act, inp, weight, bias: of_bias }).unwrap();
    b.push(LinearBwdInput { d_inp: d_pre, d_out, weight: next, pre: act }).unwrap();
    b.push(LinearBwdWeight { d_weight, d_bias: Some(d_bias), d_out: d_pre, inp, accum }).unwrap();
    let random = [inp, d_out, weight, next].into_iter().chain(of_bias).collect();
    Net { program: b.finish().unwrap(), random, pre, results: vec![out, d_pre, d_weight, d_bias] }
}

fn read(engine: &mut CudaEngine, slot: Slot) -> Vec<f32> {
    let mut out = vec![0.0; slot.numel()];
    engine.read_f32(slot, &mut out).unwrap();
    out
}

/// Runs the ops in ranges that begin and end at `cuts`; gives the results, and what is between the forward and its backward.
fn run(engine: &mut CudaEngine, net: &Net, scale: f32, cuts: &[usize]) -> (Vec<Vec<f32>>, Vec<f32>) {
    let mut rng = Rng::new(11);
    for &slot in &net.random {
        engine.write_f32(slot, &rng.uniforms(slot.numel(), -scale, scale)).unwrap();
    }
    for cut in cuts.windows(2) {
        engine.run(&net.program, cut[0]..cut[1], &Scalars::default()).unwrap();
    }
    let results = net.results.iter().map(|&slot| read(engine, slot)).collect();
    (results, read(engine, net.pre))
}

/// Of the tanh form of GELU, in f64.
fn slope(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let t = (root * (x + 0.044715 * x.powi(3))).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x)
}

#[test]
#[ignore = "needs a GPU"]
fn slopes_pass_between_ops_that_run_together_with_the_same_bits() {
    let asked = std::env::var("IRONHORSE_GELU_PRODUCTS").is_ok_and(|choice| choice == "own");
    let hopper = ironhorse_cuda::devices().unwrap()[0].compute == (9, 0);
    // a scale of 20 makes numbers far beyond those at which GELU is a straight line
    let cases =
        [([128, 64, 256], 1.0), ([4096, 256, 1024], 0.5), ([256, 320, 1280], 20.0), ([130, 64, 256], 1.0)];
    for (sizes, scale) in cases {
        for bias in [true, false] {
            let net = net(sizes, bias);
            let mut engine = CudaEngine::new(Settings::default()).unwrap();
            engine.reserve(net.program.layout()).unwrap();
            let (whole, between) = run(&mut engine, &net, scale, &[0, 3]);
            let (apart, pre) = run(&mut engine, &net, scale, &[0, 1, 2, 3]);
            let (mixed, _) = run(&mut engine, &net, scale, &[0, 2, 3]);

            let mut kernels = Vec::new();
            engine.profile(&net.program, 0..3, &[], &Scalars::default(), &mut kernels).unwrap();
            let passed =
                |part: &str| kernels.iter().any(|at| at.name.contains(part) && at.name.contains("_slopes"));
            let both = [passed("linear_gelu_fwd"), passed("linear_gelu_bwd")];
            let own = asked && hopper && sizes[0] % 128 == 0;
            assert!(both == [own; 2] || (!asked && both[0] == both[1]), "{sizes:?}: {both:?}");
            let slopes = both[0];

            // without slopes another product may have been chosen for ops that run apart, whose bits are its own
            if asked {
                // the bias is summed in another order where its op runs by itself
                assert!(
                    whole[..2] == apart[..2],
                    "{sizes:?} {bias}: result and gradient of ops that run apart"
                );
                assert!(
                    whole[..3] == mixed[..3],
                    "{sizes:?} {bias}: and with the gradient of the weight apart"
                );
            }
            assert!(
                whole == run(&mut engine, &net, scale, &[0, 3]).0,
                "{sizes:?} {bias}: the same bits again"
            );
            for (&at, &x) in between.iter().zip(&pre) {
                let expected = if slopes { slope(x.into()) } else { x.into() };
                let close = (f64::from(at) - expected).abs() <= 0.004 * expected.abs() + 1e-4;
                assert!(close, "{sizes:?} {bias}: {at} at {x}, expected {expected}");
            }
            assert!(whole.iter().flatten().all(|x| x.is_finite()), "{sizes:?} {bias}");
        }
    }
}
