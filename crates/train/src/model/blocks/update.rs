//! The update: gradient norm and optimizer.

use super::sum::part;
use super::{Blocks, TensorSpec};
use crate::model::Sums;
use crate::{Error, Result};
use ironhorse_core::op::{AdamW, AllGather, GradNorm, MuonMomentum, MuonUpdate, NewtonSchulz};
use ironhorse_core::{Builder, Optimizer, Pool, Section, Slices, Slot};

/// How much of the momentum stays from step to step.
const MUON_MOMENTUM: f32 = 0.95;
/// The most elements that are orthogonalised at a time: enough to keep a GPU busy, while the memory that it takes is less
/// than that of the activations, with which it is shared.
const MUON_BATCH: usize = 1 << 25;

/// Declares a group of parameters for the optimizer of the program.
pub(super) fn declare(b: &mut Builder, group: Vec<TensorSpec>, decay: bool) -> Vec<Slot> {
    let optimizer = b.precision().optimizer;
    if group.iter().all(|tensor| tensor.muon(optimizer) > 0) {
        return b
            .muon_group(group.into_iter().map(|tensor| (tensor.name, tensor.shape, tensor.matrices)), decay);
    }
    b.param_group(group.into_iter().map(|tensor| (tensor.name, tensor.shape)), decay)
}

/// The slots that decide whether the step is made.
#[derive(Clone, Copy)]
struct Verdict {
    norm: Slot,
    halt: Slot,
}

impl Blocks {
    /// The update: gradient norm and optimizer over everything, or over what this rank has, unless the `loss` or the norm is not
    /// finite. Io: `norm`.
    pub fn update(&mut self, sums: Option<Sums>) -> Result<()> {
        let norm = self.scalar("norm");
        let undeclared = |name| ironhorse_core::Error::Program(format!("no io is called `{name}`"));
        let find = |name| self.b.find_io(name).ok_or_else(|| undeclared(name));
        let (loss, halt) = (find("loss")?, find("halt")?);
        self.b.section(Section::Update);
        let sharded = sums.filter(Sums::shards_state);
        let slices = sharded.map(|sums| sums.slices());
        let grads = self.b.flat(Pool::Grads);
        self.b.at("grad_norm");
        self.b.push(GradNorm { norm, halt, grads, loss, slices })?;
        self.b.at("adamw");
        if let Some(slices) = slices {
            return self.update_slices(slices, Verdict { norm, halt });
        }
        let [params, moment1, moment2] =
            [Pool::Params, Pool::Moment1, Pool::Moment2].map(|pool| self.b.flat(pool));
        let master = self.master();
        self.b.push(AdamW { params, master, grads, moment1, moment2, norm, halt, first: 0 })?;
        if self.b.precision().optimizer == Optimizer::Muon {
            self.muon(Verdict { norm, halt })?;
        }
        Ok(())
    }

    /// AdamW on the parts of this rank, whose moments and master weights are all it has, and the weights of the others.
    fn update_slices(&mut self, slices: Slices, Verdict { norm, halt }: Verdict) -> Result<()> {
        if self.b.precision().optimizer != Optimizer::AdamW {
            let expected = "adamw; Muon needs whole matrices: use --shard none";
            return Err(Error::input("the optimizer of sharded state", "muon", expected));
        }
        self.b.shard_state();
        let [params, grads] = [Pool::Params, Pool::Grads].map(|pool| self.b.flat(pool));
        let mut start = 0;
        // each bucket is sent as soon as its part is updated, while that of the next one is
        for bucket in slices.buckets(params.numel()) {
            let range = slices.part_of(&bucket, slices.place.rank);
            let local = |b: &Builder, pool: Pool| part(b.flat(pool), &(start..start + range.len()));
            let [moment1, moment2] = [Pool::Moment1, Pool::Moment2].map(|pool| local(&self.b, pool));
            let master = self.b.precision().has_master().then(|| local(&self.b, Pool::Master));
            let (own, grads, first) = (part(params, &range), part(grads, &range), range.start);
            if !range.is_empty() {
                self.b.at("adamw");
                self.b.push(AdamW { params: own, master, grads, moment1, moment2, norm, halt, first })?;
            }
            start += range.len();
            self.b.at("weights");
            self.b.push(AllGather { data: part(params, &bucket), slices })?;
        }
        Ok(())
    }

    fn master(&self) -> Option<Slot> {
        self.b.precision().has_master().then(|| self.b.flat(Pool::Master))
    }

    /// Muon on all matrices of the blocks: those of one size together, so many at a time as fit [`MUON_BATCH`].
    fn muon(&mut self, verdict: Verdict) -> Result<()> {
        for ([rows, cols], count) in self.b.muon_sizes() {
            let most = (MUON_BATCH / (rows * cols).max(1)).max(1);
            for first in (0..count).step_by(most) {
                self.b.at(format!("muon.{rows}x{cols}"));
                self.muon_batch([most.min(count - first), rows, cols], first, verdict)?;
            }
        }
        Ok(())
    }

    /// Muon on a batch of (n,rows,cols) matrices.
    fn muon_batch(&mut self, dims: [usize; 3], first: usize, verdict: Verdict) -> Result<()> {
        let [count, rows, cols] = dims;
        let Verdict { norm, halt } = verdict;
        let (dtype, side) = (self.dtype(), rows.min(cols));
        let [params, grads, moment1] =
            [Pool::Params, Pool::Grads, Pool::Moment1].map(|pool| self.b.flat(pool));
        let mut x = self.b.activation(dims, dtype);
        self.b.push(MuonMomentum { out: x, moment1, grads, norm, halt, first, momentum: MUON_MOMENTUM })?;
        for _ in 0..NewtonSchulz::STEPS {
            let [gram, poly] = [(); 2].map(|()| self.b.activation([count, side, side], dtype));
            let out = self.b.activation(dims, dtype);
            for product in (NewtonSchulz { x, gram, poly, out }).products() {
                self.b.push(product)?;
            }
            x = out;
        }
        let scale = MuonUpdate::scale_of([rows, cols]);
        self.b.push(MuonUpdate { params, master: self.master(), inp: x, norm, halt, first, scale })?;
        Ok(())
    }
}
