//! Training steps of whole models on the CPU engine: settings that must not matter do not change a bit, the numbers are
//! those of the oracle, and the memory is as planned.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small::{self, parameters, scalars, step, tokens};
use ironhorse::core::{Engine, Pool, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{Gpt2Config, ModelConfig, Recompute};
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse_testkit::OracleEngine;

const LR: f32 = 1e-2;

/// Odd sizes on purpose: none is a multiple of a SIMD width or a tile.
fn odd() -> ModelConfig {
    Gpt2Config::new(70, 203, 3, 5, 40).into()
}

/// Odd sizes of a mixture of experts, whose heads together are not as wide as the residual stream.
fn odd_experts() -> ModelConfig {
    let sizes =
        "hidden=40,layers=3,heads=6,kv_heads=3,head_dim=10,experts=5,top_k=2,ffn=37,vocab=203,context=70";
    ModelConfig::parse(&format!("{sizes},aux_alpha=0.1")).unwrap()
}

fn odd_llama() -> ModelConfig {
    ModelConfig::parse("hidden=40,layers=3,heads=5,kv_heads=1,ffn=37,vocab=203,context=70").unwrap()
}

fn session(
    engine: Box<dyn Engine>,
    config: ModelConfig,
    train: (usize, usize),
    recompute: Recompute,
) -> Session {
    let spec = SessionSpec { train: Some(train), recompute, ..SessionSpec::default() };
    small::session(engine, config, &spec, 11)
}

/// Losses of some steps and all weights after them.
fn run(session: &mut Session, batch: usize, seq: usize, steps: u32) -> (Vec<u32>, Vec<u32>) {
    let vocab = session.config().vocab_size();
    let mut losses = Vec::new();
    for number in 1..=steps {
        let (x, y) = tokens(vocab, batch * seq, u64::from(number));
        let (loss, norm) = step(session, (&x, &y), &scalars(number, batch * seq, LR));
        assert!(loss.is_finite() && norm > 0.0);
        losses.extend([loss.to_bits(), norm.to_bits()]);
    }
    (losses, bits(session, Pool::Params))
}

fn bits(session: &mut Session, pool: Pool) -> Vec<u32> {
    parameters(session, pool).iter().map(|v| v.to_bits()).collect()
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for config in [odd(), odd_experts(), odd_llama()] {
        let with = |threads| {
            let engine = Box::new(CpuEngine::new(threads));
            run(&mut session(engine, config, (3, 67), Recompute::None), 3, 67, 3)
        };
        let one = with(1);
        for threads in [2, 3, 4, 7] {
            assert_eq!(with(threads), one, "{} with {threads} threads", config.kind());
        }
    }
}

#[test]
fn recomputation_changes_no_bit_and_needs_less_memory() {
    let levels = [Recompute::Gelu, Recompute::Full, Recompute::Experts];
    for (config, levels) in [(odd(), &levels[..2]), (odd_experts(), &levels), (odd_llama(), &levels[..2])] {
        let mut plain = session(Box::new(CpuEngine::new(2)), config, (3, 67), Recompute::None);
        let want = run(&mut plain, 3, 67, 3);
        let mut last = plain.train_program().unwrap().layout().bytes(Pool::Activations);
        for &recompute in levels {
            let mut other = session(Box::new(CpuEngine::new(2)), config, (3, 67), recompute);
            assert_eq!(run(&mut other, 3, 67, 3), want, "{} {recompute:?}", config.kind());
            let bytes = other.train_program().unwrap().layout().bytes(Pool::Activations);
            assert!(bytes < last, "{} {recompute:?}: {bytes} is not below {last}", config.kind());
            last = bytes;
        }
    }
}

#[test]
fn gradients_and_losses_agree_with_the_f64_oracle() {
    for (batch, seq, config) in [
        (3, 67, odd()),
        (1, 1, odd()),
        (2, 9, Gpt2Config::new(9, 5, 1, 1, 8).into()),
        (3, 67, odd_experts()),
        (1, 1, odd_experts()),
        (3, 67, odd_llama()),
    ] {
        let (x, y) = tokens(config.vocab_size(), batch * seq, 5);
        let scalars = scalars(1, batch * seq, LR);
        let [got, want] = [Box::new(CpuEngine::new(2)) as Box<dyn Engine>, Box::new(OracleEngine::new())]
            .map(|engine| {
                let mut session = session(engine, config, (batch, seq), Recompute::None);
                let (loss, norm) = step(&mut session, (&x, &y), &scalars);
                (loss, norm, parameters(&mut session, Pool::Grads))
            });
        assert!((got.0 - want.0).abs() <= 1e-6 * want.0, "loss {} for {}", got.0, want.0);
        assert!((got.1 - want.1).abs() <= 1e-5 * want.1, "norm {} for {}", got.1, want.1);
        assert_close_by_tensor(&config, &got.2, &want.2, 5e-6);
    }
}

#[test]
fn accumulated_gradients_equal_one_large_batch() {
    // the auxiliary loss of a batch is not the mean of those of its parts
    let ModelConfig::Moe(mut experts) = odd_experts() else { panic!("a mixture of experts") };
    experts.aux_alpha = 0.0;
    for config in [odd(), experts.into(), odd_llama()] {
        accumulated_equals_whole(config);
    }
}

fn accumulated_equals_whole(config: ModelConfig) {
    let (x, y) = tokens(config.vocab_size(), 4 * 31, 9);
    let mut whole = session(Box::new(CpuEngine::new(2)), config, (4, 31), Recompute::None);
    let s = scalars(1, 4 * 31, LR);
    let (want_loss, want_norm) = step(&mut whole, (&x, &y), &s);
    let want = parameters(&mut whole, Pool::Grads);

    let mut parts = session(Box::new(CpuEngine::new(2)), config, (1, 31), Recompute::None);
    // Gradients of an earlier step must not matter: fill them with NaN.
    parts
        .load(Pool::Grads, |_, values| {
            values.fill(f32::NAN);
            Ok(())
        })
        .unwrap();
    for micro_step in 0..4 {
        let range = micro_step * 31..(micro_step + 1) * 31;
        let s = Scalars { micro_step: micro_step as u32, ..s };
        parts.micro_step(&x[range.clone()], &y[range], &s).unwrap();
    }
    // The gaps between parameters are not written: only the NaN in parameters is overwritten, so the norm is finite.
    let (loss, norm) = parts.update(&s).unwrap();
    assert!((loss - want_loss).abs() < 1e-6 * want_loss, "{loss} for {want_loss}");
    assert!((norm - want_norm).abs() < 1e-5 * want_norm, "{norm} for {want_norm}");
    assert_close_by_tensor(&config, &parameters(&mut parts, Pool::Grads), &want, 5e-6);
}

/// Compares each tensor for itself: a large one must not hide a small one.
fn assert_close_by_tensor(config: &ModelConfig, got: &[f32], want: &[f32], tolerance: f64) {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let mut start = 0;
    for spec in config.tensors() {
        let range = start..start + spec.shape.numel();
        start = range.end;
        let (got, want) = (&got[range.clone()], &want[range]);
        let diff = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
        let size = norm(&mut want.iter().map(|w| f64::from(*w)));
        assert!(diff <= tolerance * size, "{}: differs by {:e}", spec.name, diff / size);
    }
}

#[test]
fn the_reported_peak_is_what_the_engine_holds() {
    for (seq, config) in [(5, odd()), (67, odd()), (67, odd_experts())] {
        let mut session = session(Box::new(CpuEngine::new(1)), config, (2, seq), Recompute::None);
        let planned = session.train_program().unwrap().layout().total();
        assert_eq!(session.engine().memory().allocated, planned);
        run(&mut session, 2, seq, 2);
        assert_eq!(session.engine().memory().allocated, planned, "a step must not take more");
    }
}

#[test]
fn decoding_with_the_cache_gives_the_logits_of_the_whole_sequence() {
    for config in [odd(), odd_experts(), odd_llama()] {
        decoding_equals_whole(config);
    }
}

fn decoding_equals_whole(config: ModelConfig) {
    let (x, _) = tokens(config.vocab_size(), 20, 3);
    let spec = SessionSpec { eval: Some((1, 1)), decode: Some(1), ..SessionSpec::default() };
    let mut session = small::session(Box::new(CpuEngine::new(2)), config, &spec, 11);
    let mut logits = Vec::new();
    let mut from_cache = 0.0_f64;
    for t in 0..x.len() - 1 {
        session.decode(&x[t..=t], t, &mut logits).unwrap();
        let row = &logits[..config.vocab_size()];
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        from_cache += sum.ln() - f64::from(row[x[t + 1] as usize]);
    }
    let n = x.len() - 1;
    let spec = SessionSpec { eval: Some((1, n)), ..SessionSpec::default() };
    let mut whole = small::session(Box::new(CpuEngine::new(2)), config, &spec, 11);
    let want = f64::from(whole.evaluate(&x[..n], &x[1..]).unwrap());
    let got = from_cache / n as f64;
    assert!((got - want).abs() < 1e-6 * want, "{got} for {want}");
}
