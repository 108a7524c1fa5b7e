//! SwiGLU and GeGLU.

use super::grouped_swiglu_bwd;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{Gate, SwigluBwd, SwigluFwd};
use ironhorse_core::{DType, Slot};

/// Threads of a block.
const THREADS: u32 = 256;

fn spec(gate: Gate, act: DType, vectors: bool) -> Result<Spec> {
    let spec = Spec::act_vectors("elementwise/swiglu.cu", act, vectors)?;
    Ok(match gate {
        Gate::Silu => spec,
        Gate::Gelu => spec.define("GELU_GATE", 1),
    })
}

/// A kernel of the file with its slots; one that is not there has the address 0.
struct Call<'a> {
    name: &'static str,
    gate: Gate,
    slots: &'a [Option<Slot>],
    /// The one of the slots with rows of F.
    narrow: Slot,
}

pub(crate) fn swiglu_fwd(cx: &mut Lower<'_>, op: &SwigluFwd) -> Result<()> {
    let slots = &[Some(op.out), Some(op.inp)];
    elementwise(cx, &Call { name: "swiglu_fwd", gate: op.gate, slots, narrow: op.out })
}

pub(crate) fn swiglu_bwd(cx: &mut Lower<'_>, op: &SwigluBwd) -> Result<()> {
    if grouped_swiglu_bwd::with_product(cx, op)? {
        return Ok(());
    }
    let slots = &[Some(op.d_inp), op.act, Some(op.d_out), Some(op.inp)];
    elementwise(cx, &Call { name: "swiglu_bwd", gate: op.gate, slots, narrow: op.d_out })
}

fn elementwise(cx: &mut Lower<'_>, call: &Call<'_>) -> Result<()> {
    let &Call { name, gate, slots, narrow } = call;
    if narrow.numel() == 0 {
        return Ok(());
    }
    let addresses = slots.iter().map(|&slot| cx.optional(slot)).collect::<Result<Vec<_>>>()?;
    let (width, whole) = (narrow.shape.cols(), 16 / narrow.dtype.size());
    let vectors = width.is_multiple_of(whole) && addresses.iter().all(|at| at.is_multiple_of(16));
    let count = narrow.numel() / if vectors { whole } else { 1 };
    let args = addresses.into_iter().fold(Args::new(), Args::ptr).u64s([count, width]);
    let grid = Grid::linear(count.div_ceil(THREADS as usize), THREADS);
    cx.launch(&spec(gate, narrow.dtype, vectors)?, name, grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    let of = |gate| Spec::all_vectors(move |act, vectors| spec(gate, act, vectors));
    Gate::ALL.into_iter().flat_map(of).collect()
}
