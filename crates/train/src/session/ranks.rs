//! A session that shares a run with those of other ranks: how micro-steps are added up, and state of which each has a part.

use super::{Session, io, not_trained};
use crate::format::checkpoint::{CheckpointParts, Share, widen};
use crate::model::{After, Sums};
use crate::{Error, Result};
use ironhorse_core::ranks::Alone;
use ironhorse_core::{
    Communicator, Engine, EngineExt, HostMemory, Param, Place, Pool, Program, Scalars, Section, Shape,
    Slices, Slot, SumTree, Timed, join_master,
};
use std::ops::Range;
use std::sync::Arc;

/// How a session adds up micro-steps, and with whom.
pub(super) struct Ranks {
    pub sums: Option<Sums>,
    pub with: Arc<dyn Communicator>,
    /// What runs beside and after each micro-step of this rank in the step under way ([`Sums::after_each`]).
    after: Arc<Vec<Behind>>,
    /// Micro-steps made of the step under way.
    made: usize,
    /// Micro-steps of the step under way, of all ranks together.
    micro_steps: usize,
}

impl Ranks {
    pub fn new(sums: Option<Sums>) -> Self {
        let sums = sums.filter(Sums::is_needed);
        Self { sums, with: Arc::new(Alone), after: Arc::default(), made: 0, micro_steps: 0 }
    }

    /// How many micro-steps are in a number that is added up over micro-steps, such as the load of an expert.
    pub fn added(&self) -> usize {
        if self.sums.is_some() { self.micro_steps.max(1) } else { 1 }
    }

    /// How state is divided, if it is.
    fn slices(&self) -> Option<Slices> {
        self.sums.filter(Sums::shards_state).map(|sums| sums.slices())
    }
}

/// The ops of [`After`], neighbours joined.
struct Behind {
    beside: Vec<Range<usize>>,
    then: Vec<Range<usize>>,
}

impl Behind {
    fn new(program: &Program, After { beside, then }: &After) -> Self {
        Self { beside: ranges(program, beside), then: ranges(program, then) }
    }
}

/// The ops of these origins, neighbours joined.
fn ranges(program: &Program, origins: &[String]) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for ops in origins.iter().map(|origin| program.range_at(Section::Sum, origin)) {
        match all.last_mut() {
            _ if ops.is_empty() => {}
            Some(last) if last.end == ops.start => last.end = ops.end,
            _ => all.push(ops),
        }
    }
    all
}

/// The parts of a tensor that this rank has: the place in the tensor where each begins, and its slot.
pub(super) type Pieces = Vec<(usize, Slot)>;

/// What this rank has of the master of a tensor.
pub(super) struct Masters {
    pub pieces: Pieces,
    /// Whether they hold only what the weights lack.
    pub residual: bool,
}

/// The parts of a tensor that has none.
pub(super) static NO_MASTERS: Masters = Masters { pieces: Vec::new(), residual: false };

impl Session {
    /// Shares the run with other ranks: before anything is run, by all of them. From then on all compute with the algorithms of the
    /// one that leads.
    pub fn join(&mut self, with: Arc<dyn Communicator>) -> Result<()> {
        let place = self.place();
        if with.place() != place {
            let (found, expected) = (with.place(), place);
            return Err(Error::input(
                "the communicator's place",
                format!("{found:?}"),
                format!("{expected:?}"),
            ));
        }
        self.engine.join(with.clone())?;
        self.ranks.with = with;
        self.share_choices()
    }

    /// Which rank this is.
    pub fn place(&self) -> Place {
        self.ranks.sums.map_or(Place::ALONE, |sums| sums.place)
    }

    /// The other ranks.
    pub fn ranks(&self) -> Arc<dyn Communicator> {
        self.ranks.with.clone()
    }

    /// Begins a step of so many micro-steps, of all ranks together. Gives the numbers of those that this rank makes.
    pub fn begin_step(&mut self, micro_steps: usize) -> Vec<usize> {
        self.ranks.made = 0;
        if let (Some(sums), Some(program)) = (self.ranks.sums, &self.programs.train)
            && self.ranks.micro_steps != micro_steps
        {
            let after = sums.after_each(micro_steps, program.flat(Pool::Grads).numel());
            self.ranks.after = Arc::new(after.iter().map(|after| Behind::new(program, after)).collect());
            self.ranks.micro_steps = micro_steps;
        }
        self.share_of(micro_steps)
    }

    /// The numbers of the micro-steps that this rank makes of so many.
    pub fn share_of(&self, micro_steps: usize) -> Vec<usize> {
        match self.ranks.sums {
            Some(sums) => SumTree::new(micro_steps).share(sums.place, sums.shard),
            None => (0..micro_steps).collect(),
        }
    }

    /// A micro-step whose batch is written, in one range of ops, and what adds it to the others. What ranks exchange of gradients goes on while
    /// the backward computes the next of them, where the engine can do both.
    pub(super) fn forward_and_backward(&mut self, scalars: &Scalars) -> Result<()> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let ops = program.micro_step();
        let after = self.ranks.after.clone();
        let behind = after.get(self.ranks.made).filter(|_| self.ranks.sums.is_some());
        self.ranks.made += 1;
        match behind {
            Some(Behind { beside, .. }) if !beside.is_empty() => {
                self.engine.run_beside(program, ops, beside, scalars)?;
            }
            _ => self.engine.run(program, ops, scalars)?,
        }
        let then = behind.map_or(&[][..], |behind| &behind.then);
        Ok(then.iter().try_for_each(|ops| self.engine.run(program, ops.clone(), scalars))?)
    }

    /// One step whose micro-steps of this rank all have this batch, and the update, each kernel timed by itself. All ranks must call it.
    pub fn record_step(&mut self, batch: super::Batch<'_>, scalars: &Scalars) -> Result<Vec<Timed>> {
        let micro_steps = self.ranks.sums.map_or(1, |sums| sums.accumulate as usize);
        let scalars = Scalars { overwrites: self.ranks.sums.is_some(), ..*scalars };
        let shares = self.begin_step(micro_steps);
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        batch.write(self.engine.as_mut(), program)?;
        self.engine.synchronize()?;
        let mut all = Vec::new();
        let mut record =
            |engine: &mut dyn Engine, ops: Range<usize>, beside: &[Range<usize>]| -> Result<()> {
                let mut now = Vec::new();
                engine.profile(program, ops, beside, &scalars, &mut now)?;
                let end = all.iter().map(|timed: &Timed| timed.start_ns + timed.ns).max().unwrap_or(0);
                all.extend(now.into_iter().map(|timed| Timed { start_ns: end + timed.start_ns, ..timed }));
                Ok(())
            };
        let (micro_step, update) = (program.micro_step(), program.range(Section::Update));
        let after = self.ranks.after.clone();
        if after.is_empty() {
            record(self.engine.as_mut(), 0..update.end, &[])?;
            return Ok(all);
        }
        for behind in after.iter().take(shares.len()) {
            record(self.engine.as_mut(), micro_step.clone(), &behind.beside)?;
            for ops in &behind.then {
                record(self.engine.as_mut(), ops.clone(), &[])?;
            }
        }
        record(self.engine.as_mut(), update, &[])?;
        Ok(all)
    }

    /// Adds what is in the gradients to the others, as if a micro-step had been made.
    fn add_up(&mut self, scalars: &Scalars) -> Result<()> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let after = self.ranks.after.clone();
        let behind = after.get(self.ranks.made);
        self.ranks.made += 1;
        let all = behind.into_iter().flat_map(|behind| behind.beside.iter().chain(&behind.then));
        Ok(all.into_iter().try_for_each(|ops| self.engine.run(program, ops.clone(), scalars))?)
    }

    /// Gives all ranks the algorithms of the one that leads: products computed in another way have other bits. The leader chooses
    /// for every op that several ranks run, those of the update and of validation too; nothing is run yet, because what was chosen
    /// stays.
    fn share_choices(&mut self) -> Result<()> {
        let place = self.ranks.with.place();
        if place.is_alone() {
            return Ok(());
        }
        let scalars = Scalars { overwrites: true, ..Scalars::default() };
        let programs = [&self.programs.train, &self.programs.eval].into_iter().flatten();
        for program in programs.filter(|_| place.leads()) {
            for ops in [program.micro_step(), program.range(Section::Update)] {
                self.engine.choose(program, ops, &scalars)?; // sums have no products
            }
        }
        let unreadable = |error: serde_json::Error| {
            Error::from(ironhorse_core::Error::Program(format!("the algorithms of rank 0: {error}")))
        };
        let mine = if place.leads() { self.engine.choices() } else { Vec::new() };
        let all = self.ranks.with.share(&serde_json::to_vec(&mine).map_err(unreadable)?)?;
        if let Some(text) = all.first().filter(|_| !place.leads()) {
            let choices: Vec<(String, String)> = serde_json::from_slice(text).map_err(unreadable)?;
            self.engine.set_choices(&choices)?;
        }
        Ok(())
    }

    /// Makes the step under way one that no rank applies, although this one could not compute its share: loss and gradients
    /// become NaN and go the way of all others.
    pub fn poison(&mut self, scalars: &Scalars) -> Result<()> {
        let program = self.programs.train.as_ref().ok_or_else(not_trained)?;
        let (grads, loss) = (program.flat(Pool::Grads), io(program, "loss")?);
        let first = Slot { shape: Shape::new([grads.numel().min(1)]), ..grads };
        while self.ranks.made < self.ranks.after.len() {
            self.engine.write_f32(first, &vec![f32::NAN; first.numel()])?;
            self.engine.write_f32(loss, &[f32::NAN])?;
            self.add_up(&Scalars { overwrites: true, ..*scalars })?;
        }
        Ok(())
    }

    /// The slots of a tensor in a pool: the whole, or the parts that this rank has.
    pub(super) fn pieces(&self, pool: Pool, param: &Param) -> Result<Pieces> {
        let whole = param.in_pool(pool);
        let sharded = matches!(pool, Pool::Moment1 | Pool::Moment2 | Pool::Master);
        let Some(slices) = self.ranks.slices().filter(|_| sharded) else { return Ok(vec![(0, whole)]) };
        let elements = self.train_program()?.flat(Pool::Params).numel();
        let of = |(at, local): (usize, Range<usize>)| {
            let (offset, shape) = (local.start * whole.dtype.size(), Shape::new([local.len()]));
            (at, Slot { offset, shape, ..whole })
        };
        Ok(slices.local(elements, &param.elements()).into_iter().map(of).collect())
    }

    /// The pools that make up the state of training as the whole run has them, the weights first, each as one flat slot.
    pub fn state_slots(&self) -> Result<Vec<Slot>> {
        let program = self.train_program()?;
        Ok(pools(program).into_iter().map(|pool| program.flat(pool)).collect())
    }

    /// What this rank writes of a checkpoint that all ranks write together, and where it has it. Every element of the state is in the
    /// share of exactly one rank; of state that a rank has a part of, in that rank's.
    pub fn shares(&self) -> Result<Vec<(Share, Slot)>> {
        let (program, Place { rank, world }) = (self.train_program()?, self.place());
        let params = program.params();
        let all: usize = params.iter().map(|param| param.weight.bytes()).sum();
        let (mut shares, mut before) = (Vec::new(), 0);
        for (index, param) in params.iter().enumerate() {
            // whole tensors of the weights, which every rank has
            if before * world / all.max(1) == rank {
                let share = Share { pool: Pool::Params, index, elements: 0..param.weight.numel() };
                shares.push((share, param.weight));
            }
            before += param.weight.bytes();
        }
        let elements = program.flat(Pool::Params).numel();
        let own = elements * rank / world..elements * (rank + 1) / world;
        for pool in pools(program).into_iter().filter(|pool| *pool != Pool::Params) {
            for (index, param) in params.iter().enumerate() {
                let pieces: Pieces = match self.ranks.slices() {
                    Some(_) => self.pieces(pool, param)?,
                    None => {
                        let (whole, range) = (param.in_pool(pool), param.elements());
                        let [start, end] = [own.start, own.end].map(|at| at.clamp(range.start, range.end));
                        let (first, count) = (start - range.start, end - start);
                        let offset = whole.offset + first * whole.dtype.size();
                        vec![(first, Slot { offset, shape: Shape::new([count]), ..whole })]
                            .into_iter()
                            .filter(|_| whole.numel() > 0 && count > 0)
                            .collect()
                    }
                };
                for (first, slot) in pieces {
                    shares.push((Share { pool, index, elements: first..first + slot.numel() }, slot));
                }
            }
        }
        Ok(shares)
    }

    /// Copies the state out, one pool after the other as [`Session::state_slots`] has them. Where ranks have parts of it, all must
    /// call this, and the one that leads gets the whole; the memory of the others is not used.
    pub fn snapshot(&mut self, memory: &mut dyn HostMemory) -> Result<()> {
        let (slots, place) = (self.state_slots()?, self.place());
        let Some(slices) = self.ranks.slices() else {
            if place.leads() {
                self.engine.snapshot(&slots, memory)?;
            }
            return Ok(());
        };
        let mut start = 0;
        for slot in slots {
            let range = start..start + slot.bytes();
            start = range.end;
            if slot.pool == Pool::Params {
                if let Some(bytes) = memory.bytes_mut().get_mut(range).filter(|_| place.leads()) {
                    self.engine.read_bytes(slot, bytes)?;
                }
                continue;
            }
            let target = if place.leads() { memory.bytes_mut().get_mut(range) } else { None };
            self.gather_pool(slices, slot, target)?;
        }
        Ok(())
    }

    /// The gradients of the step as the rank that leads has them, in the order of the pool; `None` on the others. All must call
    /// this, after the last micro-step.
    pub fn gather_gradients(&mut self) -> Result<Option<Vec<f32>>> {
        let grads = self.train_program()?.flat(Pool::Grads);
        let mut values = vec![0.0; grads.numel()];
        let Some(slices) = self.ranks.slices() else {
            self.engine.read_f32(grads, &mut values)?;
            return Ok(self.place().leads().then_some(values));
        };
        // every rank has its parts where they are in the whole
        for part in slices.parts(grads.numel()) {
            let offset = grads.offset + part.start * grads.dtype.size();
            let slot = Slot { offset, shape: Shape::new([part.len()]), ..grads };
            self.engine.read_f32(slot, &mut values[part])?;
        }
        let own: Vec<u8> = slices
            .parts(grads.numel())
            .into_iter()
            .flat_map(|part| values[part].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
            .collect();
        let (world, leads) = (slices.place.world, slices.place.leads());
        let send: Vec<&[u8]> = (0..world).map(|to| if to == 0 { &own[..] } else { &[] }).collect();
        let held =
            |rank: usize| -> usize { slices.parts_of(grads.numel(), rank).iter().map(Range::len).sum() };
        let mut arrived: Vec<Vec<u8>> =
            (0..world).map(|from| vec![0; if leads { 4 * held(from) } else { 0 }]).collect();
        let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
        self.ranks.with.exchange(&send, &mut receive)?;
        if !leads {
            return Ok(None);
        }
        for (from, bytes) in arrived.iter().enumerate() {
            let elements = slices.parts_of(grads.numel(), from).into_iter().flatten();
            for (at, &cell) in elements.zip(bytes.as_chunks().0) {
                values[at] = f32::from_le_bytes(cell);
            }
        }
        Ok(Some(values))
    }

    /// The weights in their most precise copy, as the rank that leads has them; `None` on the others. All must call this.
    pub fn gather_weights(&mut self) -> Result<Option<Vec<f32>>> {
        let program = self.train_program()?;
        let (params, precision) = (program.flat(Pool::Params), program.precision());
        let (leads, mut values) = (self.place().leads(), vec![0.0; params.numel()]);
        let Some(slices) = self.ranks.slices().filter(|_| precision.has_master()) else {
            let table = self.train_program()?.params().to_vec();
            let mut tensor = Vec::new();
            for param in &table {
                self.read_in_pool(Pool::Params, param, &mut tensor)?;
                values[param.elements()].copy_from_slice(&tensor);
            }
            return Ok(leads.then_some(values));
        };
        let master = program.flat(Pool::Master);
        let mut bytes = vec![0; if leads { master.bytes() } else { 0 }];
        self.gather_pool(slices, master, leads.then_some(&mut bytes[..]))?;
        if !leads {
            return Ok(None);
        }
        if !precision.has_residual() {
            widen(master.dtype, &bytes, &mut values);
            return Ok(Some(values));
        }
        let mut weights = vec![0; params.bytes()];
        self.engine.read_bytes(params, &mut weights)?;
        let pairs = weights.as_chunks().0.iter().zip(bytes.as_chunks().0);
        for (value, (&weight, &residual)) in values.iter_mut().zip(pairs) {
            *value = join_master(u16::from_le_bytes(weight), i16::from_le_bytes(residual));
        }
        Ok(Some(values))
    }

    /// Gives the parts of a pool to the rank that leads.
    fn gather_pool(&mut self, slices: Slices, whole: Slot, mut out: Option<&mut [u8]>) -> Result<()> {
        let (elements, size, world) = (whole.numel(), whole.dtype.size(), slices.place.world);
        let mut local = 0;
        for bucket in slices.buckets(elements) {
            let mine = slices.part_of(&bucket, slices.place.rank);
            let mut own = vec![0; mine.len() * size];
            let slot = Slot { offset: local * size, shape: Shape::new([mine.len()]), ..whole };
            self.engine.read_bytes(slot, &mut own)?;
            local += mine.len();
            let send: Vec<&[u8]> = (0..world).map(|to| if to == 0 { &own[..] } else { &[] }).collect();
            let arriving =
                |from: usize| if out.is_some() { slices.part_of(&bucket, from).len() * size } else { 0 };
            let mut arrived: Vec<Vec<u8>> = (0..world).map(|from| vec![0; arriving(from)]).collect();
            let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
            self.ranks.with.exchange(&send, &mut receive)?;
            let Some(out) = out.as_deref_mut() else { continue };
            for (from, bytes) in arrived.iter().enumerate() {
                let part = slices.part_of(&bucket, from);
                if let Some(to) = out.get_mut(part.start * size..part.end * size) {
                    to.copy_from_slice(bytes);
                }
            }
        }
        Ok(())
    }
}

/// The pools of a checkpoint.
fn pools(program: &Program) -> Vec<Pool> {
    CheckpointParts::pools(program.precision())
}
