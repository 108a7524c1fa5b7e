//! Simulates a lower precision on an engine that computes in f32: rounds everything it stores to bf16, or the operands
//! of every product.

use crate::session::master::{is_residual, read_master, write_master};
use ironhorse_core::op::Op;
use ironhorse_core::{
    DType, DeviceDescription, Engine, EngineExt, Error, HostSlice, HostSliceMut, Layout, MemoryUse, Operands,
    Pool, Program, RandomRounding, Result, Scalars, Slot, Widening, bf16_to_f32, f32_to_bf16,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Which numbers are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Programs with bf16 tensors: results that an op writes to them are rounded.
    Bf16,
    /// The same for programs that have products of 8-bit numbers, which such an op rounds itself, besides.
    Fp8,
    /// Programs in f32: operands of products are rounded.
    Operands(Operands),
}

impl Rounding {
    /// How much wider the memory of the inner engine is; `None` if it runs the program itself.
    fn widening(self) -> Option<Widening> {
        match self {
            Self::Bf16 => Some(Widening::Twice),
            Self::Fp8 => Some(Widening::Fourfold),
            Self::Operands(_) => None,
        }
    }
}

/// An engine for bf16 programs, or with rounded operands, on top of an f32 engine. For checks, not for speed.
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

    /// The slot in which the inner engine keeps a tensor.
    fn place(&self, slot: Slot) -> Slot {
        self.rounding.widening().map_or(slot, |by| slot.widened(by))
    }

    /// The slot in which it keeps a tensor of a program with bf16 tensors.
    fn wide(&self, slot: Slot) -> Slot {
        slot.widened(self.rounding.widening().unwrap_or_default())
    }

    fn make_twin(&mut self, program: &Program) -> Result<()> {
        let weights = program.precision().weights;
        let fits = match self.rounding {
            Rounding::Bf16 | Rounding::Fp8 => DType::BF16,
            Rounding::Operands(_) => DType::F32,
        };
        if weights != fits {
            let what = format!("made for programs in {fits}, not in {weights}");
            return Err(Error::Unsupported { engine: "rounding", what });
        }
        if !self.twins.contains_key(&program.id()) {
            let twin = match self.rounding.widening() {
                Some(by) if program.widening() > by => {
                    let what = "made for programs without 8-bit numbers".to_owned();
                    return Err(Error::Unsupported { engine: "rounding", what });
                }
                Some(by) => program.widened(by)?,
                None => program.clone(),
            };
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
    fn round_results(&mut self, program: &Program, op: &Op, scalars: &Scalars) -> Result<()> {
        let changed = op.updates(program.params());
        if let Some(norm) = op.args().iter().find(|arg| arg.name == "norm").filter(|_| !changed.is_empty()) {
            let halted = !self.inner.read_scalar(self.wide(norm.slot))?.is_finite();
            self.round_weights(op, scalars, if halted { &[] } else { &changed })?;
        }
        for arg in op.args() {
            if !arg.access.writes() || arg.slot.dtype != DType::BF16 {
                continue;
            }
            match arg.slot.pool {
                Pool::Params if op.masters().is_some() => {}
                Pool::Moment1 | Pool::Moment2 => self.round_moments(program, arg.slot, scalars)?,
                _ => self.change(self.wide(arg.slot), round_bf16)?,
            }
        }
        Ok(())
    }

    /// The inner engine updates f32 master weights: restores them from weights and residuals.
    fn join_masters(&mut self, op: &Op) -> Result<()> {
        let Some([params, master]) = op.masters() else { return Ok(()) };
        if is_residual(&master) {
            let [params, master] = [params, master].map(|slot| self.wide(slot));
            read_master(self.inner.as_mut(), [params, master], true, &mut self.values)?;
            self.inner.write_f32(master, &self.values)?;
        }
        Ok(())
    }

    /// Stores the weights that an update has `changed` in 16 bits, with the same random bits as the CUDA engine.
    fn round_weights(&mut self, op: &Op, scalars: &Scalars, changed: &[Range<usize>]) -> Result<()> {
        let Some([params, master]) = op.masters() else { return Ok(()) };
        let [params, wide] = [params, master].map(|slot| self.wide(slot));
        self.values.resize(wide.numel(), 0.0);
        self.inner.read_f32(wide, &mut self.values)?;
        if is_residual(&master) {
            return write_master(self.inner.as_mut(), [params, wide], true, &self.values);
        }
        let rounding = RandomRounding::new(scalars.seed, scalars.step);
        let mut weights = vec![0.0; params.numel()];
        self.inner.read_f32(params, &mut weights)?;
        for i in changed.iter().cloned().flatten() {
            weights[i] = bf16_to_f32(rounding.weight(i as u64, self.values[i]));
        }
        self.inner.write_f32(params, &weights)
    }

    /// Rounds a flat pool of moments with the same random bits as the CUDA engine: those of a weight's place in the
    /// parameters, wherever its moment is. What is rounded already does not change.
    fn round_moments(&mut self, program: &Program, slot: Slot, scalars: &Scalars) -> Result<()> {
        let rounding = RandomRounding::new(scalars.seed, scalars.step);
        let which = usize::from(slot.pool == Pool::Moment2);
        let wide = self.wide(slot);
        self.values.resize(wide.numel(), 0.0);
        self.inner.read_f32(wide, &mut self.values)?;
        for param in program.params() {
            let held = param.in_pool(slot.pool);
            let first = held.offset / held.dtype.size();
            for (i, value) in param.elements().zip(&mut self.values[first..first + held.numel()]) {
                *value = bf16_to_f32(rounding.moments(i as u64, [*value; 2])[which]);
            }
        }
        self.inner.write_f32(wide, &self.values)
    }

    fn run_rounding(
        &mut self,
        operands: Operands,
        twin: &Program,
        i: usize,
        scalars: &Scalars,
    ) -> Result<()> {
        let op = &twin.nodes()[i].op;
        let round = match operands {
            Operands::F32 => |value| value,
            Operands::Tf32 => cut_to_tf32,
            Operands::Bf16 => round_bf16,
        };
        let mut kept: Vec<(Slot, Vec<f32>)> = Vec::new();
        for arg in op.args().iter().filter(|arg| op.operands().contains(&arg.name)) {
            let mut values = vec![0.0; arg.slot.numel()];
            self.inner.read_f32(arg.slot, &mut values)?;
            kept.push((arg.slot, values));
            self.change(arg.slot, round)?;
        }
        self.inner.run(twin, i..i + 1, scalars)?;
        // in reverse: of a slot that is both operands the first copy is the one before any change
        kept.iter().rev().try_for_each(|(slot, values)| self.inner.write_f32(*slot, values))
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
        match self.rounding.widening() {
            Some(by) => self.inner.reserve(&layout.widened(by)),
            None => self.inner.reserve(layout),
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
            Rounding::Operands(operands) => self.run_rounding(operands, &twin, i, scalars),
            Rounding::Bf16 | Rounding::Fp8 => {
                self.join_masters(&program.nodes()[i].op)?;
                run_with_rounded_sum(self.inner.as_mut(), &twin, i, scalars)?;
                self.round_results(program, &program.nodes()[i].op, scalars)
            }
        });
        self.twins.insert(program.id(), twin);
        done
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

/// Runs an op of a widened program. What it computes from a sum that it stores, it computes from the sum in bf16.
pub(super) fn run_with_rounded_sum(
    engine: &mut dyn Engine,
    twin: &Program,
    i: usize,
    scalars: &Scalars,
) -> Result<()> {
    let op = &twin.nodes()[i].op;
    let Some([a, b, sum]) = op.stored_sum() else { return engine.run(twin, i..i + 1, scalars) };
    let read = |engine: &mut dyn Engine, slot: Slot| {
        let mut values = vec![0.0; slot.numel()];
        engine.read_f32(slot, &mut values).map(|()| values)
    };
    let terms = [(a, read(engine, a)?), (b, read(engine, b)?)];
    engine.run(twin, i..i + 1, scalars)?;
    let rounded: Vec<f32> = read(engine, sum)?.into_iter().map(round_bf16).collect();
    engine.write_f32(b, &vec![0.0; b.numel()])?;
    engine.write_f32(a, &rounded)?;
    engine.run(twin, i..i + 1, scalars)?;
    // The sum may be in the place of a term, which nobody reads again.
    let mut kept = terms.iter().filter(|(slot, _)| *slot != sum);
    kept.try_for_each(|(slot, values)| engine.write_f32(*slot, values))
}

/// The nearest bf16.
pub(super) fn round_bf16(value: f32) -> f32 {
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
