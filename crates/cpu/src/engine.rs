//! The CPU engine.

use crate::gemm::Workspace;
use crate::isa::Isa;
use crate::limits::Limits;
use crate::memory::Memory;
use crate::op::{self, Ctx, RopeTables, Scratch};
use crate::team::{PerWorker, Team};
use ironhorse_core::{
    DType, Engine, Layout, Pool, Program, Result, Scalars, Slot, check_host_bytes, check_host_len,
};
use std::ops::Range;

/// Runs programs on all cores, with the same bits for any number of threads.
///
/// ```
/// use ironhorse_core::{Builder, DType, Engine, Scalars, op::Fill};
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
    memory: Memory,
    team: Team,
    isa: Isa,
    workspace: Workspace,
    scratch: PerWorker<Scratch>,
    partials: Vec<f64>,
    counts: Vec<i32>,
    tables: RopeTables,
}

impl CpuEngine {
    /// An engine with this many threads; 0 means one for each core.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::detect())
    }

    /// An engine that uses only these instructions.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        let team = Team::new(threads);
        let scratch = PerWorker::new(&team, |_| Scratch::default());
        Self {
            memory: Memory::new(),
            team,
            isa,
            workspace: Workspace::new(),
            scratch,
            partials: Vec::new(),
            counts: Vec::new(),
            tables: RopeTables::default(),
        }
    }

    /// How many threads work.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &str {
        "cpu"
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.memory.reserve(layout)
    }

    fn allocated(&self) -> usize {
        self.memory.allocated()
    }

    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()> {
        check_host_len(&slot, data.len())?;
        // SAFETY: `&mut self`: no op runs, nobody else holds a slice.
        unsafe { self.memory.f32(slot)?.all_mut() }.copy_from_slice(data);
        Ok(())
    }

    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> Result<()> {
        check_host_len(&slot, data.len())?;
        // SAFETY: as in `write_f32`.
        data.copy_from_slice(unsafe { self.memory.f32(slot)?.all() });
        Ok(())
    }

    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        check_host_bytes(&slot, out.len())?;
        if slot.dtype == DType::I32 {
            // SAFETY: as in `write_f32`.
            let values = unsafe { self.memory.i32(slot)?.all() };
            out.as_chunks_mut()
                .0
                .iter_mut()
                .zip(values)
                .for_each(|(cell, value)| *cell = value.to_le_bytes());
        } else {
            // SAFETY: as in `write_f32`.
            let values = unsafe { self.memory.f32(slot)?.all() };
            out.as_chunks_mut()
                .0
                .iter_mut()
                .zip(values)
                .for_each(|(cell, value)| *cell = value.to_le_bytes());
        }
        Ok(())
    }

    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()> {
        check_host_len(&slot, data.len())?;
        // SAFETY: as in `write_f32`.
        unsafe { self.memory.i32(slot)?.all_mut() }.copy_from_slice(data);
        Ok(())
    }

    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> Result<()> {
        check_host_len(&slot, data.len())?;
        // SAFETY: as in `write_f32`.
        data.copy_from_slice(unsafe { self.memory.i32(slot)?.all() });
        Ok(())
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        let mut ctx = Ctx {
            memory: &self.memory,
            team: &self.team,
            isa: self.isa,
            workspace: &mut self.workspace,
            scratch: &mut self.scratch,
            partials: &mut self.partials,
            counts: &mut self.counts,
            tables: &mut self.tables,
            program,
            scalars,
        };
        program.nodes()[ops].iter().try_for_each(|node| op::run(&mut ctx, &node.op))
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn memory_use(&self) -> Vec<(String, usize)> {
        let pools = Pool::ALL.iter().map(|&pool| (pool.name().to_owned(), self.memory.bytes(pool)));
        pools.filter(|(_, bytes)| *bytes > 0).collect()
    }

    fn measure_flops(&mut self, _dtype: DType) -> Result<f64> {
        Ok(Limits::measure_flops(self.threads()))
    }

    fn measure_bandwidth(&mut self) -> Result<f64> {
        Ok(Limits::measure_bandwidth(self.threads()))
    }
}
