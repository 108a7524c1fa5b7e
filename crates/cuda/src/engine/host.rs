//! The engine as the core knows it: every method calls the one that does the work and turns its error into the core's.

use super::CudaEngine;
use crate::device::{Pinned, Stream};
use crate::nccl::Nccl;
use crate::staging::{to_device, to_host};
use ironhorse_core::{
    Communicator, DeviceDescription, Engine, HostMemory, HostSlice, HostSliceMut, Layout, Limit,
    MakeHostMemory, MemoryUse, Pending, Program, Scalars, Slot, Timed, TokenChoice,
};
use std::ops::Range;
use std::sync::Arc;

impl Engine for CudaEngine {
    fn device(&self) -> &DeviceDescription {
        &self.description
    }

    fn memory(&self) -> MemoryUse {
        let (held, peak) = self.device.held();
        MemoryUse {
            allocated: self.memory.allocated() + self.scratch_bytes(),
            by_category: self.memory_by_category(),
            free: self.device.memory().ok().map(|(free, _)| free),
            freed: peak.saturating_sub(held),
        }
    }

    fn reserve(&mut self, layout: &Layout) -> ironhorse_core::Result<()> {
        Ok(self.reserve_all(layout)?)
    }

    fn join(&mut self, ranks: Arc<dyn Communicator>) -> ironhorse_core::Result<()> {
        if ranks.place().is_alone() {
            return Ok(());
        }
        self.device.make_current()?;
        self.libraries.nccl = Some(Nccl::join(ranks, self.device)?);
        if self.settings.overlap {
            self.exchange = Some(Stream::first_served(self.device)?);
        }
        Ok(())
    }

    fn choose(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
    ) -> ironhorse_core::Result<()> {
        self.prepare(program, ops, &[], scalars)?;
        Ok(())
    }

    fn choices(&self) -> Vec<(String, String)> {
        self.libraries.choices()
    }

    fn set_choices(&mut self, choices: &[(String, String)]) -> ironhorse_core::Result<()> {
        self.libraries.set_choices(choices);
        Ok(())
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> ironhorse_core::Result<()> {
        data.check(&slot)?;
        let size = slot.dtype.size();
        let done = self.upload(slot, |range, to| match data {
            HostSlice::F32(data) => to_device(slot.dtype, &data[range.start / size..range.end / size], to),
            HostSlice::I32(data) => {
                let cells = to.as_chunks_mut().0.iter_mut().zip(&data[range.start / size..range.end / size]);
                cells.for_each(|(cell, value)| *cell = value.to_le_bytes());
            }
            HostSlice::Bytes(data) => to.copy_from_slice(&data[range]),
        });
        self.explained(done)
    }

    fn read(&mut self, slot: Slot, mut out: HostSliceMut<'_>) -> ironhorse_core::Result<()> {
        out.check(&slot)?;
        let size = slot.dtype.size();
        let done = self.download(slot, |range, from| match &mut out {
            HostSliceMut::F32(out) => {
                to_host(slot.dtype, from, &mut out[range.start / size..range.end / size]);
            }
            HostSliceMut::I32(out) => {
                let values = &mut out[range.start / size..range.end / size];
                values
                    .iter_mut()
                    .zip(from.as_chunks().0)
                    .for_each(|(value, &cell)| *value = i32::from_le_bytes(cell));
            }
            HostSliceMut::Bytes(out) => out[range].copy_from_slice(from),
        });
        self.explained(done)
    }

    fn host_memory(&self) -> MakeHostMemory {
        let device = self.device;
        Box::new(move |bytes| Ok(Box::new(Pinned::unwritten(device, bytes)?)))
    }

    fn snapshot(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> ironhorse_core::Result<()> {
        let done = self.copy_out(slots, memory);
        self.explained(done)
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> ironhorse_core::Result<()> {
        let done = self.run_ranges(program, ops, &[], scalars);
        self.explained(done)
    }

    fn run_beside(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
    ) -> ironhorse_core::Result<()> {
        let done = self.run_ranges(program, ops, beside, scalars);
        self.explained(done)
    }

    fn synchronize(&mut self) -> ironhorse_core::Result<()> {
        self.device.make_current()?;
        let done = self.fault_now();
        self.explained(done)
    }

    fn pick_token(
        &mut self,
        logits: Slot,
        vocab: usize,
        choice: &TokenChoice,
    ) -> ironhorse_core::Result<Option<u32>> {
        let done = self.pick(logits, vocab, choice).map(Some);
        self.explained(done)
    }

    fn start_read(&mut self, slot: Slot) -> ironhorse_core::Result<Pending> {
        let done = self.begin_read(slot);
        self.explained(done)
    }

    fn finish_read(&mut self, pending: Pending) -> ironhorse_core::Result<f32> {
        let done = self.end_read(pending);
        self.explained(done)
    }

    fn profile(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
        record: &mut Vec<Timed>,
    ) -> ironhorse_core::Result<()> {
        let key = self.prepare(program, ops, beside, scalars)?;
        Ok(self.record_kernels(&key, record)?)
    }

    fn measure(&mut self, limit: Limit) -> ironhorse_core::Result<f64> {
        let device = self.device;
        Ok(device.aside(|| match limit {
            Limit::Flops(dtype) => self.product_rate(dtype),
            Limit::Bandwidth => self.copy_rate(),
        })?)
    }
}
