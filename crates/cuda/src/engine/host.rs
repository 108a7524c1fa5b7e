//! The engine as the core knows it: every method calls the one that does the work and turns its error into the core's.

use super::CudaEngine;
use crate::memory::PinnedMemory;
use crate::staging::{to_device, to_host};
use crate::{Error, Result};
use ironhorse_core::{
    DType, Engine, HostMemory, Layout, MakeHostMemory, Pending, Program, Scalars, Slot, Timed, TokenChoice,
    check_host_bytes,
};
use std::ops::Range;

impl Engine for CudaEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn reserve(&mut self, layout: &Layout) -> ironhorse_core::Result<()> {
        Ok(self.reserve_all(layout)?)
    }

    fn allocated(&self) -> usize {
        self.memory.allocated() + self.scratch.allocated()
    }

    fn choices(&self) -> Vec<(String, String)> {
        self.libraries.choices()
    }

    fn set_choices(&mut self, choices: &[(String, String)]) -> ironhorse_core::Result<()> {
        self.libraries.set_choices(choices);
        Ok(())
    }

    fn free_memory(&self) -> Option<usize> {
        self.device.memory().ok().map(|(free, _)| free)
    }

    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> ironhorse_core::Result<()> {
        let size = slot.dtype.size();
        Ok(self.write(slot, data.len(), |range, to| {
            to_device(slot.dtype, &data[range.start / size..range.end / size], to);
        })?)
    }

    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> ironhorse_core::Result<()> {
        let size = slot.dtype.size();
        Ok(self.read(slot, data.len(), |range, from| {
            to_host(slot.dtype, from, &mut data[range.start / size..range.end / size]);
        })?)
    }

    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> ironhorse_core::Result<()> {
        is_i32(&slot)?;
        Ok(self.write(slot, data.len(), |range, to| {
            for (to, value) in to.chunks_exact_mut(4).zip(&data[range.start / 4..range.end / 4]) {
                to.copy_from_slice(&value.to_le_bytes());
            }
        })?)
    }

    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> ironhorse_core::Result<()> {
        is_i32(&slot)?;
        Ok(self.read(slot, data.len(), |range, from| {
            for (value, from) in data[range.start / 4..range.end / 4].iter_mut().zip(from.chunks_exact(4)) {
                *value = i32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            }
        })?)
    }

    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> ironhorse_core::Result<()> {
        check_host_bytes(&slot, out.len())?;
        Ok(self.read(slot, slot.numel(), |range, from| out[range].copy_from_slice(from))?)
    }

    fn write_bytes(&mut self, slot: Slot, data: &[u8]) -> ironhorse_core::Result<()> {
        check_host_bytes(&slot, data.len())?;
        Ok(self.write(slot, slot.numel(), |range, to| to.copy_from_slice(&data[range]))?)
    }

    fn host_memory(&self) -> MakeHostMemory {
        let device = self.device;
        Box::new(move |bytes| Ok(Box::new(PinnedMemory::new(device, bytes)?)))
    }

    fn snapshot(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> ironhorse_core::Result<()> {
        Ok(self.copy_out(slots, memory)?)
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> ironhorse_core::Result<()> {
        Ok(self.run_range(program, ops, scalars)?)
    }

    fn synchronize(&mut self) -> ironhorse_core::Result<()> {
        self.device.make_current()?;
        Ok(self.fault_now()?)
    }

    fn pick_token(
        &mut self,
        logits: Slot,
        vocab: usize,
        choice: &TokenChoice,
    ) -> ironhorse_core::Result<Option<u32>> {
        Ok(self.pick(logits, vocab, choice).map(Some)?)
    }

    fn start_read(&mut self, slot: Slot) -> ironhorse_core::Result<Pending> {
        Ok(self.begin_read(slot)?)
    }

    fn finish_read(&mut self, pending: Pending) -> ironhorse_core::Result<f32> {
        Ok(self.end_read(pending)?)
    }

    fn profile(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
        record: &mut Vec<Timed>,
    ) -> ironhorse_core::Result<()> {
        Ok(self.record_kernels(program, ops, scalars, record)?)
    }

    fn memory_freed(&self) -> usize {
        let (held, peak) = self.device.held();
        peak.saturating_sub(held)
    }

    fn memory_use(&self) -> Vec<(String, usize)> {
        self.memory_by_category()
    }

    fn device_name(&self) -> Option<String> {
        Some(self.device.info.name.clone())
    }

    fn datasheet_flops(&self, dtype: DType) -> Option<f64> {
        super::limits::datasheet_flops(&self.device.info.name, dtype, self.settings.tf32)
    }

    fn measure_flops(&mut self, dtype: DType) -> ironhorse_core::Result<f64> {
        let device = self.device;
        Ok(device.aside(|| self.product_rate(dtype))?)
    }

    fn measure_bandwidth(&mut self) -> ironhorse_core::Result<f64> {
        let device = self.device;
        Ok(device.aside(|| self.copy_rate())?)
    }
}

fn is_i32(slot: &Slot) -> Result<()> {
    if slot.dtype == DType::I32 {
        return Ok(());
    }
    Err(Error::Input(format!("integers do not fit a slot of {}", slot.dtype)))
}
