//! Ops that the engine joins give the bits of one after the other, for any number of threads.
#![allow(clippy::unwrap_used)]

use ironhorse_core::op::*;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cpu::CpuEngine;
use ironhorse_cpu::isa::Isa;

/// Rows, steps, columns of the logits, and how many of them are the vocabulary.
type Size = [usize; 4];

struct Head {
    program: Program,
    given: [Slot; 2],
    targets: Slot,
    results: [Slot; 2],
}

/// The output head and its loss.
fn head([rows, ic, oc, vocab]: Size, grad: bool) -> Head {
    let mut b = Builder::new();
    let [inp, weight] = [("inp", [rows, ic]), ("weight", [oc, ic])].map(|(n, s)| b.io(n, s, DType::F32));
    let (out, losses) = (b.io("out", [rows, oc], DType::F32), b.io("losses", [rows], DType::F32));
    let targets = b.io("targets", [rows], DType::I32);
    b.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
    b.push(CrossEntropy { losses, logits: out, targets, vocab, grad }).unwrap();
    Head { program: b.finish().unwrap(), given: [inp, weight], targets, results: [out, losses] }
}

/// Logits or their gradients, and the losses, with both ops in a call or in one call each.
fn run(engine: &mut CpuEngine, head: &Head, targets: &[i32], together: bool) -> Vec<u32> {
    engine.reserve(head.program.layout()).unwrap();
    for slot in head.given.into_iter().chain(head.results) {
        let value = |i: usize| ((i * 7919 + i / 977) % 1000) as f32 / 250.0 - 2.0;
        engine.write_f32(slot, &(0..slot.numel()).map(value).collect::<Vec<_>>()).unwrap();
    }
    engine.write_i32(head.targets, targets).unwrap();
    let scalars = Scalars { loss_scale: 0.25, ..Scalars::default() };
    let at_once = if together { 2 } else { 1 };
    for first in (0..2).step_by(at_once) {
        engine.run(&head.program, first..first + at_once, &scalars).unwrap();
    }
    let mut bits = Vec::new();
    for slot in head.results {
        let mut values = vec![0.0; slot.numel()];
        engine.read_f32(slot, &mut values).unwrap();
        bits.extend(values.iter().map(|x| x.to_bits()));
    }
    bits
}

#[test]
fn the_loss_of_rows_as_they_are_computed() {
    // 1000 columns of 64 steps are joined, as are blocks of a few rows; one row and 3000 columns are not.
    let sizes = [[130, 64, 1000, 1000], [67, 33, 112, 100], [1, 64, 50, 50], [70, 64, 3000, 2999]];
    for size in sizes {
        let [rows, _, _, vocab] = size;
        let targets = |row: usize| if row % 7 == 3 { IGNORED } else { (row * 31 % vocab) as i32 };
        let targets = (0..rows).map(targets).collect::<Vec<_>>();
        for grad in [true, false] {
            let head = head(size, grad);
            for isa in Isa::supported() {
                let want = run(&mut CpuEngine::with_isa(1, isa), &head, &targets, false);
                for threads in [1, 2, 5] {
                    let got = run(&mut CpuEngine::with_isa(threads, isa), &head, &targets, true);
                    let differ = got.iter().zip(&want).position(|(a, b)| a != b);
                    assert_eq!(differ, None, "{size:?}, grad {grad}, {threads} threads, {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_target_outside_the_vocabulary_is_refused() {
    let head = head([130, 64, 1000, 990], true);
    let mut engine = CpuEngine::new(2);
    engine.reserve(head.program.layout()).unwrap();
    let mut targets = vec![0; 130];
    targets[77] = 990;
    engine.write_i32(head.targets, &targets).unwrap();
    let error = engine.run(&head.program, 0..2, &Scalars::default()).unwrap_err().to_string();
    assert!(error.contains("target 990 at index 77"), "{error}");
}
