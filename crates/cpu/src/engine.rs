//! The CPU engine.

use crate::gemm::Workspace;
use crate::isa::Isa;
use crate::kernel::sampling::{Sampling, draw};
use crate::limits::Limits;
use crate::memory::Memory;
use crate::op::{self, Ctx, OpScratch, RopeTables};
use crate::settled::{Packer, Settled};
use crate::team::{PerWorker, Team};
use ironhorse_core::ranks::Alone;
use ironhorse_core::{
    Communicator, DType, DeviceDescription, Engine, HostSlice, HostSliceMut, Layout, Limit, MemoryUse,
    Operands, Pool, Program, Result, Scalars, Slot, TokenChoice,
};
use std::ops::Range;
use std::sync::Arc;

/// How the CPU engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSettings {
    /// Threads; 0 means one for each core.
    pub threads: usize,
    /// What linear layers round the operands of their products to, where the products are large, and attention on tiles: bf16 or nothing.
    pub operands: Operands,
}

impl From<usize> for CpuSettings {
    fn from(threads: usize) -> Self {
        Self { threads, ..Self::default() }
    }
}

/// Runs programs on all cores, with the same bits for any number of threads.
///
/// ```
/// use ironhorse_core::{Builder, DType, Engine, EngineExt, Scalars, op::Fill};
/// use ironhorse_cpu::CpuEngine;
///
/// let mut b = Builder::new();
/// let out = b.io("out", [3], DType::F32);
/// b.push(Fill { out, value: 1.0 })?;
/// let program = b.finish()?;
///
/// let mut engine = CpuEngine::new(0);
/// engine.reserve(program.layout())?;
/// engine.run(&program, 0..1, &Scalars::default())?;
/// let mut host = [0.0; 3];
/// engine.read_f32(out, &mut host)?;
/// assert_eq!(host, [1.0; 3]);
/// # Ok::<(), ironhorse_core::Error>(())
/// ```
pub struct CpuEngine {
    device: DeviceDescription,
    memory: Memory,
    team: Team,
    isa: Isa,
    operands: Operands,
    workspace: Workspace,
    scratch: PerWorker<OpScratch>,
    partials: Vec<f64>,
    counts: Vec<i32>,
    tables: RopeTables,
    settled: Settled,
    ranks: Arc<dyn Communicator>,
}

impl CpuEngine {
    /// An engine with this many threads; 0 means one for each core.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::detect())
    }

    /// An engine as asked for.
    pub fn with(settings: CpuSettings) -> Self {
        Self { operands: settings.operands, ..Self::new(settings.threads) }
    }

    /// An engine that uses only these instructions.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        let team = Team::new(threads);
        let scratch = PerWorker::new(&team, |_| OpScratch::default());
        Self {
            device: DeviceDescription::host("cpu"),
            memory: Memory::new(),
            team,
            isa,
            operands: Operands::F32,
            workspace: Workspace::new(),
            scratch,
            partials: Vec::new(),
            counts: Vec::new(),
            tables: RopeTables::default(),
            settled: Settled::default(),
            ranks: Arc::new(Alone),
        }
    }

    /// How many threads work.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The weights that are packed, and what packs them.
    fn settled(&mut self) -> (&mut Settled, Packer<'_>) {
        let Self { memory, team, workspace, isa, operands, settled, .. } = self;
        (settled, Packer { memory, team, workspace, isa: *isa, operands: *operands })
    }

    /// Puts weights in this slot back in the order of their elements.
    fn unsettle(&mut self, slot: Slot) -> Result<()> {
        let (settled, mut packer) = self.settled();
        settled.undo(&mut packer, slot)
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

impl Engine for CpuEngine {
    fn device(&self) -> &DeviceDescription {
        &self.device
    }

    fn memory(&self) -> MemoryUse {
        let pools = Pool::ALL.iter().map(|&pool| (pool.name().to_owned(), self.memory.bytes(pool)));
        let by_category = pools.filter(|(_, bytes)| *bytes > 0).collect();
        MemoryUse { allocated: self.memory.allocated(), by_category, ..MemoryUse::default() }
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.memory.reserve(layout)
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()> {
        data.check(&slot)?;
        self.unsettle(slot)?;
        // SAFETY: `&mut self` guarantees that no op runs and that no other slice of the pools exists.
        unsafe {
            match data {
                HostSlice::F32(data) => self.memory.f32(slot)?.all_mut().copy_from_slice(data),
                HostSlice::I32(data) => self.memory.i32(slot)?.all_mut().copy_from_slice(data),
                HostSlice::Bytes(data) if slot.dtype == DType::I32 => {
                    let cells = self.memory.i32(slot)?.all_mut().iter_mut().zip(data.as_chunks().0);
                    cells.for_each(|(value, &cell)| *value = i32::from_le_bytes(cell));
                }
                HostSlice::Bytes(data) => {
                    let cells = self.memory.f32(slot)?.all_mut().iter_mut().zip(data.as_chunks().0);
                    cells.for_each(|(value, &cell)| *value = f32::from_le_bytes(cell));
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        out.check(&slot)?;
        self.unsettle(slot)?;
        // SAFETY: as in `write`.
        unsafe {
            match out {
                HostSliceMut::F32(out) => out.copy_from_slice(self.memory.f32(slot)?.all()),
                HostSliceMut::I32(out) => out.copy_from_slice(self.memory.i32(slot)?.all()),
                HostSliceMut::Bytes(out) if slot.dtype == DType::I32 => {
                    let cells = out.as_chunks_mut().0.iter_mut().zip(self.memory.i32(slot)?.all());
                    cells.for_each(|(cell, value)| *cell = value.to_le_bytes());
                }
                HostSliceMut::Bytes(out) => {
                    let cells = out.as_chunks_mut().0.iter_mut().zip(self.memory.f32(slot)?.all());
                    cells.for_each(|(cell, value)| *cell = value.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Weights of linear layers are packed, in their place: a product of any number of rows reads them once, as they lie. Where products
    /// round their operands to bf16, and the machine has instructions for them, they are kept in bf16.
    fn settle(&mut self, programs: &[&Program]) -> Result<()> {
        let (settled, mut packer) = self.settled();
        settled.set(&mut packer, programs)
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        if !self.settled.knows(program) {
            let (settled, mut packer) = self.settled();
            settled.undo_all(&mut packer)?;
        }
        let mut ctx = Ctx {
            memory: &self.memory,
            team: &self.team,
            isa: self.isa,
            operands: self.operands,
            workspace: &mut self.workspace,
            scratch: &mut self.scratch,
            partials: &mut self.partials,
            counts: &mut self.counts,
            tables: &mut self.tables,
            settled: &self.settled,
            ranks: self.ranks.as_ref(),
            program,
            apart: program.continues(),
            scalars,
        };
        let mut nodes = program.nodes()[ops].iter().peekable();
        while let Some(node) = nodes.next() {
            if let Some(next) = nodes.peek()
                && op::run_joined(&mut ctx, [&node.op, &next.op])?
            {
                nodes.next();
            } else {
                op::run(&mut ctx, &node.op)?;
            }
            ctx.ranks.gets_on();
        }
        Ok(())
    }

    /// Leaves it to the host to say what is wrong with logits that are no distribution, and to apply top-k and top-p together.
    fn pick_token(&mut self, logits: Slot, vocab: usize, choice: &TokenChoice) -> Result<Option<u32>> {
        let &TokenChoice { temperature, top_k, top_p, uniform } = choice;
        if top_k.is_some() && top_p.is_some() {
            return Ok(None);
        }
        // SAFETY: as in `write`.
        let row = unsafe { self.memory.f32(logits)?.all() };
        let sampling = Sampling { temperature, top_k, top_p };
        let drawn = draw(self.isa, &row[..vocab.min(row.len())], &sampling, uniform);
        Ok(drawn.ok().map(|token| token as u32))
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn join(&mut self, ranks: Arc<dyn Communicator>) -> Result<()> {
        self.ranks = ranks;
        Ok(())
    }

    fn measure(&mut self, limit: Limit) -> Result<f64> {
        Ok(match limit {
            Limit::Flops(_) => Limits::measure_flops(self.threads(), self.operands),
            Limit::Bandwidth => Limits::measure_bandwidth(self.threads()),
        })
    }
}
