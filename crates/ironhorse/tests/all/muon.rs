//! Muon on the CPU, and on an engine that simulates bf16: it learns, its bits do not depend on threads, its steps are those of
//! PyTorch, and its state is not mistaken for that of AdamW.

#![allow(clippy::unwrap_used)] // a panic is a failed test, in helpers too

use crate::small::{Training, bf16, bits, cpu, fixture, rounding, saved, step, values, verified};
use ironhorse::core::op::Op;
use ironhorse::core::{Operands, Optimizer, Pool, Precision, Scalars};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{ModelConfig, StepOptions};
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse::train::verify::{Options, Rounding};
use std::path::Path;

const MUON: Precision = Precision::F32.with_optimizer(Optimizer::Muon);
const BATCH: (usize, usize) = (2, 17);
const TRAINING: Training = Training { vocab: 203, batch: BATCH, lr: 1e-2 };
const STATE: [Pool; 3] = [Pool::Params, Pool::Moment1, Pool::Moment2];

fn models() -> [ModelConfig; 3] {
    let mixture =
        "hidden=40,layers=2,heads=6,kv_heads=3,head_dim=10,experts=5,top_k=2,ffn=37,vocab=203,context=40";
    let llama = "hidden=40,layers=2,heads=4,kv_heads=2,head_dim=10,ffn=56,vocab=203,context=40";
    let gpt2 = "n_layer=2,n_head=4,n_embd=40,vocab_size=203,max_seq_len=40";
    [gpt2, llama, mixture].map(|sizes| ModelConfig::parse(sizes).unwrap())
}

#[test]
fn every_family_learns_with_the_same_bits_for_any_number_of_threads() {
    for config in models() {
        let run = |threads: usize| {
            let mut session = TRAINING.session(Box::new(CpuEngine::new(threads)), config, MUON);
            (TRAINING.steps(&mut session, 1..=12), bits(&mut session, &STATE))
        };
        let (losses, one) = run(1);
        assert!(losses[11] < 0.7 * losses[0], "{}: {losses:?}", config.kind());
        for threads in [2, 3] {
            assert!(run(threads) == (losses.clone(), one.clone()), "{}: {threads} threads", config.kind());
        }
    }
}

#[test]
fn the_matrices_of_the_blocks_have_one_moment() {
    for config in models() {
        let layout = |precision| {
            let spec = SessionSpec { train: Some(BATCH), precision, ..SessionSpec::default() };
            spec.layout(&config).unwrap()
        };
        let (adamw, muon) = (layout(Precision::F32), layout(MUON));
        let matrices = config.tensors().into_iter().filter(|spec| spec.matrices > 0);
        let elements: usize = matrices.map(|spec| spec.shape.numel()).sum();
        assert!(2 * elements > config.num_params() / 2);
        assert_eq!(adamw.bytes(Pool::Moment1), muon.bytes(Pool::Moment1));
        let saved = adamw.bytes(Pool::Moment2) - muon.bytes(Pool::Moment2);
        // gaps between parameters, of less than a cache line each, may go too
        assert!((4 * elements..4 * elements + 64 * config.tensors().len()).contains(&saved), "{saved}");
    }
}

/// Every step moves every matrix by 0.2·lr in the root mean square, within what five iterations leave, and AdamW moves the rest.
#[test]
fn steps_have_the_size_of_those_of_adamw() {
    for config in models() {
        let mut session = TRAINING.session(cpu(), config, MUON);
        let params = session.train_program().unwrap().params().to_vec();
        let read =
            |session: &mut Session| params.iter().map(|p| values(session, p.weight)).collect::<Vec<_>>();
        let (x, y) = TRAINING.tokens();
        let plain = Scalars { weight_decay: 0.0, ..TRAINING.scalars(1) };
        let before = read(&mut session);
        step(&mut session, (&x, &y), &plain);
        for ((param, before), after) in params.iter().zip(before).zip(read(&mut session)) {
            let moved: f64 = before.iter().zip(&after).map(|(a, b)| f64::from(b - a).powi(2)).sum();
            let rms = (moved / before.len() as f64).sqrt() / f64::from(plain.lr);
            if param.matrix().is_some() {
                // rank may be lacking: 34 tokens, and an expert has fewer
                assert!((0.02..0.25).contains(&rms), "{}: {rms}", param.name);
            } else {
                assert!(rms < 1.01, "{}: {rms}", param.name);
            }
        }
    }
}

#[test]
fn the_program_has_the_products_of_five_iterations_for_each_size() {
    let config = models()[0];
    let program = config.training(BATCH, StepOptions::default(), MUON).unwrap();
    let count = |wanted: fn(&Op) -> bool| program.nodes().iter().filter(|node| wanted(&node.op)).count();
    // q, k, v and the projection of attention have the same size
    assert_eq!(count(|op| matches!(op, Op::MuonMomentum(_))), 3);
    assert_eq!(count(|op| matches!(op, Op::Matmul(_))), 45);
    assert_eq!(count(|op| matches!(op, Op::MuonUpdate(_))), 3);
    let flops: u64 = program
        .nodes()
        .iter()
        .filter(|node| matches!(node.op, Op::Matmul(_)))
        .map(|node| node.op.flops())
        .sum();
    assert_eq!(flops, 2 * 300 * 40_u64.pow(3));
}

#[test]
fn the_state_of_another_optimizer_is_refused() {
    let config = models()[0];
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("muon-{}", std::process::id()));
    for (kept, asked) in [(MUON, Precision::F32), (Precision::F32, MUON)] {
        let mut first = TRAINING.session(cpu(), config, kept);
        TRAINING.steps(&mut first, 1..=2);
        let mut checkpoint = saved(&mut first, &folder, 0);
        assert_eq!(checkpoint.precision().unwrap(), kept);
        checkpoint.check_tensors(true).unwrap();
        let error = TRAINING.session(cpu(), config, asked).restore(&mut checkpoint).unwrap_err().to_string();
        let (is, not) = (kept.optimizer.name(), asked.optimizer.name());
        assert!(
            error.contains(&format!("optimizer state is that of {is}, expected that of {not}")),
            "{error}"
        );
        assert!(error.contains(&format!("--optimizer {is}")) && error.contains("--init"), "{error}");
        // the weights of either start a run of the other
        TRAINING
            .session(cpu(), config, asked)
            .load(Pool::Params, |name, values| checkpoint.read_tensor(name, values))
            .unwrap();
        let mut resumed = TRAINING.session(cpu(), config, kept);
        assert!(resumed.restore(&mut checkpoint).unwrap(), "byte for byte");
        assert_eq!(TRAINING.steps(&mut first, 3..=5), TRAINING.steps(&mut resumed, 3..=5));
        assert!(bits(&mut first, &STATE) == bits(&mut resumed, &STATE));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// `muon_custom`: one layer, two heads, 24 channels, batch 2 x 6, three steps of Muon, no activations. Made by
///
/// ```text
/// python -m ironhorse.export gpt2 --model n_layer=1,n_head=2,n_embd=24,vocab_size=40,max_seq_len=8 --batch 2 --seq 6 \
///     --optimizer muon --steps 3 --lr 5e-4 --weight-decay 0.1 --seed 1 --no-acts --stem muon --out DIR
/// ```
#[test]
fn steps_are_those_of_pytorch() {
    let plain = Options::default();
    let narrow = Options { precision: Precision::BF16, ..plain };
    let small = Options { precision: Precision::BF16.with_residual().with_bf16_moments(), ..plain };
    let tf32 = Options { operands: Operands::Tf32, ..plain };
    for (engine, options) in [
        (cpu(), plain),
        (bf16(), narrow),
        (bf16(), small),
        (rounding(Rounding::Operands(Operands::Tf32)), tf32),
    ] {
        let report = verified(engine, &fixture("muon_custom.key.safetensors"), &options);
        assert!(report.passed(), "{report}");
        let after = report.tensors.iter().find(|row| row.name == "after.h.0.attn.c_attn.weight").unwrap();
        assert!(after.comparison.tolerance < 0.05, "{report}");
    }
}

#[test]
fn engines_agree_op_by_op() {
    for config in models() {
        for precision in [Precision::BF16, Precision::BF16.with_residual().with_bf16_moments()] {
            let precision = precision.with_optimizer(Optimizer::Muon);
            let mut session = TRAINING.session(bf16(), config, precision);
            let report = TRAINING.lockstep(&mut session, Operands::F32);
            assert!(report.passed(), "{report}");
            assert!(report.kinds.iter().any(|kind| kind.op == "matmul"), "{report}");
        }
    }
}
