//! AdamW and the clipping of gradients, f32.

use super::gpu::{At, Kernel};
use super::layout::THREADS;
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;

const FILE: &str = "optimizer/eager.cu";
/// Elements of a thread: `N` of the kernels.
const EACH: usize = 4;
/// Blocks that make partial sums of a norm; on every device, so that sums are the same.
const PARTS: usize = 1024;
/// Threads of those: `NORM_THREADS` of the kernels.
const NORM_THREADS: u32 = 512;

/// The numbers of one AdamW step.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Number of this step, from 1.
    pub step: i32,
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new(FILE, name)
}

fn aligned(arrays: &[*const f32]) -> u32 {
    arrays.iter().all(|array| array.addr().is_multiple_of(16)).into()
}

fn grid(n: usize) -> Grid {
    Grid::linear(n.div_ceil(THREADS * EACH), THREADS as u32)
}

/// One step of PyTorch's AdamW on `param`, `m` and `v`.
///
/// # Safety
/// See [the module](super); all n elements.
pub unsafe fn adamw_step(
    at: &At<'_>,
    [param, m, v]: [*mut f32; 3],
    grad: *const f32,
    n: usize,
    s: &AdamWStep,
) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let (beta1, beta2, lr) = (f64::from(s.beta1), f64::from(s.beta2), f64::from(s.lr));
    let correction = |beta: f64| 1.0 - beta.powi(s.step);
    let mut args = Args::new();
    for array in [param.cast_const(), grad, m, v] {
        args = args.ptr(array.addr() as u64);
    }
    args = args.u64(n as u64);
    for number in [
        1.0 - lr * f64::from(s.weight_decay),
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        lr / correction(beta1),
        1.0 / correction(beta2).sqrt(),
        f64::from(s.eps),
    ] {
        args = args.f32(number as f32);
    }
    at.launch(&kernel("adamw_step"), grid(n), args.u32(aligned(&[param, grad, m, v])))
}

/// total_norm = √Σ grad²; grad is multiplied by clip / (total_norm + 1e-6) if that is below 1; a norm that is NaN makes all
/// of it NaN.
///
/// # Safety
/// See [the module](super); grad: n, total_norm: 1.
pub unsafe fn grad_clip(
    at: &At<'_>,
    grad: *mut f32,
    total_norm: *mut f32,
    clip: f32,
    n: usize,
) -> Result<()> {
    let blocks = n.div_ceil(NORM_THREADS as usize * EACH).min(PARTS);
    let parts = at.scratch(blocks * size_of::<f64>())?;
    let (address, vectors) = (grad.addr() as u64, aligned(&[grad]));
    if blocks > 0 {
        let args = Args::new().ptr(parts).ptr(address).u64(n as u64).u32(vectors);
        at.launch(&kernel("clip_parts"), Grid::linear(blocks, NORM_THREADS), args)?;
    }
    let norm = total_norm.addr() as u64;
    let args = Args::new().ptr(norm).ptr(parts).u32(blocks as u32);
    at.launch(&kernel("clip_total"), Grid::linear(1, NORM_THREADS), args)?;
    if n == 0 {
        return Ok(());
    }
    let args = Args::new().ptr(address).ptr(norm).f32(clip).u64(n as u64).u32(vectors);
    at.launch(&kernel("clip_scale"), grid(n), args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![kernel("").spec()]
}
