//! Activations, addition and dropout.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{ActBwd, ActFwd, Add, Dropout, OpSpec};
use ironhorse_core::{DType, DropSite, Slot};

/// Threads of a block.
const THREADS: u32 = 256;

/// The grid of a kernel in which a thread takes 16 bytes.
pub(super) fn per_vector(slot: &Slot) -> Grid {
    Grid::linear(slot.bytes().div_ceil(16 * THREADS as usize), THREADS)
}

fn spec(dtype: DType) -> Result<Spec> {
    Spec::act("elementwise/activation.cu", dtype)
}

/// The kernel has the name of the op, which is that of its activation.
pub(crate) fn act_fwd(cx: &mut Lower<'_>, op: &ActFwd) -> Result<()> {
    elementwise(cx, op.name(), op.out, &[op.inp])
}

pub(crate) fn act_bwd(cx: &mut Lower<'_>, op: &ActBwd) -> Result<()> {
    elementwise(cx, op.name(), op.d_inp, &[op.d_out, op.inp])
}

pub(crate) fn add(cx: &mut Lower<'_>, op: &Add) -> Result<()> {
    elementwise(cx, "add", op.out, &[op.a, op.b])
}

fn elementwise(cx: &mut Lower<'_>, name: &'static str, out: Slot, inputs: &[Slot]) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    let args = cx.pointers(&[&[out], inputs].concat())?;
    cx.launch(&spec(out.dtype)?, name, per_vector(&out), args.u64(out.numel() as u64))
}

/// Columns that a thread takes, if rows are multiples of this.
const DROP_BLOCK: usize = 16;

fn drop_spec(dtype: DType, vectors: bool) -> Result<Spec> {
    Spec::act_vectors("elementwise/dropout.cu", dtype, vectors)
}

/// The arguments from which kernels make a mask (common/dropout.cuh).
pub(super) fn drop_args(args: Args, scalars: u64, drop: DropSite) -> Args {
    args.ptr(scalars).u32(drop.site).u32(drop.rate.threshold()).f32(drop.rate.scale())
}

pub(crate) fn dropout(cx: &mut Lower<'_>, op: &Dropout) -> Result<()> {
    let (rows, cols) = (op.out.shape.rows(), op.out.shape.cols());
    if op.out.numel() == 0 {
        return Ok(());
    }
    let vectors = cols.is_multiple_of(DROP_BLOCK);
    let threads = op.out.numel() / if vectors { DROP_BLOCK } else { 1 };
    let args = drop_args(cx.pointers(&[op.out, op.inp])?, cx.scalars, op.drop);
    let args = args.u64(rows as u64).u32(cols as u32);
    let grid = Grid::linear(threads.div_ceil(THREADS as usize), THREADS);
    cx.launch(&drop_spec(op.out.dtype, vectors)?, "dropout", grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    [Spec::all_types(spec), Spec::all_vectors(drop_spec)].concat()
}
