//! bf16 and tf32 without a GPU, which the rounding engine on top of the CPU engine simulates: verification, lockstep,
//! the search for the first NaN or infinity, and a model that learns.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::small::{Training, bf16, cpu, damaged, fixture, rounding, values, verified};
use ironhorse::core::{DType, Engine, EngineExt, Operands, Pool, Precision};
use ironhorse::cpu::{CpuEngine, CpuSettings, multiplies_bf16};
use ironhorse::train::model::{Gpt2Config, ModelConfig, Recompute};
use ironhorse::train::session::Batch;
use ironhorse::train::verify::{Basis, LockstepReport, Options, Report, Rounding, first_non_finite};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The CPU engine with products of bf16 operands.
fn cpu_bf16() -> Box<dyn Engine> {
    Box::new(CpuEngine::with(CpuSettings { threads: 1, operands: Operands::Bf16 }))
}

/// Odd sizes on purpose.
fn odd() -> ModelConfig {
    Gpt2Config::new(40, 203, 2, 5, 40).into()
}

/// A mixture of experts and a Llama, with the vocabulary of `odd`.
fn mixtures() -> [ModelConfig; 2] {
    let sizes = "hidden=40,layers=2,heads=6,kv_heads=3,head_dim=10,ffn=37,vocab=203,context=40";
    ["experts=5,top_k=2,aux_alpha=0.1", "kind=llama"]
        .map(|more| ModelConfig::parse(&format!("{sizes},{more}")).unwrap())
}

const TRAINING: Training = Training { vocab: 203, batch: (2, 33), lr: 3e-3 };

#[test]
fn a_model_learns_in_bf16() {
    let [experts, llama] = mixtures();
    for (config, precision) in [
        (odd(), Precision::BF16),
        (odd(), Precision::BF16_F32_GRADS),
        (experts, Precision::BF16),
        (experts, Precision::BF16_F32_GRADS),
        (llama, Precision::BF16),
    ] {
        let mut session = TRAINING.session(bf16(), config, precision);
        let losses = TRAINING.steps(&mut session, 1..=30);
        assert!(losses[29] < 0.7 * losses[0], "{losses:?}");
        let param = session.train_program().unwrap().params()[0].clone();
        let (rounded, mut master) = (values(&mut session, param.weight), Vec::new());
        session.read_param(Pool::Params, &param.name, &mut master).unwrap();
        assert!(rounded.iter().all(|value| value.to_bits() & 0xffff == 0), "every weight is a bf16");
        assert!(master.iter().any(|value| value.to_bits() & 0xffff != 0), "the master weights are not");
        let far = |(r, m): (&f32, &f32)| (r - m).abs() > m.abs() / 128.0 + 1e-38;
        assert!(!rounded.iter().zip(&master).any(far), "one step of bf16 apart at most");
    }
}

fn run_lockstep(engine: Box<dyn Engine>, precision: Precision, operands: Operands) -> LockstepReport {
    lockstep_of(odd(), engine, precision, operands)
}

fn lockstep_of(
    config: ModelConfig,
    engine: Box<dyn Engine>,
    precision: Precision,
    operands: Operands,
) -> LockstepReport {
    TRAINING.lockstep(&mut TRAINING.session(engine, config, precision), operands)
}

#[test]
fn the_cpu_agrees_with_itself_to_the_bit() {
    let report = run_lockstep(cpu(), Precision::F32, Operands::F32);
    assert!(report.passed(), "{report}");
    assert!(report.kinds.iter().all(|kind| kind.worst == 0.0), "{report}");
    let kinds: Vec<&str> = report.kinds.iter().map(|kind| kind.op).collect();
    assert!(kinds.contains(&"adamw") && kinds.contains(&"embedding_bwd"), "{kinds:?}");
    for config in mixtures() {
        let report = lockstep_of(config, cpu(), Precision::F32, Operands::F32);
        assert!(report.passed() && report.kinds.iter().all(|kind| kind.worst == 0.0), "{report}");
    }
}

#[test]
fn rounding_of_mixtures_is_within_the_tolerances_of_lockstep() {
    for config in mixtures() {
        for precision in [Precision::BF16, Precision::BF16_F32_GRADS] {
            let report = lockstep_of(config, bf16(), precision, Operands::F32);
            assert!(report.passed(), "{report}");
        }
        let report =
            lockstep_of(config, rounding(Rounding::Operands(Operands::Tf32)), Precision::F32, Operands::Tf32);
        assert!(report.passed(), "{report}");
    }
}

#[test]
fn lockstep_finds_every_wrong_op_of_a_mixture() {
    let [experts, _] = mixtures();
    let program = TRAINING.session(cpu(), experts, Precision::F32).train_program().unwrap().clone();
    let floats = |op: usize| program.nodes()[op].op.args()[0].slot.dtype == DType::F32;
    for op in (0..program.nodes().len()).filter(|&op| floats(op)).step_by(5) {
        let wrong = damaged(cpu(), op, None, |values, _| values[0] += 1.0);
        let report = lockstep_of(experts, wrong, Precision::F32, Operands::F32);
        let first = report.first_wrong.as_ref().unwrap_or_else(|| panic!("op {op} passes\n{report}"));
        assert_eq!((first.index, first.op), (op, program.nodes()[op].op.name()));
    }
}

#[test]
fn rounding_is_within_the_tolerances_of_lockstep() {
    for precision in [Precision::BF16, Precision::BF16_F32_GRADS] {
        let report = run_lockstep(bf16(), precision, Operands::F32);
        assert!(report.passed(), "{report}");
        assert!(report.kinds.iter().any(|kind| kind.worst > 1e-4), "{report}");
    }
    let report = run_lockstep(rounding(Rounding::Operands(Operands::Tf32)), Precision::F32, Operands::Tf32);
    assert!(report.passed(), "{report}");
    assert!(
        !run_lockstep(rounding(Rounding::Operands(Operands::Tf32)), Precision::F32, Operands::F32).passed()
    );
}

#[test]
fn products_of_bf16_operands_are_within_what_they_cost() {
    for config in [odd(), mixtures()[0], mixtures()[1]] {
        let report = lockstep_of(config, cpu_bf16(), Precision::F32, Operands::Bf16);
        assert!(report.passed(), "{report}");
        assert!(
            !lockstep_of(config, cpu_bf16(), Precision::F32, Operands::Tf32).passed(),
            "they are rounded"
        );
    }
}

/// What rounding costs attention grows with the scores, which are large in trained models.
#[test]
fn attention_of_rounded_operands_may_be_sharp() {
    let config = Gpt2Config::new(64, 203, 2, 4, 64);
    let sharp = |engine: Box<dyn Engine>| {
        let mut session = TRAINING.session(engine, config, Precision::F32);
        let params = session.train_program().unwrap().params().to_vec();
        for param in params.iter().filter(|param| param.name.ends_with("attn.c_attn.weight")) {
            let larger = values(&mut session, param.weight).iter().map(|x| 12.0 * x).collect::<Vec<_>>();
            session.engine().write_f32(param.weight, &larger).unwrap();
        }
        session
    };
    let report = TRAINING.lockstep(&mut sharp(cpu_bf16()), Operands::Bf16);
    assert!(report.passed(), "{report}");
    let more = report.kinds.iter().any(|kind| kind.op == "attention_bwd" && kind.worst > 2.0 / 256.0);
    assert!(more || !multiplies_bf16(), "two roundings are enough:\n{report}");
    // What is wrong by more than rounding is found.
    let program = sharp(cpu()).train_program().unwrap().clone();
    let backward = program.nodes().iter().position(|node| node.op.name() == "attention_bwd").unwrap();
    let wrong = damaged(cpu_bf16(), backward, None, |values, _| values.iter_mut().for_each(|x| *x *= 1.3));
    let report = TRAINING.lockstep(&mut sharp(wrong), Operands::Bf16);
    assert_eq!(report.first_wrong.as_ref().unwrap().index, backward, "{report}");
}

#[test]
fn lockstep_names_the_first_wrong_op() {
    let program = TRAINING.session(cpu(), odd(), Precision::F32).train_program().unwrap().clone();
    for op in [0, 7, program.nodes().len() / 2, program.nodes().len() - 2, program.nodes().len() - 1] {
        for precision in [Precision::F32, Precision::BF16] {
            let inner = if precision == Precision::F32 { cpu() } else { bf16() };
            let wrong = damaged(inner, op, None, |values, _| values[0] += 1.0);
            let report = run_lockstep(wrong, precision, Operands::F32);
            let first = report.first_wrong.as_ref().unwrap_or_else(|| panic!("op {op} passes\n{report}"));
            let node = &program.nodes()[op];
            assert_eq!((first.index, first.pass, first.op), (op, 0, node.op.name()));
            assert_eq!(first.origin, program.origin(node));
            assert_eq!(first.argument, node.op.args()[0].name);
            let element = first.element.as_ref().unwrap();
            assert!(element.index.iter().all(|&i| i == 0), "{element:?}");
            assert!(
                report.to_string().contains(&format!("first wrong op: {} at {}", first.op, first.origin))
            );
            // the other ops compute correctly from the wrong value
            assert_eq!(report.wrong, 2, "once in each pass: {report}");
        }
    }
}

/// A key with PyTorch's error in bf16, and one without.
const BASES: [Basis; 2] = [Basis::PyTorch, Basis::Simulation];

/// `small_custom`: one layer, two heads, 32 channels, 40 tokens, batch 2 × 6, two optimizer steps. The key is older
/// than the metadata about bf16, which is in a separate file.
fn run_verify(engine: Box<dyn Engine>, basis: Basis, options: &Options) -> Report {
    let key = fixture("small_custom.key.safetensors");
    if basis == Basis::Simulation {
        return verified(engine, &key, options);
    }
    let errors = std::fs::read_to_string(fixture("small_custom.torch_error_bf16.json")).unwrap();
    let key = std::fs::read(&key).unwrap();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}-{}.key", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&file, with_metadata(&key, "torch_error_bf16", &errors.replace('\n', ""))).unwrap();
    let report = verified(engine, &file, options);
    std::fs::remove_file(&file).unwrap();
    report
}

fn with_metadata(key: &[u8], name: &str, json: &str) -> Vec<u8> {
    let end = 8 + u64::from_le_bytes(key[..8].try_into().unwrap()) as usize;
    let (open, pair) = (r#""__metadata__":{"#, json.replace('"', r#"\""#));
    let header = std::str::from_utf8(&key[8..end]).unwrap();
    let mut header = header.replacen(open, &format!("{open}\"{name}\":\"{pair}\","), 1);
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &key[end..]].concat()
}

#[test]
fn bf16_agrees_with_a_key_within_what_it_costs() {
    let options = Options { precision: Precision::BF16, ..Options::default() };
    for basis in BASES {
        let report = run_verify(bf16(), basis, &options);
        assert!(report.passed(), "{report}");
        assert_eq!(report.tolerances, basis);
        assert!(report.tensors.iter().any(|row| row.name.starts_with("after.")));
        assert!(report.tensors.iter().all(|row| row.comparison.tolerance < 0.2), "{report}");
        let words =
            if basis == Basis::PyTorch { "allowed, bf16: twice" } else { "allowed, simulated: twice" };
        assert!(report.to_string().contains(words), "{report}");
    }
}

/// `small_moe`: two layers, four heads over two of keys and values, 16 channels, two of four experts, batch 2 × 6, two
/// optimizer steps. Made by
///
/// ```text
/// python -m ironhorse.export moe --model C=16,L=2,NH=4,NKV=2,HD=8,E=4,K=2,F=12,V=40,maxT=8,rope_alpha=2 \
///     --batch 2 --seq 6 --steps 2 --seed 1 --stem small --out DIR
/// ```
fn verify_mixture(engine: Box<dyn Engine>, options: &Options) -> Report {
    verified(engine, &fixture("small_moe.key.safetensors"), options)
}

#[test]
fn a_mixture_agrees_with_its_key() {
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full, Recompute::Experts] {
        let report = verify_mixture(cpu(), &Options { recompute, ..Options::default() });
        assert!(report.passed(), "{report}");
        let compared = |name: &str| report.tensors.iter().any(|row| row.name == name);
        for name in
            ["aux", "loss", "act.layers.1.experts", "dact.layers.0.router_logits", "after.lm_head.weight"]
        {
            assert!(compared(name), "{name}");
        }
    }
}

#[test]
fn a_mixture_agrees_with_its_key_in_bf16_and_tf32() {
    let narrow = Options { precision: Precision::BF16, ..Options::default() };
    let report = verify_mixture(bf16(), &narrow);
    assert!(report.passed(), "{report}");
    let tf32 = Options { operands: Operands::Tf32, ..Options::default() };
    let report = verify_mixture(rounding(Rounding::Operands(Operands::Tf32)), &tf32);
    assert!(report.passed(), "{report}");
}

#[test]
fn a_wrong_element_is_found_in_bf16_and_tf32() {
    let bf16 = Options { precision: Precision::BF16, ..Options::default() };
    let tf32 = Options { operands: Operands::Tf32, ..Options::default() };
    for basis in BASES {
        for (options, round) in [(&bf16, Rounding::Bf16), (&tf32, Rounding::Operands(Operands::Tf32))] {
            for op in [0, 2, 3, 6, 8] {
                let wrong = damaged(rounding(round), op, None, |values, _| values[35] += 1.0);
                let report = run_verify(wrong, basis, options);
                let first = report.first_wrong.as_ref().unwrap_or_else(|| panic!("op {op}: {report}"));
                let wide = ["c_attn", "gelu"].iter().any(|end| first.tensor.ends_with(end));
                let index = if wide { [0, 0, 35] } else { [0, 1, 3] };
                assert_eq!(first.index.as_ref().unwrap()[..], index, "op {op}: {report}");
            }
        }
    }
}

#[test]
fn tf32_agrees_with_a_key_within_what_it_costs() {
    let options = Options { operands: Operands::Tf32, ..Options::default() };
    let report = run_verify(rounding(Rounding::Operands(Operands::Tf32)), Basis::Simulation, &options);
    assert!(report.passed(), "{report}");
    assert_eq!(report.tolerances, Basis::Simulation);
    assert!(run_verify(cpu(), Basis::Simulation, &options).passed(), "f32 is better than that");
    assert!(
        !run_verify(rounding(Rounding::Operands(Operands::Tf32)), Basis::Simulation, &Options::default())
            .passed()
    );
}

#[test]
fn the_first_number_that_is_none_is_named() {
    let ((x, y), scalars) = (TRAINING.tokens(), TRAINING.scalars(1));
    for precision in [Precision::F32, Precision::BF16] {
        let engine = || if precision == Precision::F32 { cpu() } else { bf16() };
        let mut healthy = TRAINING.session(engine(), odd(), precision);
        assert_eq!(first_non_finite(&mut healthy, Batch::plain(&x, &y), &scalars).unwrap(), None);
        let mut planted = TRAINING.session(engine(), odd(), precision);
        let slot = planted.train_program().unwrap().params()[5].weight;
        let mut values = vec![0.0; slot.numel()];
        values[41] = f32::NAN;
        planted.engine().write_f32(slot, &values).unwrap();
        let found = first_non_finite(&mut planted, Batch::plain(&x, &y), &scalars).unwrap().unwrap();
        assert!(found.contains(" at [") && found.contains("is NaN before the step"), "{found}");

        let wrong = damaged(engine(), 2, None, |values, _| values[120] = f32::INFINITY);
        let mut broken = TRAINING.session(wrong, odd(), precision);
        let found = first_non_finite(&mut broken, Batch::plain(&x, &y), &scalars).unwrap().unwrap();
        assert_eq!(found, "linear_fwd at h.0.attn.c_attn (forward, op 2) wrote inf to `out` at [0, 1, 0]");
    }
}
