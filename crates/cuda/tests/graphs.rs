//! A range of products run launch by launch, recorded, and replayed, on a real GPU: the same bits each time.
//! `cargo test -p ironhorse-cuda --test graphs -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::LinearFwd;
use ironhorse_core::{Builder, Engine, Precision, Scalars};
use ironhorse_testkit::Rng;

mod joined;

/// The number of products: more than have counters of their own, each of more tiles than a GPU has multiprocessors.
const PRODUCTS: usize = 1100;
const ROWS: usize = 4096;
const WIDTH: usize = 256;
const OUTS: usize = 2560;

#[test]
#[ignore = "needs a GPU"]
fn products_have_the_same_bits_replayed() {
    let mut builder = Builder::with_precision(Precision::BF16);
    let act = Precision::BF16.weights;
    let weights = ["v", "w"].map(|name| builder.param(name, [OUTS, WIDTH], true));
    let inp = builder.io("inp", [ROWS, 1, WIDTH], act);
    let outs: Vec<_> = (0..4).map(|at| builder.io(format!("out{at}"), [ROWS, 1, OUTS], act)).collect();
    for at in 0..PRODUCTS {
        let (out, weight) = (outs[at % 4], weights[at % 2]);
        builder.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
    }
    let program = builder.finish().unwrap();
    let mut engine = joined::engine();
    engine.reserve(program.layout()).unwrap();
    let mut rng = Rng::new(3);
    for slot in weights.into_iter().chain([inp]) {
        joined::fill(&mut engine, &mut rng, slot, 1.0);
    }
    let runs = [(); 3].map(|()| {
        joined::set(&mut engine, &outs, f32::NAN);
        joined::run(&mut engine, &program, true, &Scalars::default());
        joined::bits(&mut engine, &outs)
    });
    assert!(runs[0].iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    assert_eq!(runs[0][0], runs[0][2]);
    assert_ne!(runs[0][0], runs[0][1], "two weights");
    assert!(runs[1] == runs[0], "recorded");
    assert!(runs[2] == runs[0], "replayed");
}
