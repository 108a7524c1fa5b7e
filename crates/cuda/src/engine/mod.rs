//! The CUDA engine.
//!
//! ```text
//! mod.rs      what it holds, and the work behind each request
//! host.rs     the `Engine` trait of the core
//! lowered.rs  a range of ops as launches, and as a graph
//! profile.rs  the time of each kernel, and what memory holds
//! limits.rs   the fastest the device can be: measured, and by its datasheet
//! ```

mod host;
mod limits;
mod lowered;
mod profile;

pub(crate) use lowered::{Lowered, Streams};

use crate::device::{Buffer, Device, Event, Pinned, Stream, human};
use crate::memory::{Memory, OpScratch};
use crate::op::sample::{Row, sample};
use crate::op::{self, Libraries, Lower, Partials};
use crate::scalars::{FAULT_BYTES, SCALAR_BYTES, fault_text, scalar_block};
use crate::squares::Squares;
use crate::staging::Staging;
use crate::{Cache, Error, Result, Settings};
use ironhorse_core::ranks::{Lane, Turn, turns};
use ironhorse_core::{
    DType, DeviceDescription, HostMemory, Layout, Pending, Pool, Program, Scalars, Slot, TokenChoice,
    check_host_bytes, check_host_len,
};
use lowered::{Lanes, Made};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// Runs programs on one GPU.
///
/// A range of ops is lowered to launches at its first run and recorded as a CUDA graph at its second; from then on one
/// call replays it. Nothing is allocated and the host waits for nothing inside a step.
pub struct CudaEngine {
    description: DeviceDescription,
    pub(crate) settings: Settings,
    // Launches hold functions, buffers and library handles: they go before what they point into.
    pub(crate) lowered: HashMap<Key, Lowered>,
    pub(crate) libraries: Libraries,
    pub(crate) scratch: OpScratch,
    squares: Squares,
    pub(crate) memory: Memory,
    pub(crate) scalars: Buffer,
    scalars_held: Option<[u8; SCALAR_BYTES]>,
    pub(crate) fault: Buffer,
    staging: Staging,
    results: Results,
    pub(crate) stream: Stream,
    /// The stream of what ranks exchange, where there are several and they exchange beside what they compute; and memory for
    /// ops there.
    exchange: Option<Stream>,
    exchange_scratch: OpScratch,
    pub(crate) device: &'static Device,
}

// SAFETY: every `Rc` and raw handle inside is reachable only through this engine, so all of them move together; each
// entry point makes the context current on the thread that calls.
unsafe impl Send for CudaEngine {}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    program: u64,
    ops: Range<usize>,
    /// Ops that run beside them.
    beside: Vec<Range<usize>>,
    later: bool,
    /// Gradients whose sums of squares were there before: how the norm is made depends on them.
    summed: Vec<Slot>,
}

/// Results on their way to the host: a ring of pinned words, each with the fault block beside it.
#[derive(Debug)]
struct Results {
    ring: Vec<(Pinned, Event)>,
    next: u64,
}

const RESULTS: u64 = 16;
/// Ranges of ops kept ready to run.
const MOST_LOWERED: usize = 4096;

impl CudaEngine {
    /// Opens the GPU of the settings.
    pub fn new(settings: Settings) -> Result<Self> {
        let start = Instant::now();
        let device = Device::open(settings.device)?;
        tracing::info!("{} opened in {:?}", device.info.name, start.elapsed());
        let stream = Stream::new(device)?;
        let cache = Cache::open(settings.cache.as_deref());
        device.keep_code_in(cache.clone());
        device.restart_peak();
        let fault = Buffer::new(device, FAULT_BYTES)?;
        stream.zero(fault.address(), FAULT_BYTES)?;
        let ring = (0..RESULTS)
            .map(|_| Ok((Pinned::new(device, FAULT_BYTES + 4)?, Event::new(device, false)?)))
            .collect::<Result<_>>()?;
        Ok(Self {
            description: DeviceDescription {
                name: format!("cuda:{}", settings.device),
                datasheet: limits::datasheet(&device.info.name, settings.tf32),
                product: Some(device.info.name.clone()),
                experts_in_bf16: !device.info.has_fp8_experts(),
            },
            lowered: HashMap::new(),
            libraries: Libraries::new(cache),
            scratch: OpScratch::default(),
            squares: Squares::default(),
            memory: Memory::default(),
            scalars: Buffer::new(device, SCALAR_BYTES)?,
            scalars_held: None,
            fault,
            staging: Staging::new(device, &stream)?,
            results: Results { ring, next: 0 },
            stream,
            exchange: None,
            exchange_scratch: OpScratch::default(),
            device,
            settings,
        })
    }

    fn lower(&mut self, program: &Program, key: &Key, scalars: &Scalars) -> Result<()> {
        let start = Instant::now();
        if self.lowered.len() >= MOST_LOWERED {
            self.forget_launches()?; // thousands of programs on one engine: a test suite, not a training run
        }
        let mut lowered = Lowered::default();
        let (mut lanes, mut made) = (Lanes::default(), Vec::new());
        let mut partials: Option<Partials> = None;
        // Where the launches were just forgotten there are no sums any more.
        let mut summed = key.summed.clone();
        summed.retain(|slot| self.squares.of(*slot).is_some());
        for turn in turns(program.nodes(), key.ops.clone(), &key.beside) {
            let turn = match self.exchange {
                Some(_) => turn,
                None => Turn { lane: Lane::Computing, after: None, ..turn },
            };
            let op = &program.nodes()[turn.op].op;
            let out = lanes.of(turn.lane);
            let first = out.len();
            for slot in op.writes().filter(|slot| slot.pool == Pool::Grads) {
                summed.retain(|of| !of.overlaps(&slot));
                lowered.written.push(slot);
            }
            let mut cx = Lower {
                device: self.device,
                settings: &self.settings,
                program,
                memory: &self.memory,
                libraries: &mut self.libraries,
                scratch: match turn.lane {
                    Lane::Computing => &mut self.scratch,
                    Lane::Exchanging => &mut self.exchange_scratch,
                },
                counters: &mut lowered.counters,
                constants: &mut lowered.constants,
                scalars: self.scalars.address(),
                fault: self.fault.address(),
                stream: &self.stream,
                partials: &mut partials,
                squares: &mut self.squares,
                summed: &mut summed,
                micro_step: scalars.added(),
                op: turn.op,
                range: &key.ops,
                out,
            };
            op::lower(&mut cx, op)?;
            made.push(Made { turn, launches: first..lanes.of(turn.lane).len() });
            lowered::join(&mut made);
            lowered.context = [lowered.context, op.positions()].into_iter().flatten().min();
        }
        lowered.summed = summed;
        lowered.arrange(self.device, lanes, &made)?;
        tracing::debug!(
            "ops {:?} and {} ranges beside them became {} launches in {:?}",
            key.ops,
            key.beside.len(),
            lowered.launches.len(),
            start.elapsed()
        );
        self.lowered.insert(key.clone(), lowered);
        Ok(())
    }

    /// Drops everything that holds addresses, once the device is done with it.
    fn forget_launches(&mut self) -> Result<()> {
        let done = self.stream.synchronize();
        self.lowered.clear();
        self.scratch.keep_largest();
        self.exchange_scratch.keep_largest();
        self.squares.clear();
        done
    }

    fn set_scalars(&mut self, scalars: &Scalars) -> Result<()> {
        let block = scalar_block(scalars);
        if self.scalars_held == Some(block) {
            return Ok(());
        }
        self.staging.upload(&self.stream, self.scalars.address(), SCALAR_BYTES, |range, to| {
            to.copy_from_slice(&block[range]);
        })?;
        self.scalars_held = Some(block);
        Ok(())
    }

    /// Makes a range ready to run: scalars on the device, ops lowered, the position within the context.
    pub(crate) fn prepare(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
    ) -> Result<Key> {
        if let Some(ops) =
            [&ops].into_iter().chain(beside).find(|ops| program.nodes().get((*ops).clone()).is_none())
        {
            let what = format!("ops {ops:?} are out of range 0..{}", program.nodes().len());
            return Err(ironhorse_core::Error::Program(what).into());
        }
        self.device.make_current()?;
        self.set_scalars(scalars)?;
        let nodes = [&ops].into_iter().chain(beside).flat_map(|ops| &program.nodes()[ops.clone()]);
        let (later, summed) = (scalars.added() > 0, self.squares.before(nodes));
        let key = Key { program: program.id(), ops, beside: beside.to_vec(), later, summed };
        if !self.lowered.contains_key(&key) {
            self.lower(program, &key, scalars)?;
        }
        let context = self.lowered.get(&key).and_then(|lowered| lowered.context);
        if let Some(context) = context.filter(|&context| scalars.position as usize >= context) {
            let what = format!("position {} is beyond the context of {context}", scalars.position);
            return Err(Error::Input(what));
        }
        Ok(key)
    }

    fn run_ranges(
        &mut self,
        program: &Program,
        ops: Range<usize>,
        beside: &[Range<usize>],
        scalars: &Scalars,
    ) -> Result<()> {
        self.check_ranks()?; // a graph would be replayed with what an abort of NCCL has freed
        let key = self.prepare(program, ops, beside, scalars)?;
        let Some(lowered) = self.lowered.get_mut(&key) else { return Ok(()) };
        let streams =
            Streams { main: &self.stream, exchange: self.exchange.as_ref().unwrap_or(&self.stream) };
        let done = lowered.run(streams, self.settings.graphs);
        self.note_squares(&key);
        if done.is_err() {
            self.squares.distrust();
        }
        done?;
        self.libraries.nccl.as_ref().map_or(Ok(()), |nccl| nccl.mark(&self.stream))
    }

    /// Notes which gradients a range that was run has written, and whose sums of squares it has left.
    fn note_squares(&mut self, key: &Key) {
        if let Some(lowered) = self.lowered.get(key) {
            self.squares.ran(&lowered.written, &lowered.summed);
        }
    }

    /// Bytes that ops share.
    fn scratch_bytes(&self) -> usize {
        self.scratch.allocated() + self.exchange_scratch.allocated() + self.squares.allocated()
    }

    fn check_ranks(&self) -> Result<()> {
        self.libraries.nccl.as_ref().map_or(Ok(()), |nccl| nccl.check())
    }

    /// A result as the core knows it. Where ranks work together, an error of the device may be what a lost rank has left.
    fn explained<T>(&self, result: Result<T>) -> ironhorse_core::Result<T> {
        match (result, &self.libraries.nccl) {
            (Err(error @ (Error::Driver { .. } | Error::Library { .. })), Some(nccl)) => {
                Err(nccl.explain(error).into())
            }
            (result, _) => Ok(result?),
        }
    }

    /// Fails if a rank is lost, or if a kernel found something wrong with its input; the fault is then forgotten.
    fn check_fault(&mut self, block: &[u8]) -> Result<()> {
        self.check_ranks()?;
        let Some(what) = fault_text(block) else { return Ok(()) };
        self.stream.zero(self.fault.address(), FAULT_BYTES)?;
        Err(Error::Input(what))
    }

    fn fault_now(&mut self) -> Result<()> {
        let mut block = [0; FAULT_BYTES];
        self.staging.download(&self.stream, self.fault.address(), FAULT_BYTES, |range, from| {
            block[range].copy_from_slice(from);
        })?;
        self.check_fault(&block)
    }

    /// Copies a slot's bytes to the device; `fill(range, to)` writes each piece of them.
    fn upload(&mut self, slot: Slot, fill: impl FnMut(Range<usize>, &mut [u8])) -> Result<()> {
        self.device.make_current()?;
        self.squares.overwritten(slot);
        let to = self.memory.address(slot)?;
        self.staging.upload(&self.stream, to, slot.bytes(), fill)
    }

    /// Copies a slot's bytes to the host; `take(range, from)` receives each piece of them.
    fn download(&mut self, slot: Slot, take: impl FnMut(Range<usize>, &[u8])) -> Result<()> {
        self.device.make_current()?;
        let from = self.memory.address(slot)?;
        self.staging.download(&self.stream, from, slot.bytes(), take)?;
        self.fault_now()
    }

    /// Slots one after the other, by the device itself where the memory is page-locked.
    fn copy_out(&mut self, slots: &[Slot], memory: &mut dyn HostMemory) -> Result<()> {
        let pinned = memory.is_pinned();
        let mut rest = memory.bytes_mut();
        self.device.make_current()?;
        for &slot in slots {
            let held = rest.len();
            let Some((now, later)) = rest.split_at_mut_checked(slot.bytes()) else {
                return Ok(check_host_bytes(&slot, held)?);
            };
            if pinned {
                self.stream.download_now(now, self.memory.address(slot)?)?;
            } else {
                self.download(slot, |range, from| now[range].copy_from_slice(from))?;
            }
            rest = later;
        }
        self.fault_now()
    }

    fn begin_read(&mut self, slot: Slot) -> Result<Pending> {
        check_host_len(&slot, 1)?;
        if slot.dtype != DType::F32 {
            return Err(Error::Unsupported(format!("start_read: the slot is {}, expected f32", slot.dtype)));
        }
        self.device.make_current()?;
        let from = self.memory.address(slot)?;
        Ok(Pending::Queued(self.queue_word(from)?))
    }

    /// Starts copying four bytes and the fault block to the host; returns the ticket for [`Self::wait_for_word`].
    fn queue_word(&mut self, from: u64) -> Result<u64> {
        let ticket = self.results.next;
        self.results.next += 1;
        let (buffer, done) = &self.results.ring[(ticket % RESULTS) as usize];
        self.stream.download(buffer, 0, self.fault.address(), FAULT_BYTES)?;
        self.stream.download(buffer, FAULT_BYTES, from, 4)?;
        done.record(&self.stream)?;
        Ok(ticket)
    }

    fn end_read(&mut self, pending: Pending) -> Result<f32> {
        match pending {
            Pending::Ready(value) => Ok(value),
            Pending::Queued(ticket) => self.wait_for_word(ticket).map(f32::from_le_bytes),
        }
    }

    /// Waits for four bytes to arrive; fails if a kernel found something wrong with its input.
    fn wait_for_word(&mut self, ticket: u64) -> Result<[u8; 4]> {
        if ticket + RESULTS < self.results.next || ticket >= self.results.next {
            return Err(Error::Unsupported(format!(
                "finish_read: result {ticket} was overwritten by later ones; wait for it within {RESULTS} reads"
            )));
        }
        self.device.make_current()?;
        let (buffer, done) = &self.results.ring[(ticket % RESULTS) as usize];
        done.synchronize()?;
        let bytes = buffer.as_slice().to_vec();
        let (fault, value) = bytes.split_at(FAULT_BYTES);
        self.check_fault(fault)?;
        Ok([value[0], value[1], value[2], value[3]])
    }

    fn pick(&mut self, logits: Slot, vocab: usize, choice: &TokenChoice) -> Result<u32> {
        if vocab == 0 || vocab > logits.shape.cols() {
            let cols = logits.shape.cols();
            return Err(Error::Input(format!("sampling: `vocab` is {vocab}, expected 1 to {cols}")));
        }
        self.device.make_current()?;
        let out = self.scratch.at_least(self.device, 4)?;
        let row = Row { out, logits: self.memory.address(logits)?, dtype: logits.dtype, vocab };
        sample(&self.stream, &row, choice)?;
        let ticket = self.queue_word(out)?;
        let token = self.wait_for_word(ticket)?;
        u32::try_from(i32::from_le_bytes(token)).map_err(|_| {
            Error::Input(
                "sampling: a logit is NaN or +inf, or all logits are -inf: no token can be chosen".into(),
            )
        })
    }

    fn reserve_all(&mut self, layout: &Layout) -> Result<()> {
        self.device.make_current()?;
        if self.memory.must_grow(layout) {
            self.forget_launches()?; // addresses change, also where only some of the pools can grow
            self.memory.grow(self.device, &self.stream, layout)?;
        }
        tracing::debug!("{}: {} reserved", self.description.name, human(self.memory.allocated()));
        Ok(())
    }
}

impl Drop for CudaEngine {
    /// What is under way still uses the memory and the kernels that go now.
    fn drop(&mut self) {
        let _ = self.device.make_current();
        let _ = self.stream.synchronize(); // a rank that is lost now ends it, by the thread that watches
        if self.libraries.nccl.as_ref().is_some_and(|nccl| nccl.stop_watching()) {
            std::mem::forget(std::mem::take(&mut self.lowered)); // its graphs use what NCCL has freed
        }
        let _ = self.forget_launches(); // graphs first: NCCL's communicator waits for those that use it
        if let Some(nccl) = &self.libraries.nccl {
            nccl.leave();
        }
    }
}
