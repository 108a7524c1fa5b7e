//! The [`Engine`] trait, which runs programs.

use crate::op::IGNORED;
use crate::ranks::{Turn, turns};
use crate::{
    Communicator, DType, DeviceDescription, Error, HostMemory, HostSlice, HostSliceMut, Layout, Limit,
    Limits, MakeHostMemory, MemoryUse, Program, Result, Section, Slot, bf16_to_f32, check_host_bytes,
    f32_to_bf16, host_vec,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The numbers that change from step to step. A captured CUDA graph reads them from device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Optimizer step, from 1.
    pub step: u32,
    /// Index of the micro-step within the step of all ranks, from 0: decides what dropout drops and, unless `overwrites`, whether
    /// gradients are overwritten or accumulated.
    pub micro_step: u32,
    /// Every micro-step overwrites gradients: ops of their own add them up ([`SumTree`](crate::SumTree)).
    pub overwrites: bool,
    /// Factor of each row's loss and gradient: 1/(rows that count in all micro-steps) gives the mean; see
    /// [`Scalars::counting`].
    pub loss_scale: f32,
    /// The share of the step's rows that count, so that `loss_scale·counted` is 1/(B·T·micro-steps): the factor of what
    /// is a mean over all rows, as the losses of routers are.
    pub counted: f32,
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
    /// Seed of the stochastic rounding of weights and moments to bf16 and of the masks of dropout; see
    /// [`RandomRounding`](crate::RandomRounding) and [`DropMask`](crate::DropMask).
    pub seed: u64,
}

impl Default for Scalars {
    /// PyTorch's AdamW defaults, no decay, no clipping.
    fn default() -> Self {
        Self {
            step: 1,
            micro_step: 0,
            overwrites: false,
            loss_scale: 1.0,
            counted: 1.0,
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

impl Scalars {
    /// How many micro-steps are in the gradients already, which [`Accum::adds`](crate::op::Accum::adds) asks for.
    pub fn added(&self) -> u32 {
        if self.overwrites { 0 } else { self.micro_step }
    }

    /// These numbers for a step with these targets, those of all its micro-steps: its loss is the mean over all of them
    /// that are not [`IGNORED`]. Where none counts, loss and gradients are 0.
    pub fn counting(self, targets: &[i32]) -> Self {
        let count = targets.iter().filter(|&&target| target != IGNORED).count();
        match count {
            0 => Self { loss_scale: 0.0, counted: 0.0, ..self },
            _ => {
                let counted = (count as f64 / targets.len() as f64) as f32;
                Self { loss_scale: 1.0 / count as f32, counted, ..self }
            }
        }
    }

    /// These numbers for a step with `pairs` pairs of texts in `rows` rows, over all its micro-steps: its loss is the mean over
    /// the pairs. Without a pair, loss and gradients are 0.
    pub fn counting_pairs(self, pairs: usize, rows: usize) -> Self {
        match pairs {
            0 => Self { loss_scale: 0.0, counted: 0.0, ..self },
            _ => {
                let counted = (pairs as f64 / rows as f64) as f32;
                Self { loss_scale: 1.0 / pairs as f32, counted, ..self }
            }
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
    /// Index of the first op whose work is done with that of `op`: `op` itself, or an earlier one that an engine joined with it.
    pub first: usize,
    /// The kernel's name, or the op's.
    pub name: String,
    /// When it started, in nanoseconds from the start of the recording.
    pub start_ns: u64,
    /// How long it ran, in nanoseconds.
    pub ns: u64,
}

/// Runs programs over memory it owns. Object-safe: models and training never name an engine. [`EngineExt`] has the
/// conveniences that follow from these methods.
///
/// Work is done in the order in which it is asked for. An engine may return from [`Engine::write`], [`Engine::run`] and
/// [`Engine::start_read`] before the device is done, but it never keeps a reference: every buffer, program and scalar passed
/// in may be changed or dropped as soon as the method has returned. An error of the device may be reported by a later method
/// that waits.
pub trait Engine: Send {
    /// The device it runs on. Does not wait.
    fn device(&self) -> &DeviceDescription;

    /// The memory it holds and could still reserve. Does not wait.
    fn memory(&self) -> MemoryUse;

    /// Makes every pool at least as large as the layout asks; new memory is zero, what was there stays. Waits for everything
    /// asked for before if a pool has to move.
    fn reserve(&mut self, layout: &Layout) -> Result<()>;

    /// Copies into a slot: f32 converted to the slot's element type, i32 to an i32 slot only, bytes as the slot stores them
    /// (little-endian). The copy to the device may be under way on return, but `data` may be reused.
    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()>;

    /// Copies out of a slot, converting as [`Engine::write`] does in the other direction. Waits for everything asked for
    /// before; `out` is complete on return.
    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()>;

    /// Says that these programs alone will run, and that the weights they read do not change any more: an engine may keep them in an order that
    /// it reads faster. What else is asked for is done as before, only slower: it puts them back. Where products round their operands, settled
    /// weights are rounded in products of few rows too, and others are not: settle again to get the same answers after that.
    fn settle(&mut self, _programs: &[&Program]) -> Result<()> {
        Ok(())
    }

    /// Runs the ops of this index range. May return before they are done; reads wait for them.
    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()>;

    /// Runs `ops`, and then the ops of `beside`, as far as results can tell. An engine may begin each op of `beside` as soon as
    /// no op of `ops` that is still to come uses the same memory ([`turns`]), while others of `ops` run:
    /// what ranks exchange goes on beside the backward. Every engine gives them to the device in that order.
    fn run_beside(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
    ) -> Result<()> {
        let order = turns(program.nodes(), ops, beside);
        let neighbours = order.chunk_by(|a, b| a.op + 1 == b.op);
        let ranges = neighbours.filter_map(|chunk| Some(chunk.first()?.op..chunk.last()?.op + 1));
        ranges.into_iter().try_for_each(|range| self.run(program, range, scalars))
    }

    /// Waits until everything asked for is done, and reports what went wrong in it.
    fn synchronize(&mut self) -> Result<()>;

    /// What makes host memory for [`Engine::snapshot`]. It does not use the engine and may be called on any thread while the
    /// engine works: page-locking many gigabytes takes seconds.
    fn host_memory(&self) -> MakeHostMemory {
        Box::new(host_vec)
    }

    /// Copies slots out as they are stored, one after the other without gaps. Waits for everything asked for before; the slots
    /// may be overwritten on return.
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

    /// Asks for a slot of one f32 as it is after everything asked for so far. Does not wait; the slot may be overwritten by
    /// work asked for later.
    fn start_read(&mut self, slot: Slot) -> Result<Pending> {
        self.read_scalar(slot).map(Pending::Ready)
    }

    /// Waits for a result asked for with [`Engine::start_read`], but not for work asked for after it. An engine keeps the last
    /// few results only.
    fn finish_read(&mut self, pending: Pending) -> Result<f32> {
        match pending {
            Pending::Ready(value) => Ok(value),
            Pending::Queued(ticket) => {
                Err(Error::Program(format!("{} has no pending result number {ticket}", self.name())))
            }
        }
    }

    /// Chooses a token from one row of logits, of which the first `vocab` count, and waits for it; `None` if the engine leaves
    /// the choice to the host.
    fn pick_token(&mut self, _logits: Slot, _vocab: usize, _choice: &TokenChoice) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Runs ops as [`Engine::run_beside`] does, without replaying a recorded graph, times each kernel by itself and appends to
    /// `record`. Waits until all of them are done.
    ///
    /// The gaps between kernels differ from those of a normal run: measure the duration of a step with [`Engine::run`].
    fn profile(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
        record: &mut Vec<Timed>,
    ) -> Result<()> {
        let start = Instant::now();
        for Turn { op, .. } in turns(program.nodes(), ops, beside) {
            let begun = start.elapsed();
            self.run(program, op..op + 1, scalars)?;
            self.synchronize()?;
            let name = program.nodes().get(op).map_or("", |node| node.op.name()).to_owned();
            record.push(Timed {
                op,
                first: op,
                name,
                start_ns: nanos(begun),
                ns: nanos(start.elapsed() - begun),
            });
        }
        Ok(())
    }

    /// Chooses the algorithms of these ops, as their first run would, and runs nothing. Does nothing where there is nothing to
    /// choose.
    fn choose(&mut self, _program: &Program, _ops: Range<usize>, _scalars: &Scalars) -> Result<()> {
        Ok(())
    }

    /// The algorithms chosen so far on which the bits of results depend and which another run might not choose, as
    /// sorted pairs of name and value. Both are meaningful to the engine only; passed to [`Engine::set_choices`] they
    /// make another run compute the same bits on the same device with the same libraries. Does not wait.
    fn choices(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Sets the algorithms to use, from [`Engine::choices`] of another run, before anything was run: what was chosen
    /// already stays. What was chosen on another device or with another version of a library, or cannot be parsed, is left out
    /// with a warning that bits may differ.
    fn set_choices(&mut self, _choices: &[(String, String)]) -> Result<()> {
        Ok(())
    }

    /// Makes it one of several engines, in as many processes, that run the same program: ops that exchange something do so by
    /// this communicator, or by what the engine sets up with its help. Called once, by all of them, before anything is run.
    fn join(&mut self, _ranks: Arc<dyn Communicator>) -> Result<()> {
        Err(Error::Program(format!("{} cannot run with others", self.name())))
    }

    /// Measures a limit of the device, in units per second. Waits; takes up to a second and memory of its own, which is freed
    /// on return.
    fn measure(&mut self, _limit: Limit) -> Result<f64> {
        Err(Error::Program(format!("{} cannot measure its limits", self.name())))
    }
}

/// What every [`Engine`] can do by its required methods.
pub trait EngineExt: Engine {
    /// "cpu", "cuda:0", ...
    fn name(&self) -> &str {
        &self.device().name
    }

    /// Copies into a slot, converting to its element type; see [`Engine::write`].
    fn write_f32(&mut self, slot: Slot, data: &[f32]) -> Result<()> {
        self.write(slot, HostSlice::F32(data))
    }

    /// Copies out of a slot, converting from its element type; see [`Engine::read`].
    fn read_f32(&mut self, slot: Slot, out: &mut [f32]) -> Result<()> {
        self.read(slot, HostSliceMut::F32(out))
    }

    /// Copies integers into an i32 slot; see [`Engine::write`].
    fn write_i32(&mut self, slot: Slot, data: &[i32]) -> Result<()> {
        self.write(slot, HostSlice::I32(data))
    }

    /// Copies integers out of an i32 slot; see [`Engine::read`].
    fn read_i32(&mut self, slot: Slot, out: &mut [i32]) -> Result<()> {
        self.read(slot, HostSliceMut::I32(out))
    }

    /// Copies bytes in that [`EngineExt::read_bytes`] copied out; see [`Engine::write`].
    fn write_bytes(&mut self, slot: Slot, data: &[u8]) -> Result<()> {
        self.write(slot, HostSlice::Bytes(data))
    }

    /// Copies a slot out as it is stored, little-endian: nothing is widened or rounded; see [`Engine::read`].
    fn read_bytes(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        self.read(slot, HostSliceMut::Bytes(out))
    }

    /// [`EngineExt::write_bytes`] by way of f32 and i32 elements: for the [`Engine::write`] of an engine that does not store
    /// elements in the slot's own type.
    fn write_bytes_as_values(&mut self, slot: Slot, data: &[u8]) -> Result<()> {
        match slot.dtype {
            DType::I32 => self.write_i32(slot, &parse(data, i32::from_le_bytes)),
            DType::BF16 => self.write_f32(slot, &parse(data, |cell| bf16_to_f32(u16::from_le_bytes(cell)))),
            DType::I16 => self.write_f32(slot, &parse(data, |cell| i16::from_le_bytes(cell).into())),
            DType::F8(format) => self.write_f32(slot, &parse(data, |[bits]: [u8; 1]| format.decode(bits))),
            _ => self.write_f32(slot, &parse(data, f32::from_le_bytes)),
        }
    }

    /// [`EngineExt::read_bytes`] by way of f32 and i32 elements, as [`EngineExt::write_bytes_as_values`].
    fn read_bytes_as_values(&mut self, slot: Slot, out: &mut [u8]) -> Result<()> {
        if slot.dtype == DType::I32 {
            let mut values = vec![0; slot.numel()];
            self.read_i32(slot, &mut values)?;
            store(out, &values, i32::to_le_bytes);
            return Ok(());
        }
        let mut values = vec![0.0; slot.numel()];
        self.read_f32(slot, &mut values)?;
        match slot.dtype {
            DType::BF16 => store(out, &values, |value| f32_to_bf16(value).to_le_bytes()),
            DType::I16 => store(out, &values, |value| (value as i16).to_le_bytes()),
            DType::F8(format) => store(out, &values, |value| [format.encode(value)]),
            _ => store(out, &values, f32::to_le_bytes),
        }
        Ok(())
    }

    /// Reads a slot of one f32.
    fn read_scalar(&mut self, slot: Slot) -> Result<f32> {
        let mut value = [0.0];
        self.read_f32(slot, &mut value)?;
        Ok(value[0])
    }

    /// Runs one section; see [`Engine::run`].
    fn run_section(&mut self, program: &Program, section: Section, scalars: &Scalars) -> Result<()> {
        self.run(program, program.range(section), scalars)
    }

    /// Measures arithmetic in this element type, then memory bandwidth; see [`Engine::measure`].
    fn measure_limits(&mut self, dtype: DType) -> Result<Limits> {
        let flops_per_s = self.measure(Limit::Flops(dtype))?;
        Ok(Limits { flops_per_s, bytes_per_s: self.measure(Limit::Bandwidth)? })
    }
}

impl<E: Engine + ?Sized> EngineExt for E {}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn store<T: Copy, const N: usize>(out: &mut [u8], values: &[T], convert: impl Fn(T) -> [u8; N]) {
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(cell, &value)| *cell = convert(value));
}

fn parse<T, const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&cell| convert(cell)).collect()
}
