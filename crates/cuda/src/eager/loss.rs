//! Cross entropy.

use super::layout::{lane_width, pointers};
use super::rows::{Team, congruent, empty};
use super::softmax::Form;
use super::{Launch, OnStream};
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::eager::{
    Array, CrossEntropy, CrossEntropyBwd, CrossEntropyMean, Float, LogProbs, LogProbsBwd, Rows, Targets,
};

const FILE: &str = "loss/eager_cross_entropy.cu";
/// A number out of the range of 32-bit targets: with it no row is ignored.
const NEVER: i64 = i64::MIN;

/// The numbers of `any_at` in loss/eager_cross_entropy.cu.
fn number_of(float: Float) -> u32 {
    match float {
        Float::F64 => 0,
        Float::F32 => 1,
        Float::BF16 => 2,
        Float::F16 => 3,
    }
}

/// The address, and whether the targets are 64-bit.
fn targets_of(targets: Targets) -> (u64, u32) {
    match targets {
        Targets::I32(at) => (at.addr() as u64, 0),
        Targets::I64(at) => (at.addr() as u64, 1),
    }
}

impl Launch for CrossEntropy {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { logits, losses, lse, rows, ignore, .. } = *self;
        if empty(rows) {
            return at.fill_nan([losses, lse], rows.rows);
        }
        // Four vectors at a time to a thread; a long row has several rounds, for which 256 threads leave more blocks to work
        // beside each other, unless there are too few rows for that.
        let few = rows.rows < 4 * at.info().sms as usize;
        let team = Team::streamed(rows.cols, 4 * lane_width(logits.float), if few { 512 } else { 256 });
        let (targets, wide) = targets_of(self.targets);
        let args = pointers([losses, lse, logits]).ptr(targets).u64s([rows.rows, rows.cols]);
        let args = args.u64(ignore as u64).u32(wide).u32(team.lanes).u32(1);
        at.launch(&Spec::of(FILE, logits.float).kernel("cross_entropy"), team.grid(rows.rows), args)
    }
}

/// `loss` may be of any type.
impl Launch for CrossEntropyMean {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { losses, loss, inv_count, rows, ignore, mean, .. } = *self;
        let (targets, wide) = targets_of(self.targets);
        let args = pointers([loss, inv_count, losses]).ptr(targets).u64(rows as u64).u64(ignore as u64);
        let args = args.u32(number_of(loss.float)).u32(wide).u32(mean.into());
        at.launch(&Spec::of(FILE, losses.float).kernel("cross_entropy_mean"), Grid::linear(1, 1024), args)
    }
}

/// `d_loss` may be of any type; without `inv_count` its factor is 1.
impl Launch for CrossEntropyBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        backward(at, self, 1.0)
    }
}

/// The gradient times `scale`, also for [`LogProbsBwd`], which has no `d_loss` and no `lse`.
fn backward(at: &OnStream<'_>, op: &CrossEntropyBwd, scale: f64) -> Result<()> {
    let CrossEntropyBwd { d_loss, logits, lse, inv_count, d_logits, rows, ignore, per_row, .. } = *op;
    if empty(rows) || !d_logits.is_some() {
        return Ok(());
    }
    let batch = 4 * lane_width(logits.float);
    let team = Team::streamed(rows.cols, batch, 256);
    let mut grid = team.grid(rows.rows);
    // A block has one batch to a thread; blockIdx.y counts the parts of a row.
    grid.grid[1] = rows.cols.div_ceil(batch * team.lanes as usize).min(65535) as u32;
    let (targets, wide) = targets_of(op.targets);
    let vector = congruent(&[logits, d_logits]);
    let args = pointers([d_logits, d_loss, logits]).ptr(targets).arrays([lse, inv_count]);
    let args = args.u64s([rows.rows, rows.cols]).u64(ignore as u64).f64(scale);
    let args = args.u32(number_of(d_loss.float)).u32(per_row.into()).u32(wide);
    let args = args.u32(team.lanes).u32(vector.into());
    at.launch(&Spec::of(FILE, logits.float).kernel("cross_entropy_bwd"), grid, args)
}

impl Launch for LogProbs {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { logits, targets, loss, log_probs, rows: Rows { rows, .. } } = *self;
        if rows == 0 {
            return Ok(());
        }
        let acc = logits.float.acc();
        let scratch = at.scratch(rows * acc.size())?;
        let args = pointers([log_probs]).ptr(scratch).arrays([logits]).at(targets);
        Form::Log.launch(at, &[logits, log_probs], self.rows, args)?;
        let losses = Array { at: std::ptr::with_exposed_provenance_mut(scratch as usize), float: acc };
        let (targets, inv_count) = (Targets::I32(targets), Array::none(acc));
        let mean = CrossEntropyMean { losses, targets, loss, inv_count, rows, ignore: NEVER, mean: true };
        // SAFETY: the losses are scratch of this call; the caller of `launch` guarantees the rest.
        unsafe { mean.launch(at) }
    }
}

impl Launch for LogProbsBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { log_probs, targets, d_logits, rows, scale } = *self;
        let none = Array::none(log_probs.float.acc());
        let op = CrossEntropyBwd {
            d_loss: none,
            logits: log_probs,
            lse: none,
            inv_count: none,
            targets: Targets::I32(targets),
            d_logits,
            rows,
            ignore: NEVER,
            per_row: false,
        };
        backward(at, &op, scale)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Spec::of_all(FILE)
}
