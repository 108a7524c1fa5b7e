//! The CPU engine with faults: a step whose tokens hold [`MARK`] is made non-finite between its backward and its update, in
//! the same way wherever and whenever it is run. Optionally results arrive late, as those of a GPU do.

use ironhorse::core::{
    Engine, HostMemory, Layout, MakeHostMemory, Pending, Program, Result, Scalars, Section, Slot,
};
use ironhorse::cpu::CpuEngine;
use std::collections::BTreeMap;
use std::ops::Range;

/// The token that makes a step bad.
pub const MARK: i32 = 63;

/// The token whose step is finite and leaves a weight that is not.
pub const POISON: i32 = 62;

/// What is made non-finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Loss(Bits),
    Gradient(Bits),
}

/// A number by its bits, so that NaN equals itself.
pub type Bits = u32;

pub struct Faulty {
    inner: CpuEngine,
    fault: Fault,
    /// Results that were asked for and not delivered, by their tickets; `None` delivers at once.
    queue: Option<BTreeMap<u64, f32>>,
    asked: u64,
    /// Whether a micro-step of this step holds the mark.
    bad: bool,
    poisoned: bool,
}

impl Faulty {
    pub fn new(fault: Fault, queued: bool) -> Self {
        Self {
            inner: CpuEngine::new(1),
            fault,
            queue: queued.then(BTreeMap::new),
            asked: 0,
            bad: false,
            poisoned: false,
        }
    }

    /// Whether the tokens hold the mark and the poison.
    fn look(&mut self, program: &Program) -> Result<[bool; 2]> {
        let slot = program.io("x").unwrap();
        let mut x = vec![0; slot.numel()];
        self.inner.read_i32(slot, &mut x)?;
        Ok([x.contains(&MARK), x.contains(&POISON)])
    }

    fn spoil(&mut self, program: &Program) -> Result<()> {
        let (slot, bits) = match self.fault {
            Fault::Loss(bits) => (program.io("loss").unwrap(), bits),
            Fault::Gradient(bits) => (program.params()[1].grad(), bits),
        };
        self.inner.write_f32(slot, &vec![f32::from_bits(bits); slot.numel()])
    }
}

impl Engine for Faulty {
    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        let update = program.range(Section::Update);
        // only whole sections are a step; one op at a time is somebody looking for the fault
        if ops == program.range(Section::Forward) && !update.is_empty() {
            let [marked, poisoned] = self.look(program)?;
            self.bad = marked || (scalars.micro_step > 0 && self.bad);
            self.poisoned = poisoned;
        } else if ops == update && self.bad {
            self.spoil(program)?;
        }
        self.inner.run(program, ops.clone(), scalars)?;
        if ops == update && self.poisoned {
            let slot = program.params()[1].weight;
            self.inner.write_f32(slot, &vec![f32::NAN; slot.numel()])?;
        }
        Ok(())
    }

    fn start_read(&mut self, slot: Slot) -> Result<Pending> {
        let value = self.inner.read_scalar(slot)?;
        let Some(queue) = &mut self.queue else { return Ok(Pending::Ready(value)) };
        self.asked += 1;
        queue.insert(self.asked, value);
        Ok(Pending::Queued(self.asked))
    }

    fn finish_read(&mut self, pending: Pending) -> Result<f32> {
        match (pending, &mut self.queue) {
            (Pending::Queued(ticket), Some(queue)) => Ok(queue.remove(&ticket).unwrap()),
            (pending, _) => self.inner.finish_read(pending),
        }
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.inner.reserve(layout)
    }

    fn allocated(&self) -> usize {
        self.inner.allocated()
    }

    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()> {
        self.inner.write_f32(slot, data)
    }

    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> Result<()> {
        self.inner.read_f32(slot, data)
    }

    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()> {
        self.inner.write_i32(slot, data)
    }

    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> Result<()> {
        self.inner.read_i32(slot, data)
    }

    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        self.inner.read_bytes(slot, out)
    }

    fn write_bytes(&mut self, slot: Slot, data: &[u8]) -> Result<()> {
        self.inner.write_bytes(slot, data)
    }

    fn host_memory(&self) -> MakeHostMemory {
        self.inner.host_memory()
    }

    fn snapshot(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> Result<()> {
        self.inner.snapshot(slots, memory)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}
