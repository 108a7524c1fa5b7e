//! The experts that a router chooses, and its load-balancing loss, f32.

use super::layout::pointers;
use super::rows::{Team, empty};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::{Kernel, Spec};
use ironhorse_core::eager::{AuxLoss, Float, SoftmaxTopk};

fn kernel(name: &'static str) -> Kernel {
    Spec::of("experts/eager_router.cu", Float::F32).kernel(name)
}

/// NaN comes before all numbers.
impl Launch for SoftmaxTopk {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { x, weights, indices, rows, k } = *self;
        if empty(rows) || k == 0 {
            return Ok(());
        }
        let team = Team::streamed(rows.cols, 8, 256);
        let args = pointers([weights]).at(indices).arrays([x]);
        let args = args.u64s([rows.rows, rows.cols, k]).u32(team.lanes);
        at.launch(&kernel("softmax_topk"), team.grid(rows.rows), args)
    }
}

/// An expert that is out of range is not counted; one that a token chose twice counts once.
impl Launch for AuxLoss {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { probs, chosen, loss, fractions, means, tokens, experts, k, alpha } = *self;
        if tokens == 0 || experts == 0 {
            return Ok(());
        }
        let chunk = tokens.div_ceil(256).max(64);
        let chunks = tokens.div_ceil(chunk);
        let partials = at.scratch(chunks * 2 * experts * size_of::<f64>())?;
        let args = Args::new().ptr(partials).arrays([probs]).at(chosen).u64s([tokens, experts, k, chunk]);
        let grid = Grid::plane(experts.div_ceil(32), chunks, 256);
        at.launch(&kernel("aux_partials"), grid, args)?;
        let args = pointers([loss, fractions, means]).ptr(partials);
        let args = args.u64s([tokens, experts, chunks]).f64(alpha);
        at.launch(&kernel("aux_loss"), Grid::linear(1, 1024), args)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![kernel("").spec]
}
