//! Moving tokens to their experts and back.

use super::lower::Lower;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Combine, CombineBwd, Permute, PermuteBwd, RouteSort};
use ironhorse_core::{DType, Slot};

/// `WARPS` of experts/permute.cu, a row each.
const WARPS: usize = 8;
/// Shared memory that the counters of a block of `route_scatter` may take.
const COUNTERS: usize = 48 << 10;
/// About the most blocks of a sort: the scan over their counts is one block's work.
const MOST_BLOCKS: usize = 128;

const SORT: &str = "experts/sort.cu";

/// How a sort is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sort {
    threads: usize,
    /// How many times a block takes as many routes as it has threads.
    rounds: usize,
    blocks: usize,
    /// Bytes of shared memory of `route_scatter`.
    shared: usize,
}

impl Sort {
    fn new(routes: usize, experts: usize) -> Result<Self> {
        // A counter of each expert for the block, and one for each of its warps.
        let row = experts * size_of::<u32>();
        let warps = (COUNTERS / row.max(1)).saturating_sub(1).min(32);
        if warps == 0 {
            return Err(Error::Unsupported(format!("route_sort: {experts} experts, expected at most 6144")));
        }
        let threads = 32 * warps;
        let rounds = routes.div_ceil(threads * MOST_BLOCKS).max(1);
        Ok(Self { threads, rounds, blocks: routes.div_ceil(threads * rounds), shared: (1 + warps) * row })
    }
}

pub(crate) fn route_sort(cx: &mut Lower<'_>, op: &RouteSort) -> Result<()> {
    let (routes, experts) = (op.experts.numel(), op.offsets.numel() - 1);
    let offsets = cx.ptr(op.offsets)?;
    if routes == 0 {
        cx.zero(offsets, op.offsets.bytes());
        return Ok(());
    }
    let sort = Sort::new(routes, experts)?;
    let (from, spec) = (cx.ptr(op.experts)?, Spec::new(SORT));
    let counts = cx.scratch(sort.blocks * experts * size_of::<u32>())?;
    let grid = Grid::linear(sort.blocks, sort.threads as u32);
    let sizes = |args: Args| args.u32s([routes, experts, sort.rounds]);

    let args = sizes(Args::new().ptr(counts).ptr(from).ptr(cx.fault));
    cx.launch(&spec, "route_count", grid.shared(experts * size_of::<u32>()), args)?;
    let args = Args::new().ptr(counts).u32((sort.blocks * experts) as u32);
    cx.launch(&spec, "route_scan", Grid::linear(1, 1024), args)?;
    let args = cx.pointers(&[op.order, op.places])?.ptr(offsets).ptr(from).ptr(counts);
    cx.launch(&spec, "route_scatter", grid.shared(sort.shared), sizes(args))
}

fn spec(act: DType, vectors: bool) -> Result<Spec> {
    Spec::act_vectors("experts/permute.cu", act, vectors)
}

/// The file for these rows: with vectors if all rows start at whole vectors.
fn rows_spec(cx: &Lower<'_>, rows: &[Slot]) -> Result<Spec> {
    let whole = rows.iter().all(|slot| slot.shape.cols().is_multiple_of(16 / slot.dtype.size()));
    spec(rows[0].dtype, whole && cx.are_aligned(rows)?)
}

/// A warp for each row.
fn per_row(rows: usize) -> Grid {
    Grid::linear(rows.div_ceil(WARPS), 32 * WARPS as u32)
}

pub(crate) fn permute(cx: &mut Lower<'_>, op: &Permute) -> Result<()> {
    let (routes, width) = (op.order.numel(), op.inp.shape.cols());
    if routes * width == 0 {
        return Ok(());
    }
    let spec = rows_spec(cx, &[op.out, op.inp])?;
    let args = cx.pointers(&[op.out, op.inp, op.order])?.ptr(cx.fault);
    let args = args.u32s([routes, routes / op.inp.shape.rows().max(1)]).u64(width as u64);
    cx.launch(&spec, "permute", per_row(routes), args)
}

pub(crate) fn permute_bwd(cx: &mut Lower<'_>, op: &PermuteBwd) -> Result<()> {
    let (tokens, k, width) = (op.places.shape.rows(), op.places.shape.cols(), op.d_inp.shape.cols());
    if tokens * width == 0 {
        return Ok(());
    }
    let spec = rows_spec(cx, &[op.d_inp, op.d_out])?;
    let args = cx.pointers(&[op.d_inp, op.d_out, op.places])?;
    let args = args.ptr(cx.fault).u32s([tokens, k]).u64(width as u64).u32(cx.adds(op.accum).into());
    cx.launch(&spec, "permute_bwd", per_row(tokens), args)
}

pub(crate) fn combine(cx: &mut Lower<'_>, op: &Combine) -> Result<()> {
    let (tokens, k, width) = (op.places.shape.rows(), op.places.shape.cols(), op.out.shape.cols());
    if tokens * width == 0 {
        return Ok(());
    }
    let spec = rows_spec(cx, &[op.out, op.rows])?;
    let args = cx.pointers(&[op.out, op.rows, op.places, op.weights])?;
    let args = args.ptr(cx.fault).u32s([tokens, k]).u64(width as u64);
    cx.launch(&spec, "combine", per_row(tokens), args)
}

pub(crate) fn combine_bwd(cx: &mut Lower<'_>, op: &CombineBwd) -> Result<()> {
    let (tokens, k, width) = (op.places.shape.rows(), op.places.shape.cols(), op.d_out.shape.cols());
    if tokens * k == 0 {
        return Ok(());
    }
    let spec = rows_spec(cx, &[op.d_rows, op.d_out, op.rows])?;
    let args = cx.pointers(&[op.d_rows, op.d_weights, op.d_out, op.rows, op.places, op.weights])?;
    let args = args.ptr(cx.fault).u32s([tokens, k]).u64(width as u64);
    cx.launch(&spec, "combine_bwd", per_row(tokens), args)
}

pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Spec::all_vectors(spec);
    specs.push(Spec::new(SORT));
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_cover_all_routes_within_shared_memory() {
        let sort = Sort::new(65_536, 16).unwrap();
        assert_eq!(sort, Sort { threads: 1024, rounds: 1, blocks: 64, shared: 33 * 64 });
        for (routes, experts) in [(1, 1), (4, 16), (5000, 300), (1_000_000, 256), (3_000_001, 6000)] {
            let sort = Sort::new(routes, experts).unwrap();
            assert!(sort.blocks <= MOST_BLOCKS && sort.shared <= COUNTERS && sort.threads <= 1024);
            let block = sort.threads * sort.rounds;
            assert!(sort.blocks * block >= routes && (sort.blocks - 1) * block < routes);
        }
        assert!(Sort::new(8, 10_000).is_err());
    }
}
