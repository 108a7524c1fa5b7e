//! An update whose loss or gradient norm is non-finite changes no bit of weights and moments, and neither does the next
//! one, which was already in flight. After `clear_halt` training continues as if neither had been started.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small::{self, bits};
use ironhorse::core::{Engine, EngineExt, Optimizer, Pool, Precision, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::cuda::{CudaEngine, Settings};
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};

const TRAIN: (usize, usize) = (2, 17);
/// Larger than a training batch, so that its tokens overlap other io slots of the training program.
const EVAL: (usize, usize) = (4, 33);

fn models() -> [ModelConfig; 2] {
    let sizes =
        "hidden=40,layers=2,heads=6,kv_heads=3,head_dim=10,experts=5,top_k=2,ffn=40,vocab=203,context=40";
    [Gpt2Config::new(40, 203, 2, 2, 32).into(), ModelConfig::parse(sizes).unwrap()]
}

fn tokens(count: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    let mut rng = Rng::new(seed);
    let stream: Vec<i32> = (0..=count).map(|_| 1 + rng.index(202) as i32).collect();
    (stream[..count].to_vec(), stream[1..].to_vec())
}

fn scalars(step: u32) -> Scalars {
    Scalars { seed: 3, ..small::scalars(step, TRAIN.0 * TRAIN.1, 1e-2) }
}

fn forward_backward(session: &mut Session, step: u32) {
    let (x, y) = tokens(TRAIN.0 * TRAIN.1, step.into());
    session.micro_step(&x, &y, &scalars(step)).unwrap();
}

fn step(session: &mut Session, step: u32) -> [u32; 2] {
    forward_backward(session, step);
    let (loss, norm) = session.update(&scalars(step)).unwrap();
    assert!(loss.is_finite() && norm > 0.0, "loss {loss}, norm {norm}");
    [loss.to_bits(), norm.to_bits()]
}

/// Every bit of the weights, masters and moments.
fn state(session: &mut Session) -> Vec<Vec<u32>> {
    let has_master = session.train_program().unwrap().precision().has_master();
    let pools = [Pool::Params, Pool::Moment1, Pool::Moment2, Pool::Master];
    bits(session, &pools[..3 + usize::from(has_master)])
}

/// How a step goes wrong.
#[derive(Clone, Copy, Debug)]
enum Bad {
    Loss(f32),
    Gradient(f32),
}

impl Bad {
    fn spoil(self, session: &mut Session) {
        let program = session.train_program().unwrap();
        let (slot, value) = match self {
            Self::Loss(value) => (program.io("loss").unwrap(), value),
            Self::Gradient(value) => (program.params()[1].grad(), value),
        };
        session.engine().write_f32(slot, &vec![value; slot.numel()]).unwrap();
    }
}

/// Two good steps, a bad one with another in flight behind it, then two good ones.
fn bad_steps_change_nothing(engine: &dyn Fn() -> Box<dyn Engine>, precision: Precision) {
    for config in models() {
        let spec = SessionSpec { train: Some(TRAIN), eval: Some(EVAL), precision, ..SessionSpec::default() };
        let start = || {
            let mut session = small::session(engine(), config, &spec, 11);
            for s in 1..=2 {
                step(&mut session, s);
            }
            session
        };
        let mut never_bad = start();
        let before = state(&mut never_bad);
        let want = [3, 4].map(|s| step(&mut never_bad, s));
        let after = state(&mut never_bad);
        for bad in [
            Bad::Loss(f32::NAN),
            Bad::Loss(f32::INFINITY),
            Bad::Gradient(f32::NAN),
            Bad::Gradient(f32::NEG_INFINITY),
        ] {
            let what = format!("{} in {precision:?}, {bad:?}", config.kind());
            let mut session = start();
            assert!(state(&mut session) == before, "{what}: the same start");
            forward_backward(&mut session, 3);
            bad.spoil(&mut session);
            let first = session.start_update(&scalars(3)).unwrap();
            forward_backward(&mut session, 4);
            let second = session.start_update(&scalars(4)).unwrap();
            let (loss, norm) = session.finish_update(first).unwrap();
            assert_eq!(loss.is_finite(), matches!(bad, Bad::Gradient(_)), "{what}: loss {loss}");
            assert_eq!(norm.is_finite(), matches!(bad, Bad::Loss(_)), "{what}: norm {norm}");
            let (loss, norm) = session.finish_update(second).unwrap();
            assert!(loss.is_finite() && norm.is_finite(), "{what}: the second step is a good one");
            assert!(state(&mut session) == before, "{what}: a halted step has changed something");

            // Neither another step nor an evaluation clears the halt.
            let (x, y) = tokens(EVAL.0 * EVAL.1, 9);
            assert!(session.evaluate(&x, &y).unwrap().is_finite());
            step(&mut session, 3);
            assert!(state(&mut session) == before, "{what}: a step after the halt changed something");

            session.clear_halt().unwrap();
            assert!(session.evaluate(&x, &y).unwrap().is_finite());
            let got = [3, 4].map(|s| step(&mut session, s));
            assert_eq!(got, want, "{what}");
            assert!(state(&mut session) == after, "{what}: not the state of a run without the bad step");
        }
    }
}

#[test]
fn a_bad_step_changes_nothing_on_the_cpu() {
    for optimizer in Optimizer::ALL {
        let precision = Precision::F32.with_optimizer(optimizer);
        bad_steps_change_nothing(&|| Box::new(CpuEngine::new(2)), precision);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_bad_step_changes_nothing_on_cuda() {
    let bf16 = Precision::BF16;
    for precision in [
        Precision::F32,
        bf16,
        Precision::BF16_F32_GRADS,
        bf16.with_residual(),
        bf16.with_bf16_moments(),
        bf16.with_residual().with_bf16_moments(),
        bf16.with_optimizer(Optimizer::Muon),
        bf16.with_residual().with_bf16_moments().with_optimizer(Optimizer::Muon),
    ] {
        bad_steps_change_nothing(&|| Box::new(CudaEngine::new(Settings::default()).unwrap()), precision);
    }
}
