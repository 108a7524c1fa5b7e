//! The loss of pairs of answers (DPO).

use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::op::Preference;

/// Threads of a block, whose warps have a pair each.
const THREADS: u32 = 256;
/// Bytes of what a pair leaves for the sums: `PARTS` of loss/preference.cu in f64.
const PARTS_BYTES: usize = 3 * 8;

fn spec() -> Spec {
    Spec::new("loss/preference.cu")
}

pub(crate) fn preference(cx: &mut Lower<'_>, op: &Preference) -> Result<()> {
    let (count, rows) = (op.pairs.shape.rows(), op.losses.numel());
    let parts = cx.scratch((count * PARTS_BYTES).max(1))?;
    if let Some(weights) = op.weights.filter(|weights| weights.numel() > 0) {
        let at = cx.ptr(weights)?;
        cx.zero(at, weights.bytes());
    }
    if count > 0 {
        let args = cx.optional_pointers(&[Some(op.rewards), op.weights])?.ptr(parts);
        let args = cx.append(args, &[Some(op.losses), Some(op.reference), Some(op.pairs)])?;
        let args = args.ptr(cx.fault).u32s([count, rows]).f32(op.beta);
        let grid = Grid::linear(count.div_ceil(THREADS as usize / 32), THREADS);
        cx.launch(&spec(), "preference_pairs", grid, args)?;
    }
    let args = cx.pointers(&[op.loss, op.means])?.ptr(parts).ptr(cx.scalars);
    let args = args.u32(count as u32).u32(cx.adds(op.accum).into());
    cx.launch(&spec(), "preference_sums", Grid::linear(1, 1024), args)
}

pub(super) fn specs() -> Vec<Spec> {
    vec![spec()]
}
