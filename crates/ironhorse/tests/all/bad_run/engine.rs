//! The CPU engine with faults: a step whose tokens contain [`MARK`] is made non-finite between its backward and its
//! update, deterministically. Optionally results arrive late, as on a GPU.

use ironhorse::core::{Engine, EngineExt, Pending, Program, Result, Scalars, Section, Slot};
use ironhorse::cpu::CpuEngine;
use ironhorse_testkit::{Hook, Wrapped};
use std::collections::BTreeMap;
use std::ops::Range;

/// The token that makes a step bad.
pub const MARK: i32 = 63;

/// The token whose step is finite but leaves a non-finite weight.
pub const POISON: i32 = 62;

/// What is made non-finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Loss(Bits),
    Gradient(Bits),
}

/// A number by its bits, so that NaN equals itself.
pub type Bits = u32;

/// The CPU engine with the faults of a [`Faults`].
pub type Faulty = Wrapped<CpuEngine, Faults>;

pub struct Faults {
    fault: Fault,
    /// Requested results that are not delivered yet, by ticket; `None` delivers at once.
    queue: Option<BTreeMap<u64, f32>>,
    asked: u64,
    /// Whether a micro-step of this step holds the mark.
    bad: bool,
    poisoned: bool,
}

/// An engine whose marked steps go wrong in this way.
pub fn faulty(fault: Fault, queued: bool) -> Faulty {
    let queue = queued.then(BTreeMap::new);
    Wrapped::new(CpuEngine::new(1), Faults { fault, queue, asked: 0, bad: false, poisoned: false })
}

impl Faults {
    /// Whether the tokens hold the mark and the poison.
    fn look(cpu: &mut CpuEngine, program: &Program) -> Result<[bool; 2]> {
        let slot = program.io("x").unwrap();
        let mut x = vec![0; slot.numel()];
        cpu.read_i32(slot, &mut x)?;
        Ok([x.contains(&MARK), x.contains(&POISON)])
    }

    fn spoil(&self, cpu: &mut CpuEngine, program: &Program) -> Result<()> {
        let (slot, bits) = match self.fault {
            Fault::Loss(bits) => (program.io("loss").unwrap(), bits),
            Fault::Gradient(bits) => (program.params()[1].grad(), bits),
        };
        cpu.write_f32(slot, &vec![f32::from_bits(bits); slot.numel()])
    }
}

impl Hook<CpuEngine> for Faults {
    fn run(
        &mut self,
        cpu: &mut CpuEngine,
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
    ) -> Result<()> {
        let update = program.range(Section::Update);
        // only whole ranges are a step; single ops are run by the search for the fault
        if ops == program.micro_step() && !update.is_empty() {
            let [marked, poisoned] = Self::look(cpu, program)?;
            self.bad = marked || (scalars.micro_step > 0 && self.bad);
            self.poisoned = poisoned;
        } else if ops == update && self.bad {
            self.spoil(cpu, program)?;
        }
        cpu.run(program, ops.clone(), scalars)?;
        if ops == update && self.poisoned {
            let slot = program.params()[1].weight;
            cpu.write_f32(slot, &vec![f32::NAN; slot.numel()])?;
        }
        Ok(())
    }

    fn start_read(&mut self, cpu: &mut CpuEngine, slot: Slot) -> Result<Pending> {
        let value = cpu.read_scalar(slot)?;
        let Some(queue) = &mut self.queue else { return Ok(Pending::Ready(value)) };
        self.asked += 1;
        queue.insert(self.asked, value);
        Ok(Pending::Queued(self.asked))
    }

    fn finish_read(&mut self, cpu: &mut CpuEngine, pending: Pending) -> Result<f32> {
        match (pending, &mut self.queue) {
            (Pending::Queued(ticket), Some(queue)) => Ok(queue.remove(&ticket).unwrap()),
            (pending, _) => cpu.finish_read(pending),
        }
    }
}
