//! Building a program: declare parameters, inputs and activations, push ops, finish.

use crate::op::Op;
use crate::planner::{Lifetime, place};
use crate::program::{Layout, Node, Param, Program, Section, Update, Value, ValueKind, flat};
use crate::slot::align_up;
use crate::{DType, Error, Pool, Precision, Result, Shape, Slot};
use std::sync::atomic::{AtomicU64, Ordering};

/// Builds a [`Program`]. Activations get consecutive virtual addresses until [`Builder::finish`] plans their memory.
#[derive(Debug)]
pub struct Builder {
    nodes: Vec<Node>,
    origins: Vec<String>,
    params: Vec<Param>,
    frozen: Vec<(String, Slot)>,
    precision: Precision,
    values: Vec<Value>,
    io: Vec<(String, Slot)>,
    cache_end: usize,
    scales: usize,
    io_end: usize,
    activations: Vec<Slot>,
    /// Activations that are in use before the first op of the list that writes them, each with the op it is in use from.
    early: Vec<(usize, usize)>,
    kept_ops: usize,
    section: Section,
    sharded: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// An empty program, in its forward section.
    pub fn new() -> Self {
        Self {
            nodes: Vec::new(),
            origins: vec![String::new()],
            params: Vec::new(),
            frozen: Vec::new(),
            precision: Precision::F32,
            values: Vec::new(),
            io: Vec::new(),
            cache_end: 0,
            scales: 0,
            io_end: 0,
            activations: Vec::new(),
            early: Vec::new(),
            kept_ops: 0,
            section: Section::Forward,
            sharded: false,
        }
    }

    /// An empty program with these element types.
    pub fn with_precision(precision: Precision) -> Self {
        Self { precision, ..Self::new() }
    }

    /// The element types of weights and gradients.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Adds a row to the parameter table.
    pub fn param(&mut self, name: impl Into<String>, shape: impl Into<Shape>, decay: bool) -> Slot {
        let offset = self.params.last().map_or(0, |param| align_up(param.weight.end()));
        let precision = self.precision;
        let weight = Slot { pool: Pool::Params, offset, shape: shape.into(), dtype: precision.weights };
        // The parameters of Muon are a stretch of the pool up to the start of the next one of AdamW.
        let held = self.params.iter().rev().find_map(|param| match param.update {
            Update::AdamW { skipped } => {
                Some(align_up(param.weight.end()) / precision.weights.size() - skipped)
            }
            Update::Muon { .. } => None,
        });
        let skipped = offset / precision.weights.size() - held.unwrap_or(0);
        let update = Update::AdamW { skipped };
        self.params.push(Param { name: name.into(), decay, weight, precision, update });
        weight
    }

    /// Adds adjacent rows to the parameter table, without gaps, so that an op can use them as one slot
    /// ([`Slot::joined`]). Only the first starts at a multiple of [`ALIGN`](crate::ALIGN); each of the others starts
    /// where the one before it ends. Ops that read whole vectors must be given the joined slot. Weight decay applies to
    /// the whole group or not at all, because engines may decide it for several elements at a time.
    pub fn param_group<N: Into<String>, S: Into<Shape>>(
        &mut self,
        params: impl IntoIterator<Item = (N, S)>,
        decay: bool,
    ) -> Vec<Slot> {
        let mut slots: Vec<Slot> = Vec::new();
        for (name, shape) in params {
            let slot = self.param(name, shape, decay);
            if let (Some(before), Some(param)) = (slots.last(), self.params.last_mut()) {
                param.weight.offset = before.end();
            }
            slots.push(self.params.last().map_or(slot, |param| param.weight));
        }
        slots
    }

    /// Adds adjacent rows to the parameter table that Muon updates: (name, shape, matrices), where each tensor stacks so
    /// many matrices of the same size.
    pub fn muon_group<N: Into<String>, S: Into<Shape>>(
        &mut self,
        params: impl IntoIterator<Item = (N, S, usize)>,
        decay: bool,
    ) -> Vec<Slot> {
        let first = self.params.len();
        let mut counts = Vec::new();
        let named = params.into_iter().map(|(name, shape, matrices)| {
            counts.push(matrices);
            (name, shape)
        });
        let slots = self.param_group(named, decay);
        for (param, matrices) in self.params[first..].iter_mut().zip(counts) {
            param.update = Update::Muon { matrices };
        }
        slots
    }

    /// Adds adjacent weights that are not trained, as [`Builder::param_group`] does with those that are.
    pub fn frozen_group<N: Into<String>, S: Into<Shape>>(
        &mut self,
        weights: impl IntoIterator<Item = (N, S)>,
    ) -> Vec<Slot> {
        let mut offset = self.frozen.last().map_or(0, |(_, slot)| align_up(slot.end()));
        let mut slots = Vec::new();
        for (name, shape) in weights {
            let slot =
                Slot { pool: Pool::Frozen, offset, shape: shape.into(), dtype: self.precision.weights };
            offset = slot.end();
            self.frozen.push((name.into(), slot));
            slots.push(slot);
        }
        slots
    }

    /// The sizes of the matrices that Muon updates, each with their number, in the order in which they first occur.
    pub fn muon_sizes(&self) -> Vec<([usize; 2], usize)> {
        let mut sizes: Vec<([usize; 2], usize)> = Vec::new();
        for param in &self.params {
            let (Some(size), Update::Muon { matrices }) = (param.matrix(), param.update) else { continue };
            match sizes.iter_mut().find(|(known, _)| *known == size) {
                Some((_, count)) => *count += matrices,
                None => sizes.push((size, matrices)),
            }
        }
        sizes
    }

    /// The gradient of a parameter, or of several joined parameters.
    pub fn grad(&self, weight: Slot) -> Slot {
        let dtype = self.precision.grads;
        let offset = weight.offset / weight.dtype.size() * dtype.size();
        Slot { pool: Pool::Grads, offset, dtype, ..weight }
    }

    /// A pool laid out like the parameters, as one flat slot. Declare all parameters first.
    pub fn flat(&self, pool: Pool) -> Slot {
        flat(&self.params, self.precision, pool)
    }

    /// An input or result that lives for the whole step.
    pub fn io(&mut self, name: impl Into<String>, shape: impl Into<Shape>, dtype: DType) -> Slot {
        let slot = Slot { pool: Pool::Io, offset: self.io_end, shape: shape.into(), dtype };
        self.io_end = align_up(slot.end());
        self.io.push((name.into(), slot));
        slot
    }

    /// An input or result by its name.
    pub fn find_io(&self, name: &str) -> Option<Slot> {
        self.io.iter().find(|(io, _)| io == name).map(|(_, slot)| *slot)
    }

    /// A slot of the key/value cache, which keeps its contents from run to run.
    pub fn cache(&mut self, shape: impl Into<Shape>, dtype: DType) -> Slot {
        let slot = Slot { pool: Pool::Cache, offset: self.cache_end, shape: shape.into(), dtype };
        self.cache_end = align_up(slot.end());
        slot
    }

    /// The scale of one more tensor in 8 bits: its largest element of earlier steps, and that of this step.
    pub fn scale(&mut self) -> [Slot; 2] {
        let place =
            |i: usize| Slot { pool: Pool::Scales, offset: 4 * i, shape: Shape::new([1]), dtype: DType::F32 };
        self.scales += 1;
        [place(2 * self.scales - 2), place(2 * self.scales - 1)]
    }

    /// All scales so far, as (n,2) pairs.
    pub fn scales(&self) -> Slot {
        Slot { pool: Pool::Scales, offset: 0, shape: Shape::new([self.scales, 2]), dtype: DType::F32 }
    }

    /// A temporary buffer, alive from the op that first writes it to the op that last uses it.
    pub fn activation(&mut self, shape: impl Into<Shape>, dtype: DType) -> Slot {
        let offset = self.activations.last().map_or(0, |slot| align_up(slot.end().max(slot.offset + 1)));
        let slot = Slot { pool: Pool::Activations, offset, shape: shape.into(), dtype };
        self.activations.push(slot);
        slot
    }

    /// A temporary buffer for ops that an engine may run beside others ([`Engine::run_beside`](crate::Engine::run_beside)): nothing
    /// from op `since` on shares its memory, until the op that last uses it.
    pub fn activation_since(&mut self, since: usize, shape: impl Into<Shape>, dtype: DType) -> Slot {
        self.early.push((self.activations.len(), since));
        self.activation(shape, dtype)
    }

    /// Keeps the memory of an activation for this many ops after its last use, so that an engine can compute an op together
    /// with the ones after it without overwriting what it reads.
    pub fn keep_activations(&mut self, ops: usize) {
        self.kept_ops = self.kept_ops.max(ops);
    }

    /// The pools of moments and master weights hold a part only, as the slots of the update say.
    pub fn shard_state(&mut self) {
        self.sharded = true;
    }

    /// Sets the section of the ops pushed from now on. Sections must come in execution order.
    pub fn section(&mut self, section: Section) {
        self.section = section;
    }

    /// Sets the part of the model that the ops pushed from now on come from.
    pub fn at(&mut self, origin: impl Into<String>) {
        self.origins.push(origin.into());
    }

    /// Appends an op after checking it.
    pub fn push(&mut self, op: impl Into<Op>) -> Result<()> {
        let op = op.into();
        op.check()?;
        if self.nodes.last().is_some_and(|node| node.section > self.section) {
            return Err(Error::Program(format!(
                "{} pushed into {} after a later section",
                op.name(),
                self.section
            )));
        }
        self.nodes.push(Node { op, origin: self.origins.len() - 1, section: self.section });
        Ok(())
    }

    /// Inserts an op into the current section before op `at`, after checking it; the ops from there on move by one.
    pub fn insert(&mut self, at: usize, op: impl Into<Op>) -> Result<()> {
        let op = op.into();
        op.check()?;
        let [before, behind] = [at.checked_sub(1), Some(at)].map(|at| at.and_then(|at| self.nodes.get(at)));
        let fits = at <= self.nodes.len()
            && before.is_none_or(|node| node.section <= self.section)
            && behind.is_none_or(|node| node.section >= self.section);
        if !fits {
            return Err(Error::Program(format!(
                "{} inserted at {at} of {} ops, outside {}",
                op.name(),
                self.nodes.len(),
                self.section
            )));
        }
        let values = self.values.iter_mut().map(|value| &mut value.after);
        let places = values.chain(self.early.iter_mut().map(|(_, since)| since));
        places.filter(|place| **place >= at).for_each(|place| *place += 1);
        self.nodes.insert(at, Node { op, origin: self.origins.len() - 1, section: self.section });
        Ok(())
    }

    /// The section of the ops pushed from now on.
    pub fn in_section(&self) -> Section {
        self.section
    }

    /// The ops pushed so far.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Names the activation that the last op completed.
    pub fn name(&mut self, name: impl Into<String>, slot: Slot) {
        self.value(name.into(), ValueKind::Activation, slot);
    }

    /// Names the gradient that the last op completed, after its activation.
    pub fn name_grad(&mut self, name: impl Into<String>, slot: Slot) {
        self.value(name.into(), ValueKind::Gradient, slot);
    }

    fn value(&mut self, name: String, kind: ValueKind, slot: Slot) {
        self.values.push(Value { name, kind, slot, after: self.nodes.len().saturating_sub(1) });
    }

    /// Plans the memory of the activations and returns the program.
    pub fn finish(mut self) -> Result<Program> {
        let lifetimes = self.lifetimes()?;
        let plan = place(&lifetimes);
        let virtual_slots = std::mem::take(&mut self.activations);
        let mut relocate = |slot: &mut Slot| {
            if slot.pool == Pool::Activations {
                let i = index_of(&virtual_slots, slot);
                slot.offset = plan.offsets[i] + (slot.offset - virtual_slots[i].offset);
            }
        };
        for node in &mut self.nodes {
            node.op.map_slots(&mut relocate);
            node.op.check()?;
        }
        for value in &mut self.values {
            relocate(&mut value.slot);
        }

        let mut sizes = [0; Pool::ALL.len()];
        for arg in self.nodes.iter().flat_map(|node| node.op.args()) {
            let pool = arg.slot.pool;
            let least = match pool {
                Pool::Grads => self.flat(pool).bytes(), // beyond it are sums of several micro-steps
                Pool::Moment1 | Pool::Moment2 | Pool::Master if self.sharded => 0, // what this rank has of them
                Pool::Moment1 | Pool::Moment2 | Pool::Master => self.flat(pool).bytes(),
                _ => continue,
            };
            let size = &mut sizes[pool.index()];
            *size = (*size).max(least).max(align_up(arg.slot.end()));
        }
        sizes[Pool::Params.index()] = self.flat(Pool::Params).bytes();
        sizes[Pool::Frozen.index()] = self.frozen.last().map_or(0, |(_, slot)| align_up(slot.end()));
        sizes[Pool::Io.index()] = self.io_end;
        sizes[Pool::Cache.index()] = self.cache_end;
        sizes[Pool::Scales.index()] = align_up(self.scales().bytes());
        sizes[Pool::Activations.index()] = plan.peak;
        Ok(Program {
            id: next_id(),
            nodes: self.nodes,
            origins: self.origins,
            params: self.params,
            frozen: self.frozen,
            precision: self.precision,
            values: self.values,
            io: self.io,
            layout: Layout::new(sizes),
            activation_lower_bound: plan.lower_bound,
        })
    }

    /// The first write of each activation, and its last use or the last op that it is kept for.
    fn lifetimes(&self) -> Result<Vec<Lifetime>> {
        let mut seen: Vec<Option<Lifetime>> = vec![None; self.activations.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for arg in node.op.args().into_iter().filter(|arg| arg.slot.pool == Pool::Activations) {
                let at = index_of(&self.activations, &arg.slot);
                match &mut seen[at] {
                    Some(lifetime) => lifetime.last = i,
                    None if arg.access.reads() => {
                        let origin = &self.origins[node.origin];
                        return Err(Error::Program(format!(
                            "{} at {origin} reads `{}` before any op has written it",
                            node.op.name(),
                            arg.name
                        )));
                    }
                    empty => {
                        *empty = Some(Lifetime { bytes: self.activations[at].bytes(), first: i, last: i })
                    }
                }
            }
        }
        for &(at, since) in &self.early {
            if let Some(lifetime) = &mut seen[at] {
                lifetime.first = lifetime.first.min(since);
            }
        }
        let kept = |life: Lifetime| Lifetime { last: life.last + self.kept_ops, ..life };
        Ok(seen.into_iter().map(|life| life.map_or(Lifetime { bytes: 0, first: 0, last: 0 }, kept)).collect())
    }
}

/// A number that is unique among the programs of this process.
pub(crate) fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// The index of the buffer that contains a slot; slots of the activation pool always come from [`Builder::activation`].
fn index_of(buffers: &[Slot], slot: &Slot) -> usize {
    buffers.partition_point(|buffer| buffer.offset <= slot.offset).saturating_sub(1)
}

#[cfg(test)]
#[path = "builder_tests.rs"]
mod tests;
