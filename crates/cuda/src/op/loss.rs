//! Softmax cross-entropy, the mean, and the most likely token.

use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::{Argmax, CrossEntropy, LossMean};

/// Most warps of a block of `cross_entropy_shared`.
const MOST_WARPS: usize = 24;
/// Shared memory that kernel needs beside the row: `struct Shared` of loss/cross_entropy.cu, in steps of 16.
const TOTALS: usize = 528;

fn spec(dtype: DType) -> Result<Spec> {
    Spec::act("loss/cross_entropy.cu", dtype)
}

pub(crate) fn cross_entropy(cx: &mut Lower<'_>, op: &CrossEntropy) -> Result<()> {
    let (rows, padded) = (op.targets.numel(), op.logits.shape.cols());
    if rows == 0 {
        return Ok(());
    }
    let args = cx.pointers(&[op.losses, op.logits, op.targets])?;
    let args = args.ptr(cx.scalars).ptr(cx.fault).u32s([rows, op.vocab, padded]).u32(op.grad.into());
    let row_bytes = padded * op.logits.dtype.size();
    let spec = spec(op.logits.dtype)?;
    if row_bytes.is_multiple_of(16) && row_bytes + TOTALS <= cx.device.info.shared_per_block {
        let threads = 32 * warps((op.vocab * op.logits.dtype.size()).div_ceil(16)) as u32;
        let function = cx.kernel(&spec, "cross_entropy_shared")?;
        let resident = cx.device.info.sms * function.blocks_per_sm(threads, row_bytes)?.max(1);
        let grid = Grid::linear(rows.min(resident as usize), threads).shared(row_bytes);
        cx.launch_function("cross_entropy_shared", function, grid, args);
    } else {
        let threads = op.vocab.div_ceil(32).clamp(1, 32) as u32 * 32;
        cx.launch(&spec, "cross_entropy_any", Grid::linear(rows, threads), args)?;
    }
    Ok(())
}

/// Warps of a block for a row of this many vectors: those that leave the fewest lanes idle in the last round.
fn warps(vectors: usize) -> usize {
    let all = vectors.div_ceil(32).max(1);
    if all <= MOST_WARPS {
        return all;
    }
    let idle = |warps: &usize| all.next_multiple_of(*warps) - all;
    (MOST_WARPS / 2..=MOST_WARPS).rev().min_by_key(idle).unwrap_or(MOST_WARPS)
}

pub(crate) fn argmax(cx: &mut Lower<'_>, op: &Argmax) -> Result<()> {
    let (rows, padded) = (op.best.numel(), op.logits.shape.cols());
    if rows == 0 {
        return Ok(());
    }
    let vector = (padded * op.logits.dtype.size()).is_multiple_of(16);
    let args = cx.pointers(&[op.best, op.logits])?.u32s([op.vocab, padded]).u32(vector.into());
    let threads = op.vocab.div_ceil(16 / op.logits.dtype.size()).div_ceil(32).clamp(1, 16) as u32 * 32;
    cx.launch(&argmax_spec(op.logits.dtype)?, "argmax", Grid::linear(rows, threads), args)
}

fn argmax_spec(dtype: DType) -> Result<Spec> {
    Spec::act("loss/argmax.cu", dtype)
}

pub(crate) fn loss_mean(cx: &mut Lower<'_>, op: &LossMean) -> Result<()> {
    let args = cx.pointers(&[op.loss, op.losses])?;
    let args = args.ptr(cx.scalars).u64(op.losses.numel() as u64).u32(cx.adds(op.accum).into());
    cx.launch(&Spec::new("loss/mean.cu"), "loss_mean", Grid::linear(1, 1024), args)
}

pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Spec::all_types(spec);
    specs.extend(Spec::all_types(argmax_spec));
    specs.push(Spec::new("loss/mean.cu"));
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_their_rows() {
        assert_eq!(warps(0), 1);
        assert_eq!(warps(33), 2);
        assert_eq!(warps(24 * 32), 24);
        assert_eq!(warps(6283), 22, "GPT-2 in bf16: 197 warps in 9 rounds");
        const { assert!(2 * 50304 + TOTALS <= 99 << 10, "the row of GPT-2 in bf16 on the smallest of our GPUs") };
        assert!((1..20_000).all(|vectors| (1..=MOST_WARPS).contains(&warps(vectors))));
    }
}
