//! SwiGLU.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{SwigluBwd, SwigluFwd};
use ironhorse_core::{DType, Slot};

/// Threads of a block.
const THREADS: u32 = 256;

fn spec(act: DType, vectors: bool) -> Result<Spec> {
    Spec::act_vectors("elementwise/swiglu.cu", act, vectors)
}

pub(crate) fn swiglu_fwd(cx: &mut Lower<'_>, op: &SwigluFwd) -> Result<()> {
    elementwise(cx, "swiglu_fwd", &[Some(op.out), Some(op.inp)], op.out)
}

pub(crate) fn swiglu_bwd(cx: &mut Lower<'_>, op: &SwigluBwd) -> Result<()> {
    elementwise(cx, "swiglu_bwd", &[Some(op.d_inp), op.act, Some(op.d_out), Some(op.inp)], op.d_out)
}

/// `narrow` is the one of the slots with rows of F. A slot that is not there has the address 0.
fn elementwise(cx: &mut Lower<'_>, name: &'static str, slots: &[Option<Slot>], narrow: Slot) -> Result<()> {
    if narrow.numel() == 0 {
        return Ok(());
    }
    let addresses = slots.iter().map(|&slot| cx.optional(slot)).collect::<Result<Vec<_>>>()?;
    let (width, whole) = (narrow.shape.cols(), 16 / narrow.dtype.size());
    let vectors = width.is_multiple_of(whole) && addresses.iter().all(|at| at.is_multiple_of(16));
    let count = narrow.numel() / if vectors { whole } else { 1 };
    let args = addresses.into_iter().fold(Args::new(), Args::ptr).u64s([count, width]);
    let grid = Grid::linear(count.div_ceil(THREADS as usize), THREADS);
    cx.launch(&spec(narrow.dtype, vectors)?, name, grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_vectors(spec)
}
