//! Learning from pairs of answers (DPO) on the CPU engine: answers of PyTorch, the start, the bits, micro-steps, and what is
//! refused.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::small::{bf16, cpu, fixture, verified};
use ironhorse::core::{Engine, Operands, Precision, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::data::{LoaderConfig, PackedLoader, Sample};
use ironhorse::train::model::{Lora, ModelConfig, Recompute, Targets};
use ironhorse::train::rng::Rng;
use ironhorse::train::session::{Batch, BatchPairs, OwnedBatch, Session, SessionSpec};
use ironhorse::train::verify::{Lockstep, Options};

const VOCAB: usize = 51;
const SEQ: usize = 40;
const BETA: f32 = 0.5;

/// The numbers of a Llama and packed pairs are from plain PyTorch: `python/tests/dpo_keys.py`.
#[test]
fn loss_rewards_and_gradients_are_those_of_pytorch() {
    let key = fixture("dpo_llama.key.safetensors");
    for recompute in [Recompute::None, Recompute::Full] {
        let options = Options { recompute, ..Options::default() };
        let report = verified(cpu(), &key, &options);
        assert!(report.passed(), "{report}");
        for name in ["rewards", "loss", "losses", "logits", "grad.model.embed_tokens.weight"] {
            assert!(report.tensors.iter().any(|row| row.name == name), "{name} is not compared");
        }
    }
    let options = Options { precision: Precision::BF16, steps: Some(0), ..Options::default() };
    let report = verified(bf16(), &key, &options);
    assert!(report.passed(), "{report}");
}

fn config() -> ModelConfig {
    ModelConfig::parse("kind=qwen3,C=24,L=2,NH=4,NKV=2,HD=6,F=20,V=51,maxT=40,tied=true").unwrap()
}

/// Pairs of a question of 1 to 6 tokens and two answers of 1 to 8; the chosen ones have even tokens.
fn pairs(count: usize) -> Vec<[Sample; 2]> {
    let mut rng = Rng::new(3);
    let mut pair = || {
        let question: Vec<i32> = (0..1 + rng.index(6)).map(|_| rng.index(VOCAB) as i32).collect();
        [0, 1].map(|odd| {
            let answer = (0..1 + rng.index(8)).map(|_| 2 * rng.index(25) as i32 + odd).collect::<Vec<_>>();
            let learned = [vec![false; question.len()], vec![true; answer.len()]].concat();
            Sample { ids: [&question[..], &answer].concat(), learned }
        })
    };
    (0..count).map(|_| pair()).collect()
}

fn session(engine: Box<dyn Engine>, batch: usize, lora: Option<Lora>) -> Session {
    let shape = Some((batch, SEQ));
    let preference = Some(BETA);
    let spec =
        SessionSpec { train: shape, eval: shape, packed: true, preference, lora, ..SessionSpec::default() };
    let mut session = Session::new(engine, config(), &spec).unwrap();
    session.init_base(7).unwrap();
    if lora.is_some() {
        session.init(9).unwrap();
    }
    session
}

/// Pairs with what the session's model gives them now.
fn loader(session: &mut Session, batch: usize, count: usize) -> PackedLoader {
    let config = LoaderConfig { batch, seq: SEQ, vocab: VOCAB, seed: 1, shuffle: true };
    let mut loader = PackedLoader::of_pairs(pairs(count), config).unwrap();
    let none = vec![0.0; batch * SEQ];
    loader
        .measure_reference(|[x, y, positions]| {
            let pairs = Some(BatchPairs { bounds: &[], reference: &none });
            let mut losses = Vec::new();
            let batch = Batch { x, y, positions: Some(positions), pairs };
            session.token_losses(batch, &mut losses).map(|()| losses)
        })
        .unwrap();
    loader
}

fn next(loader: &mut PackedLoader) -> OwnedBatch {
    let [mut x, mut y, mut positions] = [(); 3].map(|()| vec![0; loader.batch() * SEQ]);
    loader.next_batch([&mut x, &mut y, &mut positions]).unwrap();
    let (bounds, reference) = loader.pairs().unwrap();
    OwnedBatch { x, y, positions: Some(positions), pairs: Some((bounds.to_vec(), reference.to_vec())) }
}

/// A step of these micro-batches; gives loss, rewards and the gradient norm.
fn step(session: &mut Session, batches: &[OwnedBatch], number: u32, lr: f32) -> [f32; 5] {
    let count: usize = batches.iter().map(|batch| batch.get().pairs.unwrap().count()).sum();
    let rows: usize = batches.iter().map(|batch| batch.x.len()).sum();
    let scalars = Scalars { step: number, lr, ..Scalars::default() }.counting_pairs(count, rows);
    for (batch, micro_step) in batches.iter().zip(0..) {
        session.step(batch.get(), &Scalars { micro_step, ..scalars }).unwrap();
    }
    let pending = session.start_update(&scalars).unwrap();
    let rewards = session.finish_rewards(&pending).unwrap().unwrap();
    let (loss, norm) = session.finish_update(pending).unwrap();
    [loss, rewards.chosen, rewards.rejected, rewards.accuracy, norm]
}

fn adapters() -> Lora {
    Lora { rank: 4, alpha: 8.0, targets: Targets::parse("all").unwrap() }
}

/// The reference was measured in other rows than those of the batch; the bits of the losses are the same.
#[test]
fn at_first_the_model_is_its_own_reference_to_the_bit() {
    for lora in [None, Some(adapters())] {
        let mut session = session(cpu(), 2, lora);
        let mut loader = loader(&mut session, 2, 30);
        for _ in 0..3 {
            let [loss, chosen, rejected, accuracy, norm] = step(&mut session, &[next(&mut loader)], 1, 0.0);
            assert_eq!([chosen, rejected, accuracy], [0.0; 3]);
            assert!((loss - std::f32::consts::LN_2).abs() <= f32::EPSILON && norm > 0.01, "{loss} {norm}");
        }
    }
}

#[test]
fn what_is_preferred_becomes_more_likely() {
    for lora in [None, Some(adapters())] {
        let mut session = session(cpu(), 2, lora);
        let mut loader = loader(&mut session, 2, 12);
        let lr = if lora.is_some() { 3e-2 } else { 1e-2 };
        let mut last = [0.0; 5];
        for number in 1..=120 {
            last = step(&mut session, &[next(&mut loader)], number, lr);
        }
        let [loss, chosen, rejected, accuracy, _] = last;
        assert!(loss < 0.45 && accuracy == 1.0 && chosen - rejected > 0.7, "{last:?}");
        // what is validated is what is trained
        let batch = next(&mut loader);
        let (loss, rewards) = session.evaluate_pairs(batch.get()).unwrap();
        let trained = step(&mut session, &[batch], 121, 0.0);
        assert_eq!([loss, rewards.chosen, rewards.rejected, rewards.accuracy], trained[..4]);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let runs = [1, 2, 3].map(|threads| {
        let mut session = session(Box::new(CpuEngine::new(threads)), 2, None);
        let mut loader = loader(&mut session, 2, 30);
        (1..=4).map(|number| step(&mut session, &[next(&mut loader)], number, 1e-2)).collect::<Vec<_>>()
    });
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
}

/// The gradients of two micro-steps with different numbers of pairs are those of one batch: of the mean over all pairs.
#[test]
fn a_step_is_the_mean_over_the_pairs_of_all_its_micro_steps() {
    let (mut whole, mut parts) = (session(cpu(), 2, None), session(cpu(), 1, None));
    let mut loader = loader(&mut whole, 2, 30);
    // away from the reference, so that pairs have different weights
    for session in [&mut whole, &mut parts] {
        session.init_base(8).unwrap();
    }
    let batch = next(&mut loader);
    let (bounds, reference) = batch.pairs.clone().unwrap();
    let part = |row: usize| {
        let of = |values: &[i32]| values[row * SEQ..(row + 1) * SEQ].to_vec();
        let inside = bounds.chunks_exact(3).filter(|pair| pair[0] as usize / SEQ == row);
        let bounds = inside.flatten().map(|at| at - (row * SEQ) as i32).collect::<Vec<_>>();
        OwnedBatch {
            x: of(&batch.x),
            y: of(&batch.y),
            positions: batch.positions.as_deref().map(of),
            pairs: Some((bounds, reference[row * SEQ..(row + 1) * SEQ].to_vec())),
        }
    };
    let counts = [0, 1].map(|row| part(row).get().pairs.unwrap().count());
    assert!(counts[0] != counts[1] || counts[0] > 1, "{counts:?}");
    let one = step(&mut whole, std::slice::from_ref(&batch), 1, 1e-3);
    let two = step(&mut parts, &[part(0), part(1)], 1, 1e-3);
    assert!(one[1] != 0.0 && one[2] != 0.0);
    for (one, two) in one.iter().zip(two) {
        assert!((one - two).abs() <= 1e-5 * one.abs().max(0.1), "{one} {two}");
    }
}

#[test]
fn a_session_of_pairs_takes_pairs_and_nothing_else() {
    let mut session = session(cpu(), 2, None);
    let mut loader = loader(&mut session, 2, 30);
    let batch = next(&mut loader);
    let error =
        |session: &mut Session, batch: Batch<'_>| session.evaluate_batch(batch).unwrap_err().to_string();
    let alone = Batch { pairs: None, ..batch.get() };
    assert_eq!(
        error(&mut session, alone),
        "batch is without pairs, expected those that a preference is learned from"
    );
    let falls = BatchPairs { bounds: &[0, 5, 3], ..batch.get().pairs.unwrap() };
    let text = error(&mut session, Batch { pairs: Some(falls), ..batch.get() });
    assert!(text.contains("row 3 at index 2 of the pairs is below the one before it"), "{text}");
    let many = vec![0; 3 * SEQ + 3];
    for bounds in [&many[..], &[0, 1]] {
        let pairs = Some(BatchPairs { bounds, ..batch.get().pairs.unwrap() });
        let text = error(&mut session, Batch { pairs, ..batch.get() });
        assert!(text.contains("expected three rows of each, 40 pairs at most"), "{text}");
    }
    let shape = Some((2, SEQ));
    let spec = SessionSpec { train: shape, eval: shape, packed: true, ..SessionSpec::default() };
    let mut plain = Session::new(cpu(), config(), &spec).unwrap();
    assert_eq!(error(&mut plain, batch.get()), "batch is of pairs, expected texts to learn one by one");
    assert!(plain.evaluate_pairs(alone).unwrap_err().to_string().contains("not made for pairs"));
    let wrong = SessionSpec { preference: Some(0.0), ..spec };
    let text = Session::new(cpu(), config(), &wrong).err().unwrap().to_string();
    assert!(text.contains("`beta` is 0, expected a number above 0"), "{text}");
}

/// A step without a pair changes nothing but what weight decay does.
#[test]
fn a_batch_without_pairs_has_loss_and_gradient_0() {
    let mut session = session(cpu(), 2, None);
    let mut loader = loader(&mut session, 2, 30);
    let mut batch = next(&mut loader);
    batch.pairs.as_mut().unwrap().0.clear();
    assert_eq!(step(&mut session, &[batch], 1, 1e-3), [0.0; 5]);
}

#[test]
fn engines_agree_op_by_op() {
    for lora in [None, Some(adapters())] {
        let mut session = session(cpu(), 2, lora);
        let mut loader = loader(&mut session, 2, 30);
        let batch = next(&mut loader);
        let lockstep =
            Lockstep { batch: batch.get(), scalars: Scalars::default(), passes: 2, operands: Operands::F32 };
        let report = lockstep.run(&mut session, Box::new(CpuEngine::new(2))).unwrap();
        assert!(report.passed(), "{report}");
    }
}
