//! The loss of a step is the mean over the targets that count, however its samples are split into micro-steps.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small::{cpu, parameters, session};
use ironhorse::core::op::IGNORED;
use ironhorse::core::{Pool, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{Gpt2Config, ModelConfig};
use ironhorse::train::rng::Rng;
use ironhorse::train::session::SessionSpec;

const SAMPLES: usize = 8;
const SEQ: usize = 21;
/// f32 sums of a few hundred terms in another order.
const F32: f64 = 2e-6;

fn gpt2() -> ModelConfig {
    Gpt2Config::new(SEQ, 53, 2, 3, 24).into()
}

fn llama() -> ModelConfig {
    ModelConfig::parse("hidden=24,layers=2,heads=3,kv_heads=1,ffn=19,vocab=53,context=21").unwrap()
}

fn experts() -> ModelConfig {
    let sizes = "hidden=24,layers=2,heads=3,kv_heads=3,experts=5,top_k=2,ffn=19,vocab=53,context=21";
    ModelConfig::parse(&format!("{sizes},aux_alpha=0.1")).unwrap()
}

/// Samples of which very different numbers of targets count: sample 3 none, sample 5 all, the others their last few.
fn samples(config: &ModelConfig) -> (Vec<i32>, Vec<i32>) {
    let mut rng = Rng::new(3);
    let mut draw =
        || -> Vec<i32> { (0..SAMPLES * SEQ).map(|_| rng.index(config.vocab_size()) as i32).collect() };
    let (x, mut y) = (draw(), draw());
    for (sample, y) in y.chunks_exact_mut(SEQ).enumerate() {
        let masked = match sample {
            3 => SEQ,
            5 => 0,
            _ => SEQ - 1 - sample * 2,
        };
        y[..masked].fill(IGNORED);
    }
    (x, y)
}

/// Loss, gradients and the routers' auxiliary losses of one step in so many micro-steps; `scalars_of` gets the targets
/// of the step and those of the micro-step.
fn step(
    config: ModelConfig,
    (x, y): (&[i32], &[i32]),
    micro_steps: usize,
    scalars_of: impl Fn(&[i32], &[i32]) -> Scalars,
) -> (f64, Vec<f64>, Vec<f64>) {
    let spec = SessionSpec { train: Some((SAMPLES / micro_steps, SEQ)), ..SessionSpec::default() };
    let mut session = session(Box::new(CpuEngine::new(2)), config, &spec, 11);
    let tokens = x.len() / micro_steps;
    for (micro_step, (x, part)) in (0..).zip(x.chunks(tokens).zip(y.chunks(tokens))) {
        session.micro_step(x, part, &Scalars { micro_step, ..scalars_of(y, part) }).unwrap();
    }
    let gradients = parameters(&mut session, Pool::Grads).into_iter().map(f64::from).collect();
    let aux = session.routing().unwrap().iter().map(|layer| f64::from(layer.aux)).collect();
    let (loss, _) = session.update(&Scalars::default()).unwrap();
    (f64::from(loss), gradients, aux)
}

fn whole(y: &[i32], _: &[i32]) -> Scalars {
    Scalars::default().counting(y)
}

/// |a - b| / |b| of two lists.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn accumulation_equals_one_large_batch() {
    for config in [gpt2(), llama()] {
        let (x, y) = samples(&config);
        let (loss, gradients, _) = step(config, (&x, &y), 1, whole);
        for micro_steps in [2, 8] {
            let (other, parts, _) = step(config, (&x, &y), micro_steps, whole);
            assert!(
                (other - loss).abs() <= F32 * loss,
                "{micro_steps} micro-steps: loss {other}, not {loss}"
            );
            let far = distance(&parts, &gradients);
            assert!(far <= F32, "{micro_steps} micro-steps: gradients differ by {far:e}");
        }
        // what goes wrong elsewhere, and that these samples would show it: the mean of the means of micro-batches
        let means = |_: &[i32], part: &[i32]| {
            let scalars = Scalars::default().counting(part);
            Scalars { loss_scale: scalars.loss_scale / 8.0, ..scalars }
        };
        let (other, parts, _) = step(config, (&x, &y), 8, means);
        assert!((other - loss).abs() > 1e-2 * loss && distance(&parts, &gradients) > 0.1);
    }
}

/// A masked target is as if it had never been there: the loss is that of the samples one by one, weighted by what counts.
#[test]
fn the_loss_is_the_mean_over_the_targets_that_count() {
    let config = gpt2();
    let (x, y) = samples(&config);
    let (loss, _, _) = step(config, (&x, &y), 1, whole);
    let spec = SessionSpec { eval: Some((1, SEQ)), ..SessionSpec::default() };
    let mut session = session(cpu(), config, &spec, 11);
    let (mut sum, mut count) = (0.0, 0.0);
    for (x, y) in x.chunks(SEQ).zip(y.chunks(SEQ)) {
        let counted = y.iter().filter(|&&target| target != IGNORED).count() as f64;
        sum += f64::from(session.evaluate(x, y).unwrap()) * counted;
        count += counted;
    }
    assert!((sum / count - loss).abs() <= F32 * loss, "{} is not {loss}", sum / count);
}

#[test]
fn a_step_without_a_target_that_counts_is_zero_and_not_nan() {
    for config in [gpt2(), llama(), experts()] {
        let (x, y) = samples(&config);
        let (loss, gradients, _) = step(config, (&x, &vec![IGNORED; y.len()]), 2, whole);
        assert_eq!(loss, 0.0, "{}", config.kind());
        assert!(gradients.iter().all(|&d| d == 0.0), "{}", config.kind());
    }
}

/// The auxiliary loss of routers is about all tokens: masks do not change its weight.
#[test]
fn masks_leave_the_losses_of_routers_alone() {
    let config = experts();
    let (x, y) = samples(&config);
    let all: Vec<i32> = y.iter().map(|&target| target.max(0)).collect();
    let (_, _, masked) = step(config, (&x, &y), 2, whole);
    let (_, _, plain) = step(config, (&x, &all), 2, whole);
    assert!(plain.len() == 2 && distance(&masked, &plain) <= F32, "{masked:?} {plain:?}");
}
