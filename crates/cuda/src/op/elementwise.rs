//! Activations and addition.

use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::op::{ActBwd, ActFwd, Add, OpSpec};
use ironhorse_core::{DType, Slot};

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

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_types(spec)
}
