//! Products of 8-bit numbers without a GPU: the rounding engine on top of the CPU engine runs the programs of `--dtype fp8`.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is a failed test, in helpers too

use crate::small::{self, Training, damaged};
use ironhorse::core::op::{Op, Quantize};
use ironhorse::core::{
    DType, Engine, EngineExt, Fp8, Fp8Products, Fp8Scales, Operands, Precision, Program, Section, Slot,
};
use ironhorse::cpu::CpuEngine;
use ironhorse::train::model::{ModelConfig, Recompute};
use ironhorse::train::session::{Session, SessionSpec};
use ironhorse::train::verify::{LockstepReport, Rounding, RoundingEngine};

const BATCH: (usize, usize) = (2, 32);
const VOCAB: usize = 208;
const TRAINING: Training = Training { vocab: VOCAB, batch: BATCH, lr: 3e-3 };
const HEAD: Fp8Products =
    Fp8Products { head: true, experts: true, gradients: Fp8::E5M2, scales: Fp8Scales::Delayed };
const BLOCKS: Fp8Products =
    Fp8Products { head: false, experts: true, gradients: Fp8::E4M3, scales: Fp8Scales::Current };

fn rounding(threads: usize) -> Box<dyn Engine> {
    Box::new(RoundingEngine::new(Box::new(CpuEngine::new(threads)), Rounding::Fp8))
}

/// A GPT-2 with each activation, a Llama, and a mixture.
fn models() -> [ModelConfig; 4] {
    let gpt2 = format!("n_layer=2,n_head=4,n_embd=48,vocab_size={VOCAB},max_seq_len=32");
    let llama = format!(
        "kind=llama,hidden=48,layers=2,heads=4,kv_heads=2,head_dim=16,ffn=80,vocab={VOCAB},context=32"
    );
    let experts = format!(
        "hidden=128,layers=1,heads=4,kv_heads=2,head_dim=16,ffn=64,vocab={VOCAB},context=32,experts=16,top_k=2,aux_alpha=0.1"
    );
    [gpt2.clone(), format!("{gpt2},act=relu2"), llama, experts]
        .map(|sizes| ModelConfig::parse(&sizes).unwrap())
}

fn session(config: ModelConfig, engine: Box<dyn Engine>, precision: Precision) -> Session {
    let spec = SessionSpec { train: Some(BATCH), eval: Some(BATCH), precision, ..SessionSpec::default() };
    small::session(engine, config, &spec, 5)
}

fn losses(config: ModelConfig, threads: usize, precision: Precision, steps: u32) -> Vec<f32> {
    TRAINING.steps(&mut session(config, rounding(threads), precision), 1..=steps)
}

#[test]
fn models_learn_in_fp8_as_in_bf16() {
    for config in models() {
        for precision in [Precision::BF16.with_fp8(HEAD), Precision::BF16_F32_GRADS.with_fp8(BLOCKS)] {
            let fp8 = losses(config, 1, precision, 30);
            let bf16 = losses(config, 1, Precision { fp8: None, ..precision }, 30);
            assert!(fp8[29] < 0.7 * fp8[0], "{fp8:?}");
            assert!((fp8[29] - bf16[29]).abs() < 0.1 * bf16[0], "{fp8:?}\n{bf16:?}");
            assert_ne!(fp8, bf16, "{precision:?} computes in bf16");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for config in models() {
        let precision = Precision::BF16.with_fp8(HEAD);
        assert_eq!(losses(config, 1, precision, 5), losses(config, 3, precision, 5));
    }
}

fn count(program: &Program, name: &str) -> usize {
    program.nodes().iter().filter(|node| node.op.name() == name).count()
}

#[test]
fn only_training_multiplies_in_8_bits_and_only_what_can() {
    let [gpt2, _, llama, experts] = models();
    // of a layer four products forward and eight backward; the head has three
    for (config, products, others) in [(gpt2, HEAD, 0), (gpt2, BLOCKS, 1), (llama, HEAD, 0)] {
        let program = config.training(BATCH, Recompute::None, Precision::BF16.with_fp8(products)).unwrap();
        assert_eq!(count(&program, "matmul_fp8"), 2 * 12 + 3 * usize::from(products.head));
        assert_eq!(count(&program, "linear_fwd"), others);
        // all weights come first, so that an engine can round them at once
        let weights = 2 * 4 + usize::from(products.head);
        let ahead: Vec<_> = program.nodes()[..2 * weights].iter().map(|node| node.op.name()).collect();
        assert_eq!(ahead, [vec!["amax"; weights], vec!["quantize"; weights]].concat());
        let eval = config.evaluation(BATCH, Precision::BF16.with_fp8(products)).unwrap();
        assert_eq!(count(&eval, "matmul_fp8"), 0);
    }
    // a router chooses in bf16; experts have two products forward and four backward, unless they are to stay in bf16
    let names = ["linear_fwd", "matmul_fp8", "grouped_fp8", "grouped_fp8_bwd_weight", "grouped_linear_fwd"];
    for (products, counts) in
        [(HEAD, [1, 6 + 3, 4, 2, 0]), (Fp8Products { experts: false, ..HEAD }, [1, 6 + 3, 0, 0, 2])]
    {
        let program = experts.training(BATCH, Recompute::None, Precision::BF16.with_fp8(products)).unwrap();
        assert_eq!(names.map(|name| count(&program, name)), counts, "{products:?}");
        let eval = experts.evaluation(BATCH, Precision::BF16.with_fp8(products)).unwrap();
        assert_eq!((count(&eval, "grouped_fp8"), count(&eval, "grouped_linear_fwd")), (0, 2));
    }
    // sizes that such products do not have
    let odd = ModelConfig::parse("n_layer=1,n_head=5,n_embd=40,vocab_size=203,max_seq_len=32").unwrap();
    let program = odd.training(BATCH, Recompute::None, Precision::BF16.with_fp8(HEAD)).unwrap();
    assert_eq!(count(&program, "matmul_fp8"), 0);
    // sizes of experts that are slower in 8 bits: a width that is no multiple of 128, an inner one that is none of 64, too many
    for (hidden, ffn, experts) in [(192, 64, 16), (128, 96, 16), (128, 64, 256)] {
        let sizes = format!(
            "hidden={hidden},layers=1,heads=4,kv_heads=2,head_dim=16,ffn={ffn},vocab=512,context=32,experts={experts},top_k=2"
        );
        let config = ModelConfig::parse(&sizes).unwrap();
        let program = config.training(BATCH, Recompute::None, Precision::BF16.with_fp8(HEAD)).unwrap();
        let counts = ["grouped_fp8", "grouped_linear_fwd"].map(|name| count(&program, name));
        assert_eq!(counts, [0, 2], "{sizes}");
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for config in models() {
        let run = |recompute| {
            let precision = Precision::BF16.with_fp8(HEAD);
            let spec = SessionSpec { train: Some(BATCH), recompute, precision, ..SessionSpec::default() };
            TRAINING.step(&mut small::session(rounding(1), config, &spec, 5), 1)
        };
        for recompute in [Recompute::Gelu, Recompute::Full, Recompute::Experts] {
            assert_eq!(run(Recompute::None), run(recompute), "{recompute:?}");
        }
    }
}

fn lockstep(config: ModelConfig, engine: Box<dyn Engine>, precision: Precision) -> LockstepReport {
    TRAINING.lockstep(&mut session(config, engine, precision), Operands::F32)
}

#[test]
fn lockstep_passes_and_quantisers_agree_to_the_bit() {
    for config in models() {
        let report = lockstep(config, rounding(1), Precision::BF16.with_fp8(HEAD));
        assert!(report.passed(), "{report}");
        // with f32 gradients nothing that they write is rounded to bf16
        let report = lockstep(config, rounding(1), Precision::BF16_F32_GRADS.with_fp8(HEAD));
        assert!(report.passed(), "{report}");
        for kind in report.kinds.iter().filter(|kind| ["amax", "quantize"].contains(&kind.op)) {
            assert_eq!(kind.worst, 0.0, "{report}");
        }
    }
}

/// Changes values, given with the number of columns of their rows.
type Change = fn(&mut [f32], usize);

/// A doubled scale, two exchanged tiles, a stale maximum, a number that is off by one: each is found, at its op.
#[test]
fn every_damage_of_a_quantiser_is_found_at_its_op() {
    let [gpt2, _, _, experts] = models();
    for (config, step) in [(gpt2, 7), (experts, 3)] {
        every_damage(config, step);
    }
}

/// Damages every `step`th op of a program.
fn every_damage(config: ModelConfig, step: usize) {
    let precision = Precision::BF16.with_fp8(HEAD);
    let program = config.training(BATCH, Recompute::None, precision).unwrap();
    let double: Change = |values, _| values[0] *= 2.0;
    // around the largest element: columns of the padded vocabulary are 0, and at first gradients of queries are 0 in 8 bits
    let tiles: Change = |values, cols| {
        let size = |i: &usize| values[*i].abs().to_bits();
        let most = (0..values.len()).max_by_key(size).unwrap();
        let (row, first) = (most / cols, most % cols / 16 * 16);
        let other = if row < 16 { row + 16 } else { row - 16 };
        (first..first + 16).for_each(|i| values.swap(row * cols + i, other * cols + i));
    };
    let next: Change = |values, _| {
        let at = values.iter().position(|x| *x != 0.0).unwrap();
        values[at] *= -1.0;
    };
    let mut found = 0;
    for (i, node) in program.nodes().iter().enumerate() {
        let damages: Vec<(Slot, Change)> = match node.op {
            Op::Amax(op) => vec![(op.amax, double)],
            // of an activation single elements may differ, by the distance of neighbouring numbers
            Op::Quantize(Quantize { out, out_t, inverse, act, pre, .. }) => {
                let plain = act.is_none() && pre.is_none();
                let slots =
                    [(Some(inverse), double), (out, tiles), (out_t, tiles), (out_t.filter(|_| plain), next)];
                slots.into_iter().filter_map(|(slot, by)| Some((slot?, by))).collect()
            }
            Op::MatmulFp8(op) => vec![(op.out, tiles)],
            Op::GroupedFp8(op) => vec![(op.out, tiles)],
            Op::GroupedFp8BwdWeight(op) => vec![(op.d_weight, tiles)],
            _ => continue,
        };
        // a few of each kind, over the whole step
        if i % step != 0 {
            continue;
        }
        for (number, (slot, by)) in damages.into_iter().enumerate() {
            let report = lockstep(config, damaged(rounding(1), i, Some(slot), by), precision);
            let first = report.first_wrong.as_ref().unwrap_or_else(|| {
                panic!(
                    "damage {number} of op {i}, {} at {}, passes\n{report}",
                    node.op.name(),
                    program.origin(node)
                )
            });
            assert_eq!((first.index, first.op), (i, node.op.name()));
            found += 1;
        }
    }
    assert!(found > 12, "{found}");
}

/// A weight that is not finite must not pass for a large one: the step is skipped as in bf16.
#[test]
fn what_is_not_finite_stops_the_update() {
    let [config, ..] = models();
    for bad in [f32::INFINITY, f32::NAN] {
        let mut session = session(config, rounding(1), Precision::BF16.with_fp8(BLOCKS));
        let weight = session
            .train_program()
            .unwrap()
            .params()
            .iter()
            .find(|p| p.name.ends_with("c_fc.weight"))
            .unwrap()
            .weight;
        let one = Slot { shape: [1].into(), ..weight };
        assert_eq!(weight.dtype, DType::BF16);
        session.engine().write_f32(one, &[bad]).unwrap();
        let (loss, norm) = TRAINING.step(&mut session, 1);
        assert!(!loss.is_finite() && !norm.is_finite(), "{loss} {norm}");
        let program = session.train_program().unwrap();
        assert!(!program.range(Section::Update).is_empty());
    }
}

/// A run that goes on from its weights, moments and scales equals one that was not interrupted; without the scales it does not.
#[test]
fn scales_are_part_of_what_a_run_resumes_from() {
    let [config, ..] = models();
    let precision = Precision::BF16.with_fp8(HEAD);
    let mut whole = session(config, rounding(1), precision);
    TRAINING.steps(&mut whole, 1..=3);
    let scales = whole.scales().unwrap();
    assert!(scales.len() == 2 * 8 + 2 && scales.iter().all(|scale| *scale > 0.0), "{scales:?}");
    let slots = whole.state_slots().unwrap();
    let params = whole.train_program().unwrap().flat(ironhorse::core::Pool::Params);
    let mut state: Vec<(Slot, Vec<u8>)> =
        slots.into_iter().chain([params]).map(|slot| (slot, vec![0; slot.bytes()])).collect();
    for (slot, bytes) in &mut state {
        whole.engine().read_bytes(*slot, bytes).unwrap();
    }
    let expected = TRAINING.step(&mut whole, 4);
    for (known, same) in [(&scales[..], true), (&[], false)] {
        let mut resumed = session(config, rounding(1), precision);
        for (slot, bytes) in &state {
            resumed.engine().write_bytes(*slot, bytes).unwrap();
        }
        assert_eq!(resumed.set_scales(known).unwrap(), same);
        assert_eq!(TRAINING.step(&mut resumed, 4) == expected, same);
    }
}
