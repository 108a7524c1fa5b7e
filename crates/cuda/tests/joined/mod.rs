//! Ops computed together or one after the other: running them either way, and reading what is compared.

use ironhorse_core::{Engine, EngineExt, Program, Scalars, Slot};
use ironhorse_cuda::CudaEngine;

/// Where each expert's rows begin, and where the last one's end.
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
