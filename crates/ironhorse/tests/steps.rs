//! Training steps of whole models on the CPU engine: the same bits whatever is varied that must not matter, the
//! oracle's numbers, and the memory that was planned.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use ironhorse::core::{Engine, Pool, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::Gpt2Config;
use ironhorse::train::model::gpt2::Recompute;
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse_testkit::OracleEngine;

/// Odd on purpose: nothing divides a SIMD width or a tile.
fn odd() -> Gpt2Config {
    Gpt2Config::new(70, 203, 3, 5, 40)
}

fn tokens(config: &Gpt2Config, count: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    let mut rng = Rng::new(seed);
    let stream: Vec<i32> = (0..=count).map(|_| rng.index(config.vocab_size) as i32).collect();
    (stream[..count].to_vec(), stream[1..].to_vec())
}

fn session(
    engine: Box<dyn Engine>,
    config: Gpt2Config,
    train: (usize, usize),
    recompute: Recompute,
) -> Session {
    let spec = SessionSpec { train: Some(train), recompute, ..SessionSpec::default() };
    let mut session = Session::new(engine, config, &spec).unwrap();
    session.init(11).unwrap();
    session
}

fn scalars(step: u32, tokens: usize) -> Scalars {
    let loss_scale = 1.0 / tokens as f32;
    Scalars { step, loss_scale, lr: 1e-2, weight_decay: 0.1, grad_clip: 1.0, ..Scalars::default() }
}

/// Losses of some steps and all weights after them.
fn run(session: &mut Session, batch: usize, seq: usize, steps: u32) -> (Vec<u32>, Vec<u32>) {
    let config = *session.config();
    let mut losses = Vec::new();
    for step in 1..=steps {
        let (x, y) = tokens(&config, batch * seq, u64::from(step));
        let scalars = scalars(step, batch * seq);
        session.micro_step(&x, &y, &scalars).unwrap();
        let (loss, norm) = session.update(&scalars).unwrap();
        assert!(loss.is_finite() && norm > 0.0);
        losses.extend([loss.to_bits(), norm.to_bits()]);
    }
    (losses, bits(session, Pool::Params))
}

fn values(session: &mut Session, pool: Pool) -> Vec<f32> {
    let mut all = Vec::new();
    let mut one = Vec::new();
    for spec in session.config().tensors() {
        session.read_param(pool, &spec.name, &mut one).unwrap();
        all.extend_from_slice(&one);
    }
    all
}

fn bits(session: &mut Session, pool: Pool) -> Vec<u32> {
    values(session, pool).iter().map(|v| v.to_bits()).collect()
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let one = run(&mut session(Box::new(CpuEngine::new(1)), odd(), (3, 67), Recompute::None), 3, 67, 3);
    for threads in [2, 3, 4, 7] {
        let engine = Box::new(CpuEngine::new(threads));
        assert_eq!(
            run(&mut session(engine, odd(), (3, 67), Recompute::None), 3, 67, 3),
            one,
            "{threads} threads"
        );
    }
}

#[test]
fn recomputation_changes_no_bit_and_needs_less_memory() {
    let mut plain = session(Box::new(CpuEngine::new(2)), odd(), (3, 67), Recompute::None);
    let want = run(&mut plain, 3, 67, 3);
    let mut last = plain.train_program().unwrap().layout().bytes(Pool::Activations);
    for recompute in [Recompute::Gelu, Recompute::Full] {
        let mut other = session(Box::new(CpuEngine::new(2)), odd(), (3, 67), recompute);
        assert_eq!(run(&mut other, 3, 67, 3), want, "{recompute:?}");
        let bytes = other.train_program().unwrap().layout().bytes(Pool::Activations);
        assert!(bytes < last, "{recompute:?}: {bytes} is not below {last}");
        last = bytes;
    }
}

#[test]
fn gradients_and_losses_agree_with_the_f64_oracle() {
    for (batch, seq, config) in [(3, 67, odd()), (1, 1, odd()), (2, 9, Gpt2Config::new(9, 5, 1, 1, 8))] {
        let (x, y) = tokens(&config, batch * seq, 5);
        let scalars = scalars(1, batch * seq);
        let [got, want] = [Box::new(CpuEngine::new(2)) as Box<dyn Engine>, Box::new(OracleEngine::new())]
            .map(|engine| {
                let mut session = session(engine, config, (batch, seq), Recompute::None);
                session.micro_step(&x, &y, &scalars).unwrap();
                let (loss, norm) = session.update(&scalars).unwrap();
                (loss, norm, values(&mut session, Pool::Grads))
            });
        assert!((got.0 - want.0).abs() <= 1e-6 * want.0, "loss {} for {}", got.0, want.0);
        assert!((got.1 - want.1).abs() <= 1e-5 * want.1, "norm {} for {}", got.1, want.1);
        assert_close_by_tensor(&config, &got.2, &want.2, 5e-6);
    }
}

#[test]
fn accumulated_gradients_equal_one_large_batch() {
    let config = odd();
    let (x, y) = tokens(&config, 4 * 31, 9);
    let mut whole = session(Box::new(CpuEngine::new(2)), config, (4, 31), Recompute::None);
    let s = scalars(1, 4 * 31);
    whole.micro_step(&x, &y, &s).unwrap();
    let (want_loss, want_norm) = whole.update(&s).unwrap();
    let want = values(&mut whole, Pool::Grads);

    let mut parts = session(Box::new(CpuEngine::new(2)), config, (1, 31), Recompute::None);
    // Whatever an earlier step left must not matter: poison the gradients.
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
    // Gaps between parameters belong to nobody; only the NaN in parameters is overwritten, so the norm is finite.
    let (loss, norm) = parts.update(&s).unwrap();
    assert!((loss - want_loss).abs() < 1e-6 * want_loss, "{loss} for {want_loss}");
    assert!((norm - want_norm).abs() < 1e-5 * want_norm, "{norm} for {want_norm}");
    assert_close_by_tensor(&config, &values(&mut parts, Pool::Grads), &want, 5e-6);
}

/// Each tensor for itself: a large one must not hide a small one.
fn assert_close_by_tensor(config: &Gpt2Config, got: &[f32], want: &[f32], tolerance: f64) {
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
    for seq in [5, 67] {
        let mut session = session(Box::new(CpuEngine::new(1)), odd(), (2, seq), Recompute::None);
        let planned = session.train_program().unwrap().layout().total();
        assert_eq!(session.engine().allocated(), planned);
        run(&mut session, 2, seq, 2);
        assert_eq!(session.engine().allocated(), planned, "a step must not take more");
    }
}

#[test]
fn decoding_with_the_cache_gives_the_logits_of_the_whole_sequence() {
    let config = odd();
    let (x, _) = tokens(&config, 20, 3);
    let spec = SessionSpec { eval: Some((1, 1)), decode: Some(1), ..SessionSpec::default() };
    let mut session = Session::new(Box::new(CpuEngine::new(2)), config, &spec).unwrap();
    session.init(11).unwrap();
    let mut logits = Vec::new();
    let mut from_cache = 0.0_f64;
    for t in 0..x.len() - 1 {
        session.decode(&x[t..=t], t, &mut logits).unwrap();
        let row = &logits[..config.vocab_size];
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        from_cache += sum.ln() - f64::from(row[x[t + 1] as usize]);
    }
    let n = x.len() - 1;
    let spec = SessionSpec { eval: Some((1, n)), ..SessionSpec::default() };
    let mut whole = Session::new(Box::new(CpuEngine::new(2)), config, &spec).unwrap();
    whole.init(11).unwrap();
    let want = f64::from(whole.evaluate(&x[..n], &x[1..]).unwrap());
    let got = from_cache / n as f64;
    assert!((got - want).abs() < 1e-6 * want, "{got} for {want}");
}
