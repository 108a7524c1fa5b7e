//! The peak rates of this GPU: measured, and by its datasheet.

use super::CudaEngine;
use crate::args::Args;
use crate::device::{Buffer, Stream};
use crate::launch::Launch;
use crate::measure::{self, fill_with_noise, full_grid, mean_ms};
use crate::memory::{Counters, Memory, OpScratch};
use crate::op::Lower;
use crate::squares::Squares;
use crate::{Error, Result};
use ironhorse_core::op::LinearFwd;
use ironhorse_core::{Builder, DType, Program, Slot};

/// How long a measurement takes at least: rates fall once the chip is warm and draws all the power it may.
const LEAST_MS: f32 = 300.0;
const WARMUP: usize = 3;
/// Runs between two marks: the device has the next one waiting, as in a training step.
const BATCH: u32 = 10;
/// Bytes to copy, if there is room.
const COPY_BYTES: usize = 2 << 30;
/// Sides of the product, the largest that there is room for.
const SIDES: [usize; 3] = [8192, 4096, 2048];

/// Dense bf16 matrix products in units of 1e12 per second, by the word in the GPU's name; tf32 runs at half of that.
/// Of cards of one name the more specific comes first.
const DATASHEET: &[(&[&str], f64)] = &[
    (&["H100", "PCIe"], 756.0),
    (&["H100", "NVL"], 835.0),
    (&["H100"], 989.4),
    (&["H200"], 989.4),
    (&["GH200"], 989.4),
    (&["H20"], 148.0),
    (&["B200"], 2250.0),
    (&["A100"], 312.0),
    (&["L40S"], 362.0),
    (&["L4"], 121.0),
    (&["RTX", "A6000"], 154.8),
    (&["RTX", "3090"], 71.0),
    (&["RTX", "4090"], 165.2),
    (&["RTX", "5090"], 209.5),
];

/// The datasheet's rates of dense products; f32 without tf32 does not run on tensor cores and is not listed.
pub(crate) fn datasheet(name: &str, tf32: bool) -> Vec<(DType, f64)> {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    let known = DATASHEET.iter().find(|(all, _)| all.iter().all(|word| words.contains(word)));
    let Some(bf16) = known.map(|(_, rate)| rate * 1e12) else { return Vec::new() };
    let mut rates = vec![(DType::BF16, bf16)];
    rates.extend(tf32.then_some((DType::F32, bf16 / 2.0)));
    rates
}

impl CudaEngine {
    /// Bytes per second of a copy within the device, read and written ones counted.
    pub(crate) fn copy_rate(&mut self) -> Result<f64> {
        self.device.make_current()?;
        let (free, _) = self.device.memory()?;
        let bytes = COPY_BYTES.min(free / 4) & !0xff;
        let (to, from) = (Buffer::new(self.device, bytes)?, Buffer::new(self.device, bytes)?);
        self.stream.zero(from.address(), bytes)?;
        let copy = self.device.function(&measure::spec().kernel("limits_copy"))?;
        let mut args = Args::new().ptr(to.address()).ptr(from.address()).u64(bytes as u64 / 16);
        let grid = full_grid(&self.stream);
        let ms = median_ms(&self.stream, || self.stream.launch(copy, grid, &mut args))?;
        Ok(2.0 * bytes as f64 / (f64::from(ms) * 1e-3))
    }

    /// Operations per second of one large linear layer, lowered like those of a model, on random numbers.
    pub(crate) fn product_rate(&mut self, dtype: DType) -> Result<f64> {
        self.device.make_current()?;
        let (free, _) = self.device.memory()?;
        let fits = |side: &usize| 3 * side * side * dtype.size() <= free / 2;
        let side = SIDES.into_iter().find(fits).ok_or_else(|| {
            Error::OutOfMemory(format!("{} has too little memory free to measure", self.device.info.name))
        })?;
        let (program, [inp, weight]) = product(side, dtype)?;
        let (mut memory, mut scratch) = (Memory::default(), OpScratch::default());
        memory.grow(self.device, &self.stream, program.layout())?;
        for slot in [inp, weight] {
            fill_with_noise(&self.stream, memory.address(slot)?, slot.bytes())?;
        }
        let (mut constants, mut launches) = (Vec::new(), Vec::<Launch>::new());
        let mut cx = Lower {
            device: self.device,
            settings: &self.settings,
            program: &program,
            memory: &memory,
            libraries: &mut self.libraries,
            scratch: &mut scratch,
            counters: &mut Counters::default(),
            constants: &mut constants,
            scalars: self.scalars.address(),
            fault: self.fault.address(),
            stream: &self.stream,
            partials: &mut None,
            squares: &mut Squares::default(),
            summed: &mut Vec::new(),
            micro_step: 0,
            op: 0,
            range: &(0..1),
            out: &mut launches,
        };
        crate::op::lower(&mut cx, &program.nodes()[0].op)?;
        let stream = &self.stream;
        let ms = median_ms(stream, || launches.iter_mut().try_for_each(|launch| launch.enqueue(stream)))?;
        Ok(program.nodes()[0].op.flops() as f64 / (f64::from(ms) * 1e-3))
    }
}

/// A program of one product of square matrices, and its two inputs.
fn product(side: usize, dtype: DType) -> Result<(Program, [Slot; 2])> {
    let mut b = Builder::new();
    let [inp, weight, out] = ["inp", "weight", "out"].map(|name| b.io(name, [side, side], dtype));
    b.push(LinearFwd { out, pre: None, inp, weight, bias: None })?;
    Ok((b.finish()?, [inp, weight]))
}

/// The median time of what `work` puts on the stream, in milliseconds, over at least [`LEAST_MS`].
fn median_ms(stream: &Stream, mut work: impl FnMut() -> Result<()>) -> Result<f32> {
    (0..WARMUP).try_for_each(|_| work())?;
    let (mut times, mut total) = (Vec::new(), 0.0);
    while total < LEAST_MS {
        let ms = mean_ms(stream, 0, BATCH, &mut work)?;
        times.push(ms);
        total += (ms * BATCH as f32).max(0.01);
    }
    times.sort_unstable_by(f32::total_cmp);
    Ok(times[times.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datasheets_are_found_by_name() {
        let rate = |name: &str| datasheet(name, false).first().map(|(_, rate)| rate / 1e12);
        assert_eq!(rate("NVIDIA H200"), Some(989.4));
        assert_eq!(rate("NVIDIA H100 80GB HBM3"), Some(989.4));
        assert_eq!(rate("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(rate("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(rate("NVIDIA GeForce RTX 4090"), Some(165.2));
        assert_eq!(rate("NVIDIA H20"), Some(148.0));
        assert_eq!(rate("NVIDIA T4"), None);
        let tf32 = [(DType::BF16, 989.4e12), (DType::F32, 494.7e12)];
        assert_eq!(datasheet("NVIDIA H200", true), tf32);
        assert_eq!(datasheet("NVIDIA H200", false), tf32[..1]);
    }

    #[test]
    fn the_product_is_one_op_of_the_right_size() {
        let (program, [inp, weight]) = product(64, DType::BF16).unwrap();
        assert_eq!(program.nodes().len(), 1);
        assert_eq!(program.nodes()[0].op.flops(), 2 * 64 * 64 * 64);
        assert_eq!((inp.bytes(), weight.bytes()), (8192, 8192));
    }
}
