//! The ops on the CPU, one file per family, and what they share.

mod attention;
mod collective;
mod columns;
mod elementwise;
mod embedding;
mod fp8;
mod grouped;
mod grouped_lora;
mod linear;
mod lora;
mod loss;
mod matmul;
mod memory;
mod muon;
mod norm;
mod optimizer;
mod preference;
mod qk_norm;
mod rope;
mod router;
mod routing;

use crate::gemm::{Kept, Workspace};
use crate::isa::Isa;
use crate::kernel::attention::{Heads, QueryScratch, TileScratch};
use crate::memory::{Memory, Span};
use crate::settled::Settled;
use crate::team::{Done, PerWorker, Split, Team};
use ironhorse_core::op::Op;
use ironhorse_core::{Communicator, Error, Operands, Program, Result, Scalars, Slot};
pub use rope::RopeTables;
use std::ops::Range;

/// Elements of a task of rows: some microseconds of work, where starting a task costs a tenth of one.
const TASK: usize = 8192;

/// What an op needs besides its slots. Everything in it is kept from step to step.
pub struct Ctx<'a> {
    pub memory: &'a Memory,
    pub team: &'a Team,
    pub isa: Isa,
    /// What the operands of the products of linear layers, and of attention on tiles, are rounded to.
    pub operands: Operands,
    pub workspace: &'a mut Workspace,
    pub scratch: &'a mut PerWorker<OpScratch>,
    pub partials: &'a mut Vec<f64>,
    pub counts: &'a mut Vec<i32>,
    pub tables: &'a mut RopeTables,
    /// Weights that are packed.
    pub settled: &'a Settled,
    pub ranks: &'a dyn Communicator,
    pub program: &'a Program,
    /// Whether the rows of products may be the tokens of several requests.
    pub apart: bool,
    pub scalars: &'a Scalars,
}

/// A worker's own memory; grows in the first step only.
#[derive(Default)]
pub struct OpScratch {
    attention: TileScratch<f32>,
    query: QueryScratch<f32>,
}

impl Ctx<'_> {
    fn f32(&self, slot: Slot) -> Result<Span<f32>> {
        match self.settled.meeting(slot) {
            None => self.memory.f32(slot),
            Some((weight, _)) => Err(Error::Program(format!(
                "{weight:?} is packed, which an op with {slot:?} cannot read; settle this program too"
            ))),
        }
    }

    /// A weight, and how it is kept where it is packed.
    fn weight(&self, slot: Slot) -> Result<(Span<f32>, Option<Kept>)> {
        match self.settled.kept(slot) {
            Some(kept) => Ok((self.memory.f32(slot)?, Some(kept))),
            None => Ok((self.f32(slot)?, None)),
        }
    }

    fn i32(&self, slot: Slot) -> Result<Span<i32>> {
        self.memory.i32(slot)
    }

    /// Runs `task` on fixed pieces of `0..len`: the pieces do not depend on the number of threads.
    fn chunks(&self, len: usize, chunk: usize, task: impl Fn(Range<usize>, usize) + Sync) -> Result<()> {
        self.team.chunks(len, chunk, task).map_err(engine_error)
    }

    /// Runs `task` on each of `count` rows of `width` elements: as many in a task as make it worth handing out.
    fn rows(&self, count: usize, width: usize, task: impl Fn(usize) + Sync) -> Result<()> {
        self.done(self.split().rows(count, width, 1, task))
    }

    /// How kernels run tasks.
    fn split(&self) -> OnTeam<'_> {
        OnTeam { team: self.team, isa: self.isa }
    }

    fn done(&self, done: Done) -> Result<()> {
        done.map_err(engine_error)
    }

    /// The window of an optional slot.
    fn f32_or_none(&self, slot: Option<Slot>) -> Result<Span<f32>> {
        slot.map_or(Ok(Span::none(0)), |slot| self.f32(slot))
    }

    /// Room for an attention in every worker's scratch: a worker that gets no task now must not have to grow in a later step.
    fn reserve_scratch(&mut self, shape: &Heads) {
        for scratch in self.scratch.iter_mut() {
            scratch.attention.reserve(self.isa, shape);
        }
    }

    /// Room for partial sums, one per task. Valid until the next call.
    fn partials(&mut self, len: usize) -> Span<f64> {
        if self.partials.len() < len {
            self.partials.resize(len, 0.0);
        }
        Span::of_slice(&mut self.partials[..len])
    }

    /// Room for `len` floats, of any value. Valid until the next call, and until a product of the whole team.
    fn floats(&mut self, len: usize) -> Span<f32> {
        // SAFETY: `len` floats of the workspace, which nothing else uses meanwhile.
        unsafe { Span::from_raw(self.workspace.floats(len), len) }
    }

    /// Room for `len` integers, of any value. Valid until the next call.
    fn counts(&mut self, len: usize) -> Span<i32> {
        if self.counts.len() < len {
            self.counts.resize(len, 0);
        }
        Span::of_slice(&mut self.counts[..len])
    }
}

/// [`Split`] on an engine's team: everything is handed out, however small.
#[derive(Clone, Copy)]
pub struct OnTeam<'a> {
    team: &'a Team,
    isa: Isa,
}

impl Split for OnTeam<'_> {
    fn isa(&self) -> Isa {
        self.isa
    }

    fn pieces(&self, len: usize, chunk: usize, _: usize, task: impl Fn(Range<usize>) + Sync) -> Done {
        self.team.chunks(len, chunk, |range, _| task(range))
    }

    fn rows(&self, count: usize, width: usize, _: usize, task: impl Fn(usize) + Sync) -> Done {
        self.pieces(count, (TASK / width.max(1)).max(1), 1, |range| range.for_each(&task))
    }
}

/// `out = values` or `out += values`.
fn store(out: &mut [f32], values: &[f32], adds: bool) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = if adds { *out + value } else { *value };
    }
}

/// The first of the numbers that is neither in `0..count` nor `allowed`, and its index.
fn first_outside(numbers: &[i32], count: usize, allowed: Option<i32>) -> Option<(usize, i32)> {
    let outside =
        |number: i32| usize::try_from(number).map_or(Some(number) != allowed, |number| number >= count);
    numbers.iter().copied().enumerate().find(|&(_, number)| outside(number))
}

/// Refuses token numbers outside the vocabulary, but for the negative one that is `allowed`.
fn check_ids(what: &str, ids: &[i32], vocab: usize, allowed: Option<i32>) -> Result<()> {
    first_outside(ids, vocab, allowed).map_or(Ok(()), |(at, id)| {
        Err(Error::Input(format!("{what} {id} at index {at} is outside the vocabulary of {vocab}")))
    })
}

/// Refuses indices of rows or experts that are out of range.
fn check_below(what: &str, numbers: &[i32], count: usize) -> Result<()> {
    first_outside(numbers, count, None).map_or(Ok(()), |(_, number)| {
        Err(Error::Input(format!("{what} index {number} is out of range 0..{count}")))
    })
}

/// A worker thread panicked: what it left half done cannot be trusted.
pub fn engine_error(error: impl std::fmt::Display) -> Error {
    Error::DeviceLost { engine: "cpu", what: error.to_string() }
}

/// Runs an op and the next one together where that is faster: rows of the first are used by the second while they are in a cache. The
/// bits are those of one after the other. Returns whether it did.
pub fn run_joined(ctx: &mut Ctx<'_>, ops: [&Op; 2]) -> Result<bool> {
    match ops {
        [Op::GroupedLinearBwdInput(first), Op::SwigluBwd(second)]
            if first.d_inp == second.d_out
                && second.d_inp == second.inp
                && second.act.is_none_or(|act| act == second.d_out)
                && ![first.d_out, first.weight, first.offsets]
                    .iter()
                    .any(|read| read.overlaps(&second.inp)) =>
        {
            grouped::grouped_linear_bwd_input(ctx, first, Some(second)).map(|()| true)
        }
        [Op::LinearFwd(first), Op::CrossEntropy(second)]
            if first.out == second.logits
                && first.pre.is_none()
                && first.bias.is_none()
                && ![first.inp, first.weight].iter().any(|read| read.overlaps(&second.losses)) =>
        {
            linear::linear_then_loss(ctx, first, second)
        }
        _ => Ok(false),
    }
}

/// Runs one op.
pub fn run(ctx: &mut Ctx<'_>, op: &Op) -> Result<()> {
    match op {
        Op::EmbeddingFwd(op) => embedding::embedding_fwd(ctx, op),
        Op::EmbeddingBwd(op) => embedding::embedding_bwd(ctx, op),
        Op::LayerNormFwd(op) => norm::layernorm_fwd(ctx, op),
        Op::ResidualLayerNormFwd(op) => norm::residual_layernorm_fwd(ctx, op),
        Op::LayerNormApply(op) => norm::layernorm_apply(ctx, op),
        Op::LayerNormBwd(op) => norm::layernorm_bwd(ctx, op),
        Op::RmsNormFwd(op) => norm::rmsnorm_fwd(ctx, op),
        Op::ResidualRmsNormFwd(op) => norm::residual_rmsnorm_fwd(ctx, op),
        Op::RmsNormApply(op) => norm::rmsnorm_apply(ctx, op),
        Op::RmsNormBwd(op) => norm::rmsnorm_bwd(ctx, op),
        Op::LinearFwd(op) => linear::linear_fwd(ctx, op),
        Op::LinearBwdInput(op) => linear::linear_bwd_input(ctx, op),
        Op::LinearBwdWeight(op) => linear::linear_bwd_weight(ctx, op),
        Op::LoraFwd(op) => lora::lora_fwd(ctx, op),
        Op::LoraBwdHidden(op) => lora::lora_bwd_hidden(ctx, op),
        Op::LoraBwdWeight(op) => lora::lora_bwd_weight(ctx, op),
        Op::LoraBwdInput(op) => lora::lora_bwd_input(ctx, op),
        Op::ActFwd(op) => elementwise::act_fwd(ctx, op),
        Op::ActBwd(op) => elementwise::act_bwd(ctx, op),
        Op::SwigluFwd(op) => elementwise::swiglu_fwd(ctx, op),
        Op::SwigluBwd(op) => elementwise::swiglu_bwd(ctx, op),
        Op::Add(op) => elementwise::add(ctx, op),
        Op::QkNormFwd(op) => qk_norm::qk_norm_fwd(ctx, op),
        Op::QkNormBwd(op) => qk_norm::qk_norm_bwd(ctx, op),
        Op::Rope(op) => rope::rope(ctx, op),
        Op::AttentionFwd(op) => attention::attention_fwd(ctx, op),
        Op::AttentionBwd(op) => attention::attention_bwd(ctx, op),
        Op::AttentionCached(op) => attention::attention_cached(ctx, op),
        Op::Dropout(op) => elementwise::dropout(ctx, op),
        Op::AttentionDropoutFwd(op) => attention::attention_dropout_fwd(ctx, op),
        Op::AttentionDropoutBwd(op) => attention::attention_dropout_bwd(ctx, op),
        Op::RouterFwd(op) => router::router_fwd(ctx, op),
        Op::RouterBwd(op) => router::router_bwd(ctx, op),
        Op::RouterLoad(op) => router::router_load(ctx, op),
        Op::RouteSort(op) => routing::route_sort(ctx, op),
        Op::Permute(op) => routing::permute(ctx, op),
        Op::PermuteBwd(op) => routing::permute_bwd(ctx, op),
        Op::Combine(op) => routing::combine(ctx, op),
        Op::CombineBwd(op) => routing::combine_bwd(ctx, op),
        Op::GroupedLinearFwd(op) => grouped::grouped_linear_fwd(ctx, op),
        Op::GroupedLinearBwdInput(op) => grouped::grouped_linear_bwd_input(ctx, op, None),
        Op::GroupedLinearBwdWeight(op) => grouped::grouped_linear_bwd_weight(ctx, op),
        Op::GroupedLoraFwd(op) => grouped_lora::grouped_lora_fwd(ctx, op),
        Op::GroupedLoraBwdHidden(op) => grouped_lora::grouped_lora_bwd_hidden(ctx, op),
        Op::GroupedLoraBwdWeight(op) => grouped_lora::grouped_lora_bwd_weight(ctx, op),
        Op::GroupedLoraBwdInput(op) => grouped_lora::grouped_lora_bwd_input(ctx, op),
        Op::CrossEntropy(op) => loss::cross_entropy(ctx, op),
        Op::CrossEntropyBwd(op) => loss::cross_entropy_bwd(ctx, op),
        Op::Argmax(op) => loss::argmax(ctx, op),
        Op::LossMean(op) => loss::loss_mean(ctx, op),
        Op::Preference(op) => preference::preference(ctx, op),
        Op::GradNorm(op) => optimizer::grad_norm(ctx, op),
        Op::AdamW(op) => optimizer::adamw(ctx, op),
        Op::MuonMomentum(op) => muon::muon_momentum(ctx, op),
        Op::Matmul(op) => matmul::matmul(ctx, op),
        Op::MuonUpdate(op) => muon::muon_update(ctx, op),
        Op::Amax(op) => fp8::amax(ctx, op),
        Op::Quantize(op) => fp8::quantize(ctx, op),
        Op::ScaleUpdate(op) => fp8::scale_update(ctx, op),
        Op::MatmulFp8(op) => fp8::matmul_fp8(ctx, op),
        Op::GroupedFp8(op) => grouped::grouped_fp8(ctx, op),
        Op::GroupedFp8BwdWeight(op) => grouped::grouped_fp8_bwd_weight(ctx, op),
        Op::Fill(op) => memory::fill(ctx, op),
        Op::CopySlot(op) => memory::copy(ctx, op),
        Op::Exchange(op) => collective::exchange(ctx, op),
        Op::TreeSum(op) => collective::tree_sum(ctx, op),
        Op::AllGather(op) => collective::all_gather(ctx, op),
    }
}
