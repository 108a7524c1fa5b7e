//! The norm of gradients of which ops left sums of squares, on a real GPU:
//! `cargo test -p ironhorse-cuda --test squares -- --ignored`
//!
//! On a Hopper GPU the gradients of experts' weights are not read again; on others the same norms are checked as they are made.

#![allow(clippy::unwrap_used, reason = "a test")]

mod joined;

use ironhorse_core::op::{Accum, GradNorm, GroupedFp8BwdWeight, GroupedLinearBwdWeight};
use ironhorse_core::{
    Builder, DType, Engine, EngineExt, Fp8, Pool, Precision, Program, Scalars, Section, Slot,
};
use ironhorse_cuda::CudaEngine;
use ironhorse_testkit::Rng;

/// The gradients of two experts' weights, one product for each, and the norm of these and of what lies before, between and behind them.
struct Net {
    program: Program,
    /// Operands of the products.
    random: Vec<Slot>,
    inverses: Vec<Slot>,
    offsets: Slot,
    weights: [Slot; 2],
    others: Vec<Slot>,
    all: Slot,
    norm: Slot,
    halt: Slot,
}

fn net(rows: usize, experts: usize, sizes: [[usize; 2]; 2], fp8: bool) -> Net {
    let mut b = Builder::with_precision(Precision::BF16);
    let before = b.param("before", [70_001], true);
    let first = b.param("first", [experts, sizes[0][0], sizes[0][1]], true);
    let between = b.param("between", [5], false);
    let second = b.param("second", [experts, sizes[1][0], sizes[1][1]], true);
    let behind = b.param("behind", [64], false);
    let offsets = b.io("offsets", [experts + 1], DType::I32);
    let [norm, halt, loss] = ["norm", "halt", "loss"].map(|name| b.io(name, [1], DType::F32));
    let (mut random, mut inverses) = (Vec::new(), Vec::new());
    b.section(Section::Backward);
    let accum = Accum::FirstWrites;
    for (at, (weight, [oc, ic])) in [first, second].into_iter().zip(sizes).enumerate() {
        let d_weight = b.grad(weight);
        if fp8 {
            let mut io = |name: &str, shape: [usize; 2], format| {
                b.io(format!("{name} {at}"), shape, DType::F8(format))
            };
            let (d_out, inp) = (io("d_out", [oc, rows], Fp8::E5M2), io("inp", [ic, rows], Fp8::E4M3));
            let [d_out_inverse, inp_inverse] =
                ["of d_out", "of inp"].map(|name| b.io(format!("{name} {at}"), [1], DType::F32));
            random.extend([d_out, inp]);
            inverses.extend([d_out_inverse, inp_inverse]);
            b.push(GroupedFp8BwdWeight { d_weight, d_out, inp, d_out_inverse, inp_inverse, offsets, accum })
                .unwrap();
        } else {
            let mut io = |name: &str, cols: usize| b.io(format!("{name} {at}"), [rows, cols], DType::BF16);
            let (d_out, inp) = (io("d_out", oc), io("inp", ic));
            random.extend([d_out, inp]);
            b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum }).unwrap();
        }
    }
    b.section(Section::Update);
    let all = b.flat(Pool::Grads);
    b.push(GradNorm { norm, halt, grads: all, loss, slices: None }).unwrap();
    let weights = [first, second].map(|weight| b.grad(weight));
    let others = [before, between, behind].map(|weight| b.grad(weight)).into();
    Net { program: b.finish().unwrap(), random, inverses, offsets, weights, others, all, norm, halt }
}

/// An engine with random numbers of this size in all operands and in the other gradients.
fn filled(net: &Net, counts: &[usize], size: f32) -> CudaEngine {
    let mut engine = joined::engine();
    engine.reserve(net.program.layout()).unwrap();
    engine.write_i32(net.offsets, &joined::offsets(counts)).unwrap();
    let mut rng = Rng::new(41);
    for &slot in &net.random {
        joined::fill(&mut engine, &mut rng, slot, 1.0);
    }
    if net.inverses.is_empty() {
        for &slot in net.random.iter().step_by(2) {
            joined::fill(&mut engine, &mut rng, slot, size);
        }
    }
    for (at, &slot) in net.inverses.iter().enumerate() {
        engine.write_f32(slot, &[if at % 2 == 0 { size } else { 0.5 }]).unwrap();
    }
    for &slot in &net.others {
        joined::fill(&mut engine, &mut rng, slot, size);
    }
    engine
}

/// The norm as it was computed, which must be that of the gradients in memory; `halt` must say whether it is finite.
fn norm(engine: &mut CudaEngine, net: &Net, what: &str) -> f32 {
    let mut grads = vec![0.0; net.all.numel()];
    engine.read_f32(net.all, &mut grads).unwrap();
    let expected = grads.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
    let [got, halt] = [net.norm, net.halt].map(|slot| f32::from_bits(joined::bits(engine, &[slot])[0][0]));
    engine.write_f32(net.halt, &[0.0]).unwrap();
    let finite = (expected as f32).is_finite();
    let close = (f64::from(got) - expected).abs() <= 2e-7 * expected;
    assert!(close || !finite && !got.is_finite(), "{what}: {got} {expected}");
    assert_eq!(halt == 0.0, finite, "{what}");
    got
}

fn scalars(micro_step: u32) -> Scalars {
    Scalars { micro_step, ..Scalars::default() }
}

const HOPPERS: [&str; 2] = ["grad_norm_left", "grad_norm_rest"];

#[test]
#[ignore = "needs a GPU"]
fn the_norm_is_that_of_the_gradients_however_it_is_made() {
    let _alone = joined::alone();
    let hopper = joined::is_hopper();
    // Pairs of blocks and single ones, tiles that end outside, an expert without rows, more tiles than blocks.
    for (counts, sizes) in [
        (&[130, 0, 14, 192][..], [[192, 64], [128, 320]]),
        (&[16, 300, 4, 736], [[1536, 768], [768, 704]]),
        (&[64; 20], [[512, 768], [320, 256]]),
    ] {
        for fp8 in [false, true] {
            let net = net(counts.iter().sum(), counts.len(), sizes, fp8);
            // Gradients of ordinary size; so small and so large that f32 has no squares of them; and infinite ones.
            for size in [1.0_f32, 1e-25, 1e-37, 1e25, 3e38] {
                let what = format!("{counts:?} {sizes:?} fp8 {fp8} size {size:e}");
                let mut engine = filled(&net, counts, size);
                joined::run(&mut engine, &net.program, true, &scalars(0));
                let whole = norm(&mut engine, &net, &what);
                joined::run(&mut engine, &net.program, false, &scalars(0));
                assert_eq!(whole.to_bits(), norm(&mut engine, &net, &what).to_bits(), "{what}: op by op");
                joined::run(&mut engine, &net.program, true, &scalars(0));
                joined::run(&mut engine, &net.program, true, &scalars(0));
                assert_eq!(whole.to_bits(), norm(&mut engine, &net, &what).to_bits(), "{what}: again");
            }
            let mut engine = filled(&net, counts, 1.0);
            let names = joined::kernels(&mut engine, &net.program);
            let left = HOPPERS.iter().all(|kernel| joined::has(&names, kernel));
            assert_eq!(left, hopper, "{names:?}");
            assert_eq!(joined::has(&names, "grad_norm_parts"), !hopper, "{names:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_norm_sees_what_was_written_to_gradients_after_their_sums() {
    let _alone = joined::alone();
    let counts = [16, 300, 4, 736];
    for fp8 in [false, true] {
        let net = net(counts.iter().sum(), counts.len(), [[512, 256], [320, 64]], fp8);
        let mut engine = filled(&net, &counts, 1.0);
        let (backward, update) = (net.program.range(Section::Backward), net.program.range(Section::Update));
        let step = |engine: &mut CudaEngine, micro_steps: u32, between: &dyn Fn(&mut CudaEngine)| {
            for micro_step in 0..micro_steps {
                engine.run(&net.program, backward.clone(), &scalars(micro_step)).unwrap();
            }
            between(engine);
            engine.run(&net.program, update.clone(), &scalars(micro_steps - 1)).unwrap();
            norm(engine, &net, &format!("fp8 {fp8}, {micro_steps} micro-steps"))
        };
        let nothing = |_: &mut CudaEngine| {};
        let alone = step(&mut engine, 1, &nothing);
        for slot in [net.weights[1], net.weights[0], net.others[1]] {
            let zeros = |engine: &mut CudaEngine| joined::set(engine, [&slot], 0.0);
            assert!(step(&mut engine, 1, &zeros) < alone, "fp8 {fp8}: {slot:?} is 0");
        }
        let one = Slot { offset: net.weights[0].offset + 64, shape: [1].into(), ..net.weights[0] };
        let bad = |engine: &mut CudaEngine| engine.write_f32(one, &[f32::NAN]).unwrap();
        assert!(step(&mut engine, 1, &bad).is_nan(), "fp8 {fp8}");
        assert!(step(&mut engine, 3, &nothing) > 2.0 * alone, "fp8 {fp8}: three micro-steps are added up");
        // one of the two ops again, by itself, after the other one's gradient was changed
        let again = |engine: &mut CudaEngine| {
            joined::set(engine, &net.weights[..1], 2.0);
            engine.run(&net.program, 1..2, &scalars(0)).unwrap();
        };
        assert!(step(&mut engine, 1, &again) > 0.0);
    }
}
