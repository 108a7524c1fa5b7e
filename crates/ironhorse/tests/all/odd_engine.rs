//! The CPU's engine with what only others have: algorithms that every process chooses for itself, and host memory that is refused.

use ironhorse::core::{
    Communicator, DeviceDescription, Engine, Error, HostSlice, HostSliceMut, Layout, MakeHostMemory,
    MemoryUse, Program, Result, Scalars, Slot,
};
use ironhorse::cpu::CpuEngine;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct Odd {
    inner: CpuEngine,
    rank: usize,
    /// The rank that chose for each product: as on a GPU, where measurements decide, every process another algorithm.
    chosen: BTreeMap<String, String>,
    /// Whether host memory for copies is refused.
    pub without_memory: bool,
    /// How often host memory was asked for.
    pub asked: Arc<AtomicUsize>,
}

impl Odd {
    pub fn new(rank: usize) -> Self {
        let (inner, chosen) = (CpuEngine::new(1), BTreeMap::new());
        Self { inner, rank, chosen, without_memory: false, asked: Arc::default() }
    }
}

impl Engine for Odd {
    fn device(&self) -> &DeviceDescription {
        self.inner.device()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.inner.reserve(layout)
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()> {
        self.inner.write(slot, data)
    }

    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        self.inner.read(slot, out)
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        self.choose(program, ops.clone(), scalars)?;
        self.inner.run(program, ops, scalars)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn join(&mut self, ranks: Arc<dyn Communicator>) -> Result<()> {
        self.inner.join(ranks)
    }

    fn host_memory(&self) -> MakeHostMemory {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.without_memory {
            true => Box::new(|bytes| {
                Err(Error::OutOfMemory { engine: "odd", what: format!("no {bytes} bytes to copy to") })
            }),
            false => self.inner.host_memory(),
        }
    }

    fn choose(&mut self, program: &Program, ops: Range<usize>, _: &Scalars) -> Result<()> {
        for node in program.nodes()[ops].iter().filter(|node| !node.op.operands().is_empty()) {
            // places in memory may differ between ranks
            let shapes: Vec<_> = node.op.args().iter().map(|arg| arg.slot.shape).collect();
            let name = format!("{} of {shapes:?}", node.op.name());
            self.chosen.entry(name).or_insert_with(|| self.rank.to_string());
        }
        Ok(())
    }

    fn choices(&self) -> Vec<(String, String)> {
        self.chosen.clone().into_iter().collect()
    }

    fn set_choices(&mut self, choices: &[(String, String)]) -> Result<()> {
        for (name, value) in choices {
            self.chosen.entry(name.clone()).or_insert_with(|| value.clone()); // what was chosen already stays
        }
        Ok(())
    }
}
