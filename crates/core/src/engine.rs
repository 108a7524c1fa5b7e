//! The [`Engine`] trait, which runs programs.

use crate::{DType, Error, Layout, Limits, Program, Result, Section, Slot};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The numbers that change from step to step. A captured CUDA graph reads them from device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Optimizer step, from 1.
    pub step: u32,
    /// Index of the micro-step within the step, from 0: decides whether gradients are overwritten or accumulated.
    pub micro_step: u32,
    /// Factor of each row's loss and gradient; 1/(B·T·micro-steps) gives the mean.
    pub loss_scale: f32,
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    /// f64, because 1 - 0.999 in f32 has an error of 5e-5.
    pub beta2: f64,
    /// Added to the root of the second moment, so that the update stays finite where that is 0.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 disables clipping.
    pub grad_clip: f32,
    /// Position of the first given token, when decoding with a cache.
    pub position: u32,
    /// Seed of the stochastic rounding of weights and moments to bf16; see [`RandomRounding`](crate::RandomRounding).
    pub seed: u64,
}

impl Default for Scalars {
    /// PyTorch's AdamW defaults, no decay, no clipping.
    fn default() -> Self {
        Self {
            step: 1,
            micro_step: 0,
            loss_scale: 1.0,
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            grad_clip: 0.0,
            position: 0,
            seed: 0,
        }
    }
}

/// A result that is being copied to the host; see [`Engine::start_read`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pending {
    /// The value has arrived.
    Ready(f32),
    /// The number under which the engine keeps the pending result.
    Queued(u64),
}

/// How to sample a token from logits: temperature, then top-k, then top-p, then the token whose interval of the
/// cumulative distribution contains `uniform`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChoice {
    /// Divides the logits; 0 selects the largest logit, and the lowest index among equal ones.
    pub temperature: f32,
    /// Keeps the k largest logits and those equal to the k-th.
    pub top_k: Option<usize>,
    /// Keeps the most likely tokens that together reach this probability.
    pub top_p: Option<f32>,
    /// A random number in [0, 1).
    pub uniform: f64,
}

/// One kernel on a device's timeline, or one op if the engine does not time single kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timed {
    /// Index of the op that launched it.
    pub op: usize,
    /// The kernel's name, or the op's.
    pub name: String,
    /// When it started, in nanoseconds from the start of the recording.
    pub start_ns: u64,
    /// How long it ran, in nanoseconds.
    pub ns: u64,
}

/// Host memory into which an engine copies its pools; see [`Engine::snapshot`].
pub trait HostMemory: Send {
    /// The contents.
    fn bytes(&self) -> &[u8];

    /// The contents, mutable.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Whether the memory is page-locked, so that the device can copy to it at the full speed of its bus.
    fn is_pinned(&self) -> bool {
        false
    }
}

impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Allocates host memory of the given number of bytes; see [`Engine::host_memory`].
pub type MakeHostMemory = Box<dyn FnOnce(usize) -> Result<Box<dyn HostMemory>> + Send>;

/// Runs programs over memory it owns. Object-safe: models and training never name an engine.
pub trait Engine: Send {
    /// "cpu", "cuda:0", ...
    fn name(&self) -> &str;

    /// Grows every pool to at least the size in the layout. New memory is zero; existing contents are kept.
    fn reserve(&mut self, layout: &Layout) -> Result<()>;

    /// Bytes currently allocated for pools.
    fn allocated(&self) -> usize;

    /// Bytes of device memory that are still free; `None` for an engine that uses the memory of the host.
    fn free_memory(&self) -> Option<usize> {
        None
    }

    /// Copies into a slot, converting to its element type.
    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()>;

    /// Copies out of a slot, converting from its element type.
    fn read_f32(&mut self, slot: Slot, data: &mut [f32]) -> Result<()>;

    /// Copies integers into an i32 slot.
    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()>;

    /// Copies integers out of an i32 slot.
    fn read_i32(&mut self, slot: Slot, data: &mut [i32]) -> Result<()>;

    /// Copies the stored bytes of a slot out, little-endian, without conversion.
    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        check_host_bytes(&slot, out.len())?;
        if slot.dtype == DType::I32 {
            let mut values = vec![0; slot.numel()];
            self.read_i32(slot, &mut values)?;
            return put_bytes(out, &values, i32::to_le_bytes);
        }
        let mut values = vec![0.0; slot.numel()];
        self.read_f32(slot, &mut values)?;
        match slot.dtype {
            DType::BF16 => put_bytes(out, &values, |value| crate::f32_to_bf16(value).to_le_bytes()),
            DType::I16 => put_bytes(out, &values, |value| (value as i16).to_le_bytes()),
            _ => put_bytes(out, &values, f32::to_le_bytes),
        }
    }

    /// Copies bytes that [`Engine::read_bytes`] returned into a slot.
    fn write_bytes(&mut self, slot: Slot, data: &[u8]) -> Result<()> {
        check_host_bytes(&slot, data.len())?;
        match slot.dtype {
            DType::I32 => self.write_i32(slot, &take_bytes(data, i32::from_le_bytes)),
            DType::BF16 => {
                self.write_f32(slot, &take_bytes(data, |cell| crate::bf16_to_f32(u16::from_le_bytes(cell))))
            }
            DType::I16 => self.write_f32(slot, &take_bytes(data, |cell| f32::from(i16::from_le_bytes(cell)))),
            _ => self.write_f32(slot, &take_bytes(data, f32::from_le_bytes)),
        }
    }

    /// A function that allocates host memory for [`Engine::snapshot`]. It may be called on any thread, because
    /// page-locking many gigabytes takes seconds.
    fn host_memory(&self) -> MakeHostMemory {
        Box::new(|bytes| {
            let mut memory = Vec::new();
            memory.try_reserve_exact(bytes).map_err(|_| no_host_memory(bytes))?;
            memory.resize(bytes, 0_u8);
            Ok(Box::new(memory))
        })
    }

    /// Copies the stored bytes of the slots out, one after the other without gaps. Waits until all earlier work is
    /// done.
    fn snapshot(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> Result<()> {
        let mut rest = memory.bytes_mut();
        for &slot in slots {
            let held = rest.len();
            let Some((now, later)) = rest.split_at_mut_checked(slot.bytes()) else {
                return check_host_bytes(&slot, held);
            };
            self.read_bytes(slot, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Runs the ops of this index range. May return before they have finished; reads wait for them.
    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()>;

    /// Waits until all earlier work is done.
    fn synchronize(&mut self) -> Result<()>;

    /// Starts to read a slot of one f32 and does not wait. The value is that after all work requested so far.
    fn start_read(&mut self, slot: Slot) -> Result<Pending> {
        self.read_scalar(slot).map(Pending::Ready)
    }

    /// Waits for a result of [`Engine::start_read`]. An engine keeps only the last few results.
    fn finish_read(&mut self, pending: Pending) -> Result<f32> {
        match pending {
            Pending::Ready(value) => Ok(value),
            Pending::Queued(ticket) => {
                Err(Error::Program(format!("{} has no pending result number {ticket}", self.name())))
            }
        }
    }

    /// Samples a token from the first `vocab` columns of one row of logits; `None` if the engine leaves sampling to the
    /// host.
    fn pick_token(&mut self, _logits: Slot, _vocab: usize, _choice: &TokenChoice) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Runs one section.
    fn run_section(&mut self, program: &Program, section: Section, scalars: &Scalars) -> Result<()> {
        self.run(program, program.range(section), scalars)
    }

    /// Runs the ops of this index range without graph replay, times every kernel and appends to `record`.
    ///
    /// The gaps between kernels differ from those of a normal run: measure the duration of a step with [`Engine::run`].
    fn profile(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        scalars: &Scalars,
        record: &mut Vec<Timed>,
    ) -> Result<()> {
        let start = Instant::now();
        for op in ops {
            let begun = start.elapsed();
            self.run(program, op..op + 1, scalars)?;
            self.synchronize()?;
            let name = program.nodes().get(op).map_or("", |node| node.op.name()).to_owned();
            record.push(Timed { op, name, start_ns: nanos(begun), ns: nanos(start.elapsed() - begun) });
        }
        Ok(())
    }

    /// Bytes currently allocated, by category: pools by name, scratch, libraries.
    fn memory_use(&self) -> Vec<(String, usize)> {
        vec![("pools".into(), self.allocated())]
    }

    /// By how many bytes the allocation was once larger than it is now: while the engine chose algorithms, before the
    /// end of the first step.
    fn memory_freed(&self) -> usize {
        0
    }

    /// The algorithms chosen so far that affect the bits of results and that another run might choose differently, as
    /// (name, algorithm), sorted by name. The strings are opaque to callers. Passed to [`Engine::set_choices`] they
    /// make another run compute the same bits on the same device with the same libraries.
    fn choices(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Sets the algorithms to use, from [`Engine::choices`] of another run. Call it before the first run: algorithms
    /// already chosen are kept. Entries from another device or another library version, and entries that cannot be
    /// parsed, are skipped with a warning that bits may differ.
    fn set_choices(&mut self, _choices: &[(String, String)]) -> Result<()> {
        Ok(())
    }

    /// The product name of the device, if it has one besides [`Engine::name`].
    fn device_name(&self) -> Option<String> {
        None
    }

    /// Operations per second for dense matrix products of this element type according to the data sheet, if known.
    fn datasheet_flops(&self, _dtype: DType) -> Option<f64> {
        None
    }

    /// Measures the operations per second that the device reaches with this element type.
    fn measure_flops(&mut self, _dtype: DType) -> Result<f64> {
        Err(Error::Program(format!("{} cannot measure its limits", self.name())))
    }

    /// Measures the bytes per second that the device can read and write.
    fn measure_bandwidth(&mut self) -> Result<f64> {
        Err(Error::Program(format!("{} cannot measure its limits", self.name())))
    }

    /// Measures both limits; takes a second and some memory.
    fn measure_limits(&mut self, dtype: DType) -> Result<Limits> {
        Ok(Limits { flops_per_s: self.measure_flops(dtype)?, bytes_per_s: self.measure_bandwidth()? })
    }

    /// Reads a slot of one f32.
    fn read_scalar(&mut self, slot: Slot) -> Result<f32> {
        let mut value = [0.0];
        self.read_f32(slot, &mut value)?;
        Ok(value[0])
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Checks that a host buffer has as many elements as a slot; all engines give the same error.
pub fn check_host_len(slot: &Slot, len: usize) -> Result<()> {
    if slot.numel() == len {
        return Ok(());
    }
    Err(Error::Input(format!("a buffer of {len} elements does not fit a slot of {}", slot.shape)))
}

/// The error for host memory that could not be allocated.
pub fn no_host_memory(bytes: usize) -> Error {
    Error::Input(format!("{} MiB of host memory cannot be allocated", bytes.div_ceil(1 << 20)))
}

/// Checks that a host buffer has as many bytes as a slot.
pub fn check_host_bytes(slot: &Slot, bytes: usize) -> Result<()> {
    if slot.bytes() == bytes {
        return Ok(());
    }
    let want = slot.bytes();
    Err(Error::Input(format!(
        "a buffer of {bytes} bytes does not fit a slot of {}: {want} bytes",
        slot.shape
    )))
}

fn put_bytes<T: Copy, const N: usize>(
    out: &mut [u8],
    values: &[T],
    convert: impl Fn(T) -> [u8; N],
) -> Result<()> {
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(cell, &value)| *cell = convert(value));
    Ok(())
}

fn take_bytes<T, const N: usize>(data: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks().0.iter().map(|&cell| convert(cell)).collect()
}
