//! What the benches of ops share: a program whose ops are timed in turns, the best of many runs of each.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use ironhorse_core::op::Op;
use ironhorse_core::{Builder, DType, Engine, EngineExt, Operands, Program, Scalars, Slot};
use ironhorse_cpu::{CpuEngine, CpuSettings};
use std::ops::Range;
use std::time::Instant;

/// Collects the slots and ops of one size.
#[derive(Default)]
pub struct Ops {
    builder: Builder,
    slots: usize,
    pushed: usize,
    timed: Vec<Range<usize>>,
}

/// A program, the slots that are given numbers before its first op (all others begin as zeros), and which ops are timed together.
pub struct Timed {
    program: Program,
    given: Vec<Slot>,
    parts: Vec<Range<usize>>,
}

impl Ops {
    pub fn slot(&mut self, shape: [usize; 3], dtype: DType) -> Slot {
        self.slots += 1;
        self.builder.io(format!("{}", self.slots), shape, dtype)
    }

    pub fn f32s<const N: usize>(&mut self, shape: [usize; 3]) -> [Slot; N] {
        std::array::from_fn(|_| self.slot(shape, DType::F32))
    }

    pub fn push(&mut self, op: impl Into<Op>) {
        self.push_all([op.into()]);
    }

    /// Ops that are timed together: an engine may join them.
    pub fn push_all<const N: usize>(&mut self, ops: [Op; N]) {
        ops.into_iter().for_each(|op| self.builder.push(op).unwrap());
        self.timed.push(self.pushed..self.pushed + N);
        self.pushed += N;
    }

    pub fn finish(self, given: Vec<Slot>) -> Timed {
        Timed { program: self.builder.finish().unwrap(), given, parts: self.timed }
    }
}

/// Times all ops this often, so that a slow moment of the machine is not all that one of them sees.
const ROUNDS: usize = 5;

/// Times the ops of every size whose name has the words of the variable ONLY. The first number among the arguments is that of the
/// threads, otherwise there is one for each core; with `bf16` among them products round their operands. Each op is run for `seconds`, at
/// most `most` times.
pub fn run<S: std::fmt::Debug + Copy>(
    sizes: &[(&str, S)],
    program: impl Fn(S) -> Timed,
    (seconds, most): (f64, usize),
) {
    let threads = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    let operands = if std::env::args().any(|word| word == "bf16") { Operands::Bf16 } else { Operands::F32 };
    let only = std::env::var("ONLY").unwrap_or_default();
    for &(name, size) in sizes.iter().filter(|(name, _)| name.contains(&only)) {
        let Timed { program, given, parts } = program(size);
        let mut engine = CpuEngine::with(CpuSettings { threads, operands });
        engine.reserve(program.layout()).unwrap();
        for slot in given {
            let value = |i: usize| ((i * 7919 + i / 977) % 1000) as f32 / 500.0 - 1.0;
            engine.write_f32(slot, &(0..slot.numel()).map(value).collect::<Vec<_>>()).unwrap();
        }
        println!("{name}: {size:?}, {} threads", engine.threads());
        let mut fastest = vec![f64::INFINITY; parts.len()];
        let each = (seconds / ROUNDS as f64, most / ROUNDS);
        for _ in 0..ROUNDS {
            for (part, best) in parts.iter().zip(&mut fastest) {
                *best = best.min(best_of(&mut engine, &program, part.clone(), each));
            }
        }
        for (part, best) in parts.into_iter().zip(fastest) {
            let ops = || program.nodes()[part.clone()].iter().map(|node| &node.op);
            let [flops, bytes] = [ops().map(|op| op.flops()).sum::<u64>(), ops().map(|op| op.bytes()).sum()]
                .map(|x| x as f64 / best * 1e-9);
            let name = ops().map(|op| op.name()).collect::<Vec<_>>().join(" + ");
            println!("  {name:<40}{:>10.1} us {flops:>8.1} GFLOP/s {bytes:>8.1} GB/s", best * 1e6);
        }
    }
}

/// Seconds of the fastest run of some ops.
fn best_of(
    engine: &mut CpuEngine,
    program: &Program,
    ops: Range<usize>,
    (seconds, most): (f64, usize),
) -> f64 {
    let (mut best, mut runs, begun) = (f64::INFINITY, 0, Instant::now());
    while runs < 5 || (begun.elapsed().as_secs_f64() < seconds && runs < most) {
        let start = Instant::now();
        engine.run(program, ops.clone(), &Scalars::default()).unwrap();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
