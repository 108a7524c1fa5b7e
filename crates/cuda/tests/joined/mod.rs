//! Ops computed together or one after the other: running them either way, and reading what is compared.

#![allow(dead_code, reason = "no test needs all of it")]

use ironhorse_core::op::{Accum, Quantize};
use ironhorse_core::{DType, Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cuda::{CudaEngine, Settings, devices};
use ironhorse_testkit::Rng;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard};

/// The types of a gradient of weights, and whether it is added to what is there.
pub const WAYS: [(DType, bool); 4] =
    [(DType::BF16, false), (DType::BF16, true), (DType::F32, false), (DType::F32, true)];

/// Keeps other tests of this program off the device: a profile records all kernels there.
pub fn alone() -> MutexGuard<'static, ()> {
    static DEVICE: Mutex<()> = Mutex::new(());
    DEVICE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub fn engine() -> CudaEngine {
    CudaEngine::new(Settings::default()).unwrap()
}

pub fn is_hopper() -> bool {
    devices().unwrap()[0].compute == (9, 0)
}

/// Random numbers up to the given absolute value.
pub fn fill(engine: &mut CudaEngine, rng: &mut Rng, slot: Slot, most: f32) {
    engine.write_f32(slot, &rng.uniforms(slot.numel(), -most, most)).unwrap();
}

/// Writes one number to all elements of tensors.
pub fn set<'a>(engine: &mut CudaEngine, slots: impl IntoIterator<Item = &'a Slot>, value: f32) {
    for slot in slots {
        engine.write_f32(*slot, &vec![value; slot.numel()]).unwrap();
    }
}

/// The index of each expert's first row, then the number of rows.
pub fn offsets(counts: &[usize]) -> Vec<i32> {
    let ends = counts.iter().scan(0, |end, count| {
        *end += *count as i32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Runs all ops, in one range or each by itself.
pub fn run(engine: &mut CudaEngine, program: &Program, together: bool, scalars: &Scalars) {
    let count = program.nodes().len();
    let length = if together { count } else { 1 };
    for start in (0..count).step_by(length) {
        engine.run(program, start..start + length, scalars).unwrap();
    }
}

/// The bits of tensors.
pub fn bits(engine: &mut CudaEngine, slots: &[Slot]) -> Vec<Vec<u32>> {
    let read = |slot: &Slot| {
        let mut data = vec![0.0; slot.numel()];
        engine.read_f32(*slot, &mut data).unwrap();
        data.iter().map(|value: &f32| value.to_bits()).collect()
    };
    slots.iter().map(read).collect()
}

/// Fails if bits differ, or are not those of finite numbers.
pub fn check_same(together: &[Vec<u32>], apart: &[Vec<u32>], case: impl Debug) {
    assert!(together == apart, "{case:?}");
    assert!(together.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{case:?}");
}

/// A gradient of experts' weights and the same rows of it by an op for each `parts`, of which each is so few rows that single blocks
/// compute it: all ops run from tensors full of `old`, and the bits must be the same. The names of the kernels.
pub fn check_parts(
    engine: &mut CudaEngine,
    program: &Program,
    (whole, parts): (Slot, &[Slot]),
    old: f32,
    case: impl Debug,
) -> Vec<String> {
    set(engine, parts.iter().chain([&whole]), old);
    run(engine, program, true, &Scalars::default());
    let apart = bits(engine, parts);
    let experts = whole.shape.dims()[0];
    let of_expert = |expert: usize| {
        apart.iter().flat_map(move |part| part.chunks(part.len() / experts).nth(expert).unwrap())
    };
    let apart = (0..experts).flat_map(of_expert).copied().collect();
    check_same(&bits(engine, &[whole]), &[apart], case);
    kernels(engine, program)
}

/// The names of the kernels of all ops in one range, each of which says whose work it does.
pub fn kernels(engine: &mut CudaEngine, program: &Program) -> Vec<String> {
    let mut record = Vec::new();
    let ops = 0..program.nodes().len();
    engine.profile(program, ops.clone(), &[], &Scalars::default(), &mut record).unwrap();
    let is_done = |op: &usize| record.iter().any(|timed| (timed.first..=timed.op).contains(op));
    let left: Vec<usize> = ops.filter(|op| !is_done(op)).collect();
    assert!(left.is_empty(), "no kernel says that it does the work of ops {left:?}: {record:?}");
    record.into_iter().map(|timed| timed.name).collect()
}

pub fn has(names: &[String], kernel: &str) -> bool {
    names.iter().any(|name| name == kernel)
}

/// `inp` in 8 bits, by rows.
#[allow(clippy::panic, reason = "a test")]
pub fn quantize(inp: Slot, out: Slot, [inverse, amax, seen]: [Slot; 3]) -> Quantize {
    let DType::F8(format) = out.dtype else { panic!("{out:?} is not in 8 bits") };
    Quantize {
        out: Some(out),
        out_t: None,
        inverse,
        d_bias: None,
        inp,
        pre: None,
        amax,
        seen: Some(seen),
        act: None,
        format,
        margin: 1,
        unknown: 3,
        accum: Accum::Write,
    }
}
