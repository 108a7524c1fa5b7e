//! Simulates a lower precision on an engine that computes in f32: rounds everything it stores to bf16, or the operands
//! of every product to tf32.

use crate::session::master::{is_residual, read_master, write_master};
use ironhorse_core::op::{AdamW, Op};
use ironhorse_core::{
    DType, DeviceDescription, Engine, EngineExt, Error, HostSlice, HostSliceMut, Layout, MemoryUse, Program,
    RandomRounding, Result, Scalars, Slot, bf16_to_f32, f32_to_bf16,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Which numbers are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Programs with bf16 tensors: results that an op writes to them are rounded.
    Bf16,
    /// Programs in f32: operands of products are truncated to 10 bits after the point.
    Tf32,
}

/// An engine for bf16 or tf32 programs on top of an f32 engine. For checks, not for speed.
pub struct RoundingEngine {
    inner: Box<dyn Engine>,
    device: DeviceDescription,
    rounding: Rounding,
    /// The program that the inner engine runs, by the number of the original program.
    twins: BTreeMap<u64, Program>,
    values: Vec<f32>,
}

impl RoundingEngine {
    /// Computes on `inner`.
    pub fn new(inner: Box<dyn Engine>, rounding: Rounding) -> Self {
        let device = DeviceDescription::host(format!("{} with rounding", inner.name()));
        Self { inner, device, rounding, twins: BTreeMap::new(), values: Vec::new() }
    }

    /// Where the inner engine keeps a tensor.
    fn place(&self, slot: Slot) -> Slot {
        match self.rounding {
            Rounding::Bf16 => slot.widened(),
            Rounding::Tf32 => slot,
        }
    }

    fn make_twin(&mut self, program: &Program) -> Result<()> {
        let weights = program.precision().weights;
        let fits = match self.rounding {
            Rounding::Bf16 => DType::BF16,
            Rounding::Tf32 => DType::F32,
        };
        if weights != fits {
            let what = format!("made for programs in {fits}, not in {weights}");
            return Err(Error::Unsupported { engine: "rounding", what });
        }
        if !self.twins.contains_key(&program.id()) {
            let twin = if self.rounding == Rounding::Bf16 { program.widened()? } else { program.clone() };
            self.twins.insert(program.id(), twin);
        }
        Ok(())
    }

    /// Changes a tensor of the inner engine.
    fn change(&mut self, slot: Slot, f: fn(f32) -> f32) -> Result<()> {
        self.values.resize(slot.numel(), 0.0);
        self.inner.read_f32(slot, &mut self.values)?;
        self.values.iter_mut().for_each(|value| *value = f(*value));
        self.inner.write_f32(slot, &self.values)
    }

    /// Rounds what an op has written to bf16 tensors.
    fn round_results(&mut self, op: &Op, scalars: &Scalars) -> Result<()> {
        if let Op::AdamW(adamw) = op {
            return self.round_update(adamw, scalars);
        }
        for arg in op.args() {
            if arg.access.writes() && arg.slot.dtype == DType::BF16 {
                self.change(arg.slot.widened(), round_bf16)?;
            }
        }
        Ok(())
    }

    /// The inner engine updates f32 master weights: restores them from weights and residuals.
    fn join_masters(&mut self, op: &Op) -> Result<()> {
        let Op::AdamW(AdamW { params, master: Some(master), .. }) = op else { return Ok(()) };
        if is_residual(master) {
            let [params, master] = [params, master].map(|slot| slot.widened());
            read_master(self.inner.as_mut(), [params, master], true, &mut self.values)?;
            self.inner.write_f32(master, &self.values)?;
        }
        Ok(())
    }

    /// Rounds what an update stores in 16 bits (weights and moments) with the same random bits as the CUDA engine.
    fn round_update(&mut self, op: &AdamW, scalars: &Scalars) -> Result<()> {
        let Some(master) = op.master else { return Ok(()) };
        let [params, wide] = [op.params, master].map(Slot::widened);
        let rounding = RandomRounding::new(scalars.seed, scalars.step);
        self.values.resize(wide.numel(), 0.0);
        if is_residual(&master) {
            self.inner.read_f32(wide, &mut self.values)?;
            write_master(self.inner.as_mut(), [params, wide], true, &self.values)?;
        }
        if !self.inner.read_scalar(op.norm.widened())?.is_finite() {
            return Ok(());
        }
        if !is_residual(&master) {
            self.inner.read_f32(wide, &mut self.values)?;
            for (i, value) in self.values.iter_mut().enumerate() {
                *value = bf16_to_f32(rounding.weight(i as u64, *value));
            }
            self.inner.write_f32(params, &self.values)?;
        }
        if op.moment1.dtype == DType::BF16 {
            let [first, second] = [op.moment1, op.moment2].map(Slot::widened);
            let mut squares = vec![0.0; second.numel()];
            self.inner.read_f32(first, &mut self.values)?;
            self.inner.read_f32(second, &mut squares)?;
            for (i, (m, v)) in self.values.iter_mut().zip(&mut squares).enumerate() {
                [*m, *v] = rounding.moments(i as u64, [*m, *v]).map(bf16_to_f32);
            }
            self.inner.write_f32(first, &self.values)?;
            self.inner.write_f32(second, &squares)?;
        }
        Ok(())
    }

    fn run_tf32(&mut self, twin: &Program, i: usize, scalars: &Scalars) -> Result<()> {
        let op = &twin.nodes()[i].op;
        let mut kept: Vec<(Slot, Vec<f32>)> = Vec::new();
        for arg in op.args().iter().filter(|arg| op.operands().contains(&arg.name)) {
            let mut values = vec![0.0; arg.slot.numel()];
            self.inner.read_f32(arg.slot, &mut values)?;
            kept.push((arg.slot, values));
            self.change(arg.slot, cut_to_tf32)?;
        }
        self.inner.run(twin, i..i + 1, scalars)?;
        kept.iter().try_for_each(|(slot, values)| self.inner.write_f32(*slot, values))
    }
}

impl Engine for RoundingEngine {
    fn device(&self) -> &DeviceDescription {
        &self.device
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        match self.rounding {
            Rounding::Bf16 => self.inner.reserve(&layout.widened()),
            Rounding::Tf32 => self.inner.reserve(layout),
        }
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()> {
        data.check(&slot)?;
        let place = self.place(slot);
        match data {
            HostSlice::F32(data) if slot.dtype == DType::BF16 => {
                self.values.clear();
                self.values.extend(data.iter().map(|&value| round_bf16(value)));
                self.inner.write_f32(place, &self.values)
            }
            HostSlice::Bytes(data) => self.write_bytes_as_values(slot, data),
            data => self.inner.write(place, data),
        }
    }

    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        out.check(&slot)?;
        match out {
            HostSliceMut::Bytes(out) => self.read_bytes_as_values(slot, out),
            out => self.inner.read(self.place(slot), out),
        }
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        self.make_twin(program)?;
        let Some(twin) = self.twins.remove(&program.id()) else { return Ok(()) };
        let done = ops.into_iter().try_for_each(|i| match self.rounding {
            Rounding::Tf32 => self.run_tf32(&twin, i, scalars),
            Rounding::Bf16 => {
                self.join_masters(&program.nodes()[i].op)?;
                self.inner.run(&twin, i..i + 1, scalars)?;
                self.round_results(&program.nodes()[i].op, scalars)
            }
        });
        self.twins.insert(program.id(), twin);
        done
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

/// The nearest bf16.
fn round_bf16(value: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(value))
}

/// An f32 truncated to 10 bits after the point: tensor cores ignore the other bits of an f32 operand. Kernels that
/// round to the nearest first have half that error.
fn cut_to_tf32(value: f32) -> f32 {
    if value.is_finite() { f32::from_bits(value.to_bits() & !0x1fff) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_keeps_ten_bits() {
        assert_eq!(cut_to_tf32(-1.0), -1.0);
        assert_eq!(cut_to_tf32(1.0 + 1.0 / 1024.0), 1.0 + 1.0 / 1024.0);
        assert_eq!(cut_to_tf32(1.0 + 3.0 / 2048.0), 1.0 + 1.0 / 1024.0);
        assert!(cut_to_tf32(f32::NAN).is_nan() && cut_to_tf32(f32::INFINITY).is_infinite());
    }
}
