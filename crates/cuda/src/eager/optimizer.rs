//! AdamW and the clipping of gradients, f32.

use super::layout::{THREADS, aligned, pointers};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::eager::{AdamWStep, Array, GradClip, ZeroGrad};

const FILE: &str = "optimizer/eager.cu";
/// Elements of a thread: `N` of optimizer/eager.cu.
const EACH: usize = 4;
/// Blocks that compute partial sums of a norm: the same on every device, so that sums are too.
const PARTS: usize = 1024;
/// Threads of those blocks: `NORM_THREADS` of optimizer/eager.cu.
const NORM_THREADS: u32 = 512;

fn grid(n: usize) -> Grid {
    Grid::linear(n.div_ceil(THREADS * EACH), THREADS as u32)
}

impl Launch for AdamWStep {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        if self.n == 0 {
            return Ok(());
        }
        let (beta1, beta2, lr) = (f64::from(self.beta1), f64::from(self.beta2), f64::from(self.lr));
        let correction = |beta: f64| 1.0 - beta.powi(self.step);
        let numbers = [
            1.0 - lr * f64::from(self.weight_decay),
            beta2,
            1.0 - beta1,
            1.0 - beta2,
            lr / correction(beta1),
            1.0 / correction(beta2).sqrt(),
            f64::from(self.eps),
        ];
        let arrays = [self.param.cast_const(), self.grad, self.m, self.v].map(Array::f32);
        let args = pointers(arrays).u64(self.n as u64);
        let args = numbers.into_iter().fold(args, |args, number| args.f32(number as f32));
        at.launch(&Spec::new(FILE).kernel("adamw_step"), grid(self.n), args.u32(aligned(&arrays).into()))
    }
}

impl Launch for ZeroGrad {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        at.fill_zero([Array::f32_mut(self.grad)], self.n)
    }
}

/// The factor is clip / (total_norm + 1e-6); a norm that is NaN makes all of the gradient NaN.
impl Launch for GradClip {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { grad, total_norm, clip, n } = *self;
        let kernel = |name| Spec::new(FILE).kernel(name);
        let blocks = n.div_ceil(NORM_THREADS as usize * EACH).min(PARTS);
        let parts = at.scratch(blocks * size_of::<f64>())?;
        let vectors = aligned(&[Array::f32_mut(grad)]).into();
        if blocks > 0 {
            let args = Args::new().ptr(parts).at(grad).u64(n as u64).u32(vectors);
            at.launch(&kernel("clip_parts"), Grid::linear(blocks, NORM_THREADS), args)?;
        }
        let args = Args::new().at(total_norm).ptr(parts).u32(blocks as u32);
        at.launch(&kernel("clip_total"), Grid::linear(1, NORM_THREADS), args)?;
        if n == 0 {
            return Ok(());
        }
        let args = Args::new().at(grad).at(total_norm).f32(clip).u64(n as u64).u32(vectors);
        at.launch(&kernel("clip_scale"), grid(n), args)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Spec::new(FILE)]
}
