//! The router's backward where one expert has almost all of the probability: the remaining gradient is small but
//! correct.
#![allow(clippy::unwrap_used)]

use ironhorse_core::op::{RouterBwd, RouterFwd};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cpu::CpuEngine;
use ironhorse_testkit::{OracleEngine, Rng};

const TOKENS: usize = 40;
const EXPERTS: usize = 5;
const CHOSEN: usize = 2;

struct Router {
    program: Program,
    logits: Slot,
    d_weights: Slot,
    load: Slot,
    d_logits: Slot,
}

fn router(alpha: f32) -> Router {
    let mut b = Builder::new();
    let mut io = |name: &str, cols: usize, dtype| b.io(name.to_owned(), [TOKENS, cols], dtype);
    let [logits, probs, d_logits] = ["logits", "probs", "d_logits"].map(|name| io(name, EXPERTS, DType::F32));
    let [weights, d_weights] = ["weights", "d_weights"].map(|name| io(name, CHOSEN, DType::F32));
    let experts = io("experts", CHOSEN, DType::I32);
    let load = b.io("load", [EXPERTS], DType::F32);
    b.push(RouterFwd { probs, weights, experts, logits }).unwrap();
    b.push(RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha }).unwrap();
    Router { program: b.finish().unwrap(), logits, d_weights, load, d_logits }
}

/// The gradient for logits of which the last is larger than the others by `ahead`.
fn gradient(engine: &mut dyn Engine, router: &Router, ahead: f32) -> Vec<f32> {
    let mut rng = Rng::new(3);
    engine.reserve(router.program.layout()).unwrap();
    let mut logits = rng.uniforms(TOKENS * EXPERTS, -1.0, 1.0);
    logits.iter_mut().skip(EXPERTS - 1).step_by(EXPERTS).for_each(|logit| *logit += ahead);
    engine.write_f32(router.logits, &logits).unwrap();
    engine.write_f32(router.d_weights, &rng.uniforms(TOKENS * CHOSEN, -1.0, 1.0)).unwrap();
    engine.write_f32(router.load, &rng.uniforms(EXPERTS, 0.0, 1.0)).unwrap();
    engine.run(&router.program, 0..2, &Scalars::default()).unwrap();
    let mut d_logits = vec![0.0; TOKENS * EXPERTS];
    engine.read_f32(router.d_logits, &mut d_logits).unwrap();
    d_logits
}

#[test]
fn small_gradients_of_a_sure_router_are_right() {
    for (alpha, ahead) in [(0.0, 0.0), (0.0, 8.0), (0.0, 16.0), (1.0, 8.0), (1.0, 16.0)] {
        let router = router(alpha);
        let want = gradient(&mut OracleEngine::new(), &router, ahead);
        let got = gradient(&mut CpuEngine::new(1), &router, ahead);
        let norm = |values: &mut dyn Iterator<Item = f32>| {
            values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
        };
        let off =
            norm(&mut got.iter().zip(&want).map(|(got, want)| got - want)) / norm(&mut want.iter().copied());
        assert!(off < 2e-6, "alpha {alpha}, {ahead} ahead: {off:.1e}");
    }
}
