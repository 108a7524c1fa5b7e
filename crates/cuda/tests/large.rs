//! Tensors of more than 2³¹ elements on a real GPU with 16 GiB free:
//! `cargo test -p ironhorse-cuda --test large -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::op::{Add, CrossEntropy, Fill};
use ironhorse_core::{Builder, DType, Engine, EngineExt, Scalars, Slot};
use ironhorse_cuda::{CudaEngine, Settings};

const ROWS: usize = 42_752;
const VOCAB: usize = 50_257;
const PADDED: usize = 50_304;
const _: () = assert!(ROWS * PADDED > 1 << 31, "an index of 32 bits with a sign does not reach the end");

/// The rows to check: the first and last, and those on both sides of 2³⁰ and 2³¹ elements.
const LOOK: [usize; 6] =
    [0, (1 << 30) / PADDED, (1 << 30) / PADDED + 1, (1 << 31) / PADDED, ROWS - 2, ROWS - 1];

/// One row of a tensor.
fn row(slot: Slot, row: usize) -> Slot {
    let offset = slot.offset + row * PADDED * slot.dtype.size();
    Slot { offset, shape: [PADDED].into(), ..slot }
}

fn read(engine: &mut CudaEngine, slot: Slot) -> Vec<f32> {
    let mut data = vec![f32::NAN; slot.numel()];
    engine.read_f32(slot, &mut data).unwrap();
    data
}

#[test]
#[ignore = "needs a GPU"]
fn more_than_2_to_the_31_elements() {
    let mut b = Builder::new();
    let [x, y, logits] = ["x", "y", "logits"].map(|name| b.io(name, [1, ROWS, PADDED], DType::BF16));
    let losses = b.io("losses", [1, ROWS], DType::F32);
    let targets = b.io("targets", [1, ROWS], DType::I32);
    b.push(Fill { out: x, value: 1.5 }).unwrap();
    b.push(Fill { out: y, value: 0.25 }).unwrap();
    b.push(Add { out: logits, a: x, b: y }).unwrap();
    b.push(CrossEntropy { losses, logits, targets, vocab: VOCAB, grad: true }).unwrap();
    let program = b.finish().unwrap();
    let mut engine = CudaEngine::new(Settings::default()).unwrap();
    engine.reserve(program.layout()).unwrap();
    let scalars = Scalars { loss_scale: 1.0, ..Scalars::default() };

    engine.run(&program, 0..3, &scalars).unwrap();
    for at in LOOK {
        assert!(read(&mut engine, row(logits, at)).iter().all(|&value| value == 1.75), "row {at}");
    }

    // Each checked row has a different logit, so that no row can be mistaken for another.
    let place = |at: usize| at * 7919 % VOCAB;
    let mut all_targets = vec![0; ROWS];
    for (i, &at) in LOOK.iter().enumerate() {
        let mut logit = vec![1.75; PADDED];
        logit[place(at)] = 4.0 + i as f32;
        engine.write_f32(row(logits, at), &logit).unwrap();
        all_targets[at] = place(at) as i32;
    }
    engine.write_i32(targets, &all_targets).unwrap();
    engine.run(&program, 3..4, &scalars).unwrap();
    let losses = read(&mut engine, losses);
    for (i, &at) in LOOK.iter().enumerate() {
        let top = f64::from(4.0 + i as f32);
        let sum = ((VOCAB - 1) as f64 * (1.75 - top).exp()) + 1.0;
        assert!((f64::from(losses[at]) - sum.ln()).abs() < 1e-3, "row {at}: {}", losses[at]);
        let (hit, other) = (1.0 / sum - 1.0, (1.75 - top).exp() / sum);
        let near = |value: f32, wanted: f64| (f64::from(value) / wanted - 1.0).abs() < 0.01;
        for (column, &value) in read(&mut engine, row(logits, at)).iter().enumerate() {
            let good = match column {
                _ if column == place(at) => near(value, hit),
                _ if column < VOCAB => near(value, other),
                _ => value == 0.0,
            };
            assert!(good, "row {at}, column {column}: {value}");
        }
    }
    let plain = (VOCAB as f64).ln();
    let others = losses.iter().enumerate().filter(|(at, _)| !LOOK.contains(at));
    assert!(others.into_iter().all(|(_, &loss)| (f64::from(loss) - plain).abs() < 1e-3));
}
