//! The CUDA engine.

use crate::device::Device;
use crate::ffi::driver::{Buffer, Event, Graph, Pinned, Stream};
use crate::kernels::Kernels;
use crate::launch::Launch;
use crate::lower::Lower;
use crate::memory::{Memory, Scratch, human};
use crate::op::sample::{Row, sample};
use crate::op::{self, Libraries};
use crate::scalars::{FAULT_BYTES, SCALAR_BYTES, fault_text, scalar_block};
use crate::staging::{Staging, to_device, to_host};
use crate::{Cache, DeviceInfo, Error, Result, Settings};
use ironhorse_core::op::Op;
use ironhorse_core::{
    DType, Engine, Layout, Pending, Pool, Program, Scalars, Slot, Timed, TokenChoice, check_host_len,
};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

/// Runs programs on one GPU.
///
/// A range of ops is lowered to launches at its first run and recorded as a CUDA graph at its second; from then on one
/// call replays it. Nothing is allocated and the host waits for nothing inside a step.
pub struct CudaEngine {
    name: String,
    pub(crate) settings: Settings,
    // Launches hold functions, buffers and library handles: they go before what they point into.
    pub(crate) lowered: HashMap<Key, Lowered>,
    pub(crate) libraries: Libraries,
    pub(crate) kernels: Kernels,
    pub(crate) scratch: Scratch,
    pub(crate) memory: Memory,
    pub(crate) scalars: Buffer,
    scalars_held: Option<[u8; SCALAR_BYTES]>,
    pub(crate) fault: Buffer,
    staging: Staging,
    results: Results,
    pub(crate) stream: Stream,
    pub(crate) device: Rc<Device>,
}

// SAFETY: every `Rc` and raw handle inside is reachable only through this engine, so all of them move together; each
// entry point makes the context current on the thread that calls.
unsafe impl Send for CudaEngine {}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    program: u64,
    ops: Range<usize>,
    later: bool,
}

#[derive(Default)]
pub(crate) struct Lowered {
    pub(crate) launches: Vec<Launch>,
    pub(crate) constants: Vec<Buffer>,
    graph: Option<Graph>,
    runs: u32,
    /// Positions the scalar `position` must stay below.
    context: Option<usize>,
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
        let stream = Stream::new(&device)?;
        let cache = Cache::open(settings.cache.as_deref());
        let fault = Buffer::new(&device, FAULT_BYTES)?;
        stream.zero(fault.address(), FAULT_BYTES)?;
        let ring = (0..RESULTS)
            .map(|_| Ok((Pinned::new(&device, FAULT_BYTES + 4)?, Event::new(&device, false)?)))
            .collect::<Result<_>>()?;
        Ok(Self {
            name: format!("cuda:{}", settings.device),
            lowered: HashMap::new(),
            libraries: Libraries::new(cache.clone()),
            kernels: Kernels::new(cache),
            scratch: Scratch::default(),
            memory: Memory::default(),
            scalars: Buffer::new(&device, SCALAR_BYTES)?,
            scalars_held: None,
            fault,
            staging: Staging::new(&device, &stream)?,
            results: Results { ring, next: 0 },
            stream,
            device,
            settings,
        })
    }

    /// What the GPU is.
    pub fn info(&self) -> &DeviceInfo {
        &self.device.info
    }

    /// Bytes free and in all on the device.
    pub fn device_memory(&self) -> Result<(usize, usize)> {
        self.device.memory()
    }

    /// Bytes of one pool, and of the scratch memory ops share.
    pub fn bytes_of(&self, pool: Pool) -> usize {
        self.memory.bytes(pool)
    }

    /// Bytes of the scratch memory ops share.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.allocated()
    }

    fn lower(&mut self, program: &Program, key: &Key, scalars: &Scalars) -> Result<()> {
        let start = Instant::now();
        let mut lowered = Lowered::default();
        for i in key.ops.clone() {
            let op = &program.nodes()[i].op;
            let mut cx = Lower {
                device: &self.device,
                settings: &self.settings,
                program,
                memory: &self.memory,
                kernels: &mut self.kernels,
                libraries: &mut self.libraries,
                scratch: &mut self.scratch,
                constants: &mut lowered.constants,
                scalars: self.scalars.address(),
                fault: self.fault.address(),
                stream: &self.stream,
                micro_step: scalars.micro_step,
                op: i,
                out: &mut lowered.launches,
            };
            op::lower(&mut cx, op)?;
            lowered.context = [lowered.context, context_of(op)].into_iter().flatten().min();
        }
        tracing::debug!(
            "ops {:?} became {} launches in {:?}",
            key.ops,
            lowered.launches.len(),
            start.elapsed()
        );
        if self.lowered.len() >= MOST_LOWERED {
            self.lowered.clear(); // thousands of programs on one engine: a test suite, not a training run
        }
        self.lowered.insert(key.clone(), lowered);
        Ok(())
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
    pub(crate) fn prepare(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<Key> {
        if program.nodes().get(ops.clone()).is_none() {
            let what = format!("ops {ops:?} asked for, of {}", program.nodes().len());
            return Err(ironhorse_core::Error::Program(what).into());
        }
        self.device.make_current()?;
        self.set_scalars(scalars)?;
        let key = Key { program: program.id(), ops, later: scalars.micro_step > 0 };
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

    fn run_range(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        let key = self.prepare(program, ops, scalars)?;
        let Some(lowered) = self.lowered.get_mut(&key) else { return Ok(()) };
        lowered.run(&self.stream, self.settings.graphs)
    }

    /// Fails if a kernel found something wrong with its input; the fault is then forgotten.
    fn check_fault(&mut self, block: &[u8]) -> Result<()> {
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

    fn write(&mut self, slot: Slot, len: usize, fill: impl FnMut(Range<usize>, &mut [u8])) -> Result<()> {
        check_host_len(&slot, len)?;
        self.device.make_current()?;
        let to = self.memory.address(slot)?;
        self.staging.upload(&self.stream, to, slot.bytes(), fill)
    }

    fn read(&mut self, slot: Slot, len: usize, take: impl FnMut(Range<usize>, &[u8])) -> Result<()> {
        check_host_len(&slot, len)?;
        self.device.make_current()?;
        let from = self.memory.address(slot)?;
        self.staging.download(&self.stream, from, slot.bytes(), take)?;
        self.fault_now()
    }

    fn begin_read(&mut self, slot: Slot) -> Result<Pending> {
        check_host_len(&slot, 1)?;
        if slot.dtype != DType::F32 {
            return Err(Error::Unsupported(format!("a result of {} cannot be read later", slot.dtype)));
        }
        self.device.make_current()?;
        let from = self.memory.address(slot)?;
        let ticket = self.results.next;
        self.results.next += 1;
        let (buffer, done) = &self.results.ring[(ticket % RESULTS) as usize];
        self.stream.download(buffer, self.fault.address(), FAULT_BYTES)?;
        self.stream.download_at(buffer, FAULT_BYTES, from, 4)?;
        done.record(&self.stream)?;
        Ok(Pending::Queued(ticket))
    }

    fn end_read(&mut self, pending: Pending) -> Result<f32> {
        let ticket = match pending {
            Pending::Ready(value) => return Ok(value),
            Pending::Queued(ticket) => ticket,
        };
        if ticket + RESULTS < self.results.next || ticket >= self.results.next {
            return Err(Error::Unsupported(format!("result {ticket} was waited for too late")));
        }
        self.device.make_current()?;
        let (buffer, done) = &self.results.ring[(ticket % RESULTS) as usize];
        done.synchronize()?;
        let bytes = buffer.as_slice().to_vec();
        let (fault, value) = bytes.split_at(FAULT_BYTES);
        self.check_fault(fault)?;
        Ok(f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
    }

    fn pick(&mut self, logits: Slot, vocab: usize, choice: &TokenChoice) -> Result<u32> {
        if vocab == 0 || vocab > logits.shape.cols() {
            let cols = logits.shape.cols();
            return Err(Error::Input(format!("{vocab} tokens to choose from, but {cols} logits")));
        }
        self.device.make_current()?;
        let out = self.scratch.at_least(&self.device, 4)?;
        let row = Row { out, logits: self.memory.address(logits)?, dtype: logits.dtype, vocab };
        sample((&self.device, &self.stream), &mut self.kernels, &row, choice)?;
        let mut token = [0; 4];
        self.staging.download(&self.stream, out, 4, |range, from| token[range].copy_from_slice(from))?;
        self.fault_now()?;
        u32::try_from(i32::from_le_bytes(token)).map_err(|_| {
            Error::Input(
                "sampling: the logits hold a number that is not finite, or none above minus infinity".into(),
            )
        })
    }

    fn reserve_all(&mut self, layout: &Layout) -> Result<()> {
        self.device.make_current()?;
        if self.memory.reserve(&self.device, &self.stream, layout)? {
            self.lowered.clear(); // addresses have changed
        }
        tracing::debug!("{}: {} reserved", self.name, human(self.memory.allocated()));
        Ok(())
    }
}

impl Lowered {
    fn run(&mut self, stream: &Stream, graphs: bool) -> Result<()> {
        self.runs += 1;
        if let Some(graph) = &self.graph {
            return stream.replay(graph);
        }
        // The first run is eager: libraries load their kernels then, which a recording does not allow.
        if graphs && self.runs > 1 && self.launches.len() > 1 {
            let launches = &mut self.launches;
            let graph =
                stream.capture(|| launches.iter_mut().try_for_each(|launch| launch.enqueue(stream)))?;
            stream.replay(&graph)?;
            self.graph = Some(graph);
            return Ok(());
        }
        self.launches.iter_mut().try_for_each(|launch| launch.enqueue(stream))
    }
}

/// The positions an op that reads the scalar `position` has room for.
fn context_of(op: &Op) -> Option<usize> {
    match op {
        Op::EmbeddingFwd(op) if op.at_position => {
            Some((op.wpe.shape.rows() + 1).saturating_sub(op.tokens.shape.cols()))
        }
        Op::AttentionCached(op) => op.keys.shape.dims().get(1).copied(),
        _ => None,
    }
}

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

    fn memory_use(&self) -> Vec<(String, usize)> {
        self.memory_by_category()
    }

    fn device_name(&self) -> Option<String> {
        Some(self.device.info.name.clone())
    }

    fn datasheet_flops(&self, dtype: DType) -> Option<f64> {
        crate::limits::datasheet_flops(&self.device.info.name, dtype, self.settings.tf32)
    }

    fn measure_flops(&mut self, dtype: DType) -> ironhorse_core::Result<f64> {
        Ok(self.product_rate(dtype)?)
    }

    fn measure_bandwidth(&mut self) -> ironhorse_core::Result<f64> {
        Ok(self.copy_rate()?)
    }
}

fn is_i32(slot: &Slot) -> Result<()> {
    if slot.dtype == DType::I32 {
        return Ok(());
    }
    Err(Error::Input(format!("integers do not fit a slot of {}", slot.dtype)))
}
