//! Softmax cross-entropy, the mean, and the most likely token.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::device::DeviceInfo;
use crate::kernels::Spec;
use ironhorse_core::op::{Argmax, CrossEntropy, CrossEntropyBwd, LossMean, Op};
use ironhorse_core::{DType, Slot};

/// Shared memory that `cross_entropy_shared` needs beside the row: at most `struct Shared` of loss/cross_entropy.cu.
const TOTALS: usize = 656;
/// Blocks that may hold a row together; 8 is the largest cluster that every device with clusters runs.
const CLUSTERS: [u32; 4] = [1, 2, 4, 8];

fn spec(dtype: DType, cluster: u32) -> Result<Spec> {
    let spec = Spec::act("loss/cross_entropy.cu", dtype)?;
    Ok(if cluster > 1 { spec.define("CLUSTER", cluster) } else { spec })
}

/// How `cross_entropy_shared` runs over rows of one size.
#[derive(Debug, PartialEq, Eq)]
struct Stretches {
    /// Blocks that share a row.
    cluster: u32,
    threads: u32,
    /// Bytes of a row in each block.
    bytes: usize,
}

impl Stretches {
    /// The fewest blocks whose shared memory holds a row of `bytes`, of which `used` are logits.
    fn new(info: &DeviceInfo, bytes: usize, used: usize) -> Option<Self> {
        if !bytes.is_multiple_of(16) {
            return None;
        }
        let vectors = used.div_ceil(16);
        let may = |cluster: &u32| *cluster == 1 || info.has_clusters();
        let stretches = CLUSTERS.into_iter().filter(may).map(|cluster| {
            let vectors = vectors.div_ceil(cluster as usize);
            // two blocks run side by side where rows are short, one where they fill the shared memory
            let most = if cluster > 1 { 32 } else { 24 };
            Self { cluster, threads: 32 * warps(vectors, most) as u32, bytes: vectors * 16 }
        });
        stretches.into_iter().find(|stretches| stretches.bytes + TOTALS <= info.shared_per_block)
    }
}

/// The kernels that keep rows in shared memory: with the gradient in place of the logits, and without.
const WITH_GRADIENT: &str = "cross_entropy_shared";
const SUMS: &str = "cross_entropy_sums";

pub(crate) fn cross_entropy(cx: &mut Lower<'_>, op: &CrossEntropy) -> Result<()> {
    let (rows, padded) = (op.targets.numel(), op.logits.shape.cols());
    if rows == 0 {
        return Ok(());
    }
    let args = arguments(cx, op)?;
    let walks = match op.grad {
        true => walk(cx, op, WITH_GRADIENT, args.clone())?,
        false => walk(cx, op, SUMS, args.clone().ptr(0))?,
    };
    if walks {
        return Ok(());
    }
    let vectors = (padded * op.logits.dtype.size()).is_multiple_of(16);
    let threads = op.vocab.div_ceil(32).clamp(1, 32) as u32 * 32;
    let args = args.u32(op.grad.into()).u32(vectors.into());
    cx.launch(&spec(op.logits.dtype, 1)?, "cross_entropy_any", Grid::linear(rows, threads), args)
}

/// What all kernels of loss/cross_entropy.cu begin with.
fn arguments(cx: &Lower<'_>, op: &CrossEntropy) -> Result<Args> {
    let args = cx.pointers(&[op.losses, op.logits, op.targets])?.ptr(cx.scalars).ptr(cx.fault);
    Ok(args.u32s([op.targets.numel(), op.vocab, op.logits.shape.cols()]))
}

/// Launches a kernel that keeps rows in shared memory; `false` if they do not fit.
fn walk(cx: &mut Lower<'_>, op: &CrossEntropy, kernel: &'static str, args: Args) -> Result<bool> {
    let (rows, padded) = (op.targets.numel(), op.logits.shape.cols());
    let (size, dtype) = (op.logits.dtype.size(), op.logits.dtype);
    let Some(Stretches { cluster, threads, bytes }) =
        Stretches::new(&cx.device.info, padded * size, op.vocab * size)
    else {
        return Ok(false);
    };
    let function = cx.kernel(&spec(dtype, cluster)?, kernel)?;
    let resident = match cluster {
        1 => function.resident(threads, bytes)?,
        _ => function.resident_clusters(cluster, threads, bytes)?.max(1) as usize,
    };
    let clusters = rows.min(resident);
    let grid = Grid::linear(clusters * cluster as usize, threads).shared(bytes);
    cx.launch_function(kernel, function, grid, args);
    Ok(true)
}

/// The loss whose gradient `inp` is, if its launch is the last one and its kernel is one that [`leave_sums`] can replace.
pub(super) fn gradient_ahead(cx: &Lower<'_>, inp: Slot) -> Option<CrossEntropy> {
    let index = cx.op.checked_sub(1)?;
    cx.out.last().filter(|last| last.op == index && last.name == WITH_GRADIENT)?;
    match cx.program.nodes()[index].op {
        Op::CrossEntropy(op) if op.logits == inp && inp.dtype == DType::BF16 => Some(op),
        _ => None,
    }
}

/// Replaces the last launch, that of a loss with its gradient, by one that leaves the logits as they are. Returns the address of what
/// loss/fp8.cu computes the gradient from.
pub(super) fn leave_sums(cx: &mut Lower<'_>, op: &CrossEntropy) -> Result<u64> {
    // `struct Scales` of loss/gradient.cuh for each row; longer than the op, so that scratch memory will not do
    let of_rows = cx.upload(&vec![0; 16 * op.targets.numel()])?;
    let replaced = cx.out.pop();
    let args = arguments(cx, op)?.ptr(of_rows);
    walk(cx, op, SUMS, args)?;
    if let (Some(new), Some(old)) = (cx.out.last_mut(), replaced) {
        (new.op, new.first) = (old.op, old.first);
    }
    Ok(of_rows)
}

/// Warps of a block for a row of this many vectors: those that leave the fewest lanes idle in the last round.
fn warps(vectors: usize, most: usize) -> usize {
    let all = vectors.div_ceil(32).max(1);
    if all <= most {
        return all;
    }
    let idle = |warps: &usize| all.next_multiple_of(*warps) - all;
    (most / 2..=most).rev().min_by_key(idle).unwrap_or(most)
}

pub(crate) fn cross_entropy_bwd(cx: &mut Lower<'_>, op: &CrossEntropyBwd) -> Result<()> {
    let (rows, padded) = (op.targets.numel(), op.logits.shape.cols());
    if rows == 0 {
        return Ok(());
    }
    let (dtype, size) = (op.logits.dtype, op.logits.dtype.size());
    let vectors = (padded * size).is_multiple_of(16);
    let args = cx.pointers(&[op.logits, op.targets, op.losses, op.weights])?.ptr(cx.scalars).ptr(cx.fault);
    let args = args.u32s([op.vocab, padded]).u32(vectors.into());
    let threads = op.vocab.div_ceil(16 / size).div_ceil(32).clamp(1, 16) as u32 * 32;
    cx.launch(&bwd_spec(dtype)?, "cross_entropy_bwd", Grid::linear(rows, threads), args)
}

fn bwd_spec(dtype: DType) -> Result<Spec> {
    Spec::act("loss/cross_entropy_bwd.cu", dtype)
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
    let mut specs: Vec<_> =
        CLUSTERS.iter().flat_map(|&cluster| Spec::all_types(|dtype| spec(dtype, cluster))).collect();
    specs.extend(Spec::all_types(argmax_spec));
    specs.extend(Spec::all_types(bwd_spec));
    specs.push(Spec::new("loss/mean.cu"));
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_their_rows() {
        let warps = |vectors| super::warps(vectors, 24);
        assert_eq!(warps(0), 1);
        assert_eq!(warps(33), 2);
        assert_eq!(warps(24 * 32), 24);
        assert_eq!(warps(6283), 22, "GPT-2 in bf16: 197 warps in 9 rounds");
        const { assert!(2 * 50304 + TOTALS <= 99 << 10, "the row of GPT-2 in bf16 on the smallest of our GPUs") };
        assert!((1..20_000).all(|vectors| (1..=24).contains(&warps(vectors))));
    }

    #[test]
    fn long_rows_are_shared_by_the_blocks_of_a_cluster() {
        let hopper = DeviceInfo {
            index: 0,
            name: "H200".into(),
            compute: (9, 0),
            sms: 132,
            memory: 0,
            l2: 0,
            shared_per_block: 227 << 10,
        };
        let cluster = |info: &DeviceInfo, bytes| Stretches::new(info, bytes, bytes).map(|s| s.cluster);
        let rows = [2 * 50304, 2 * 151_936, 4 * 151_936, 2 * 262_144, 4 * 262_144];
        assert_eq!(rows.map(|bytes| cluster(&hopper, bytes)), [1, 2, 4, 4, 8].map(Some));
        assert_eq!(cluster(&hopper, 2 * 151_936 + 2), None, "a row that is no whole number of vectors");
        assert_eq!(cluster(&hopper, 8 << 20), None);
        let ampere = DeviceInfo { compute: (8, 0), shared_per_block: 163 << 10, ..hopper };
        assert_eq!(rows.map(|bytes| cluster(&ampere, bytes)), [Some(1), None, None, None, None]);
    }
}
