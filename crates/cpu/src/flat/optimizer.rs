//! AdamW, clearing and clipping of gradients.

use super::pool::{isa, pieces};
use super::{Done, Span};
use crate::op::elementwise::scale_in_place;
use crate::op::optimizer::{ADAM_CHUNK, CLIP_EPS, Coefficients, NORM_CHUNK, adamw_stretch, sum_sq_streams};
use std::sync::atomic::{AtomicU64, Ordering};

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

/// One step of PyTorch's AdamW on `param`, `m` and `v`.
///
/// # Safety
/// See [the module](super); equal lengths.
///
/// # Errors
/// See [the module](super).
pub unsafe fn adamw_step(
    param: Span<f32>,
    grad: Span<f32>,
    m: Span<f32>,
    v: Span<f32>,
    s: &AdamWStep,
) -> Done {
    let (beta1, beta2, lr) = (f64::from(s.beta1), f64::from(s.beta2), f64::from(s.lr));
    let correction = |beta: f64| 1.0 - beta.powi(s.step);
    let k = Coefficients {
        keep: (1.0 - lr * f64::from(s.weight_decay)) as f32,
        beta2: s.beta2,
        rest1: (1.0 - beta1) as f32,
        rest2: (1.0 - beta2) as f32,
        step_size: (lr / correction(beta1)) as f32,
        root_correction: (1.0 / correction(beta2).sqrt()) as f32,
        eps: s.eps,
        grad_scale: 1.0,
    };
    let isa = isa();
    pieces(param.len(), ADAM_CHUNK, 4, |r| {
        // SAFETY: tasks have disjoint ranges of what is written, which shares no memory with the rest.
        unsafe {
            let (w, g) = (param.get_mut(r.clone()), grad.get(r.clone()));
            adamw_stretch(isa, w, g, m.get_mut(r.clone()), v.get_mut(r), k);
        }
    })
}

/// grad = 0
///
/// # Safety
/// See [the module](super).
///
/// # Errors
/// See [the module](super).
pub unsafe fn zero_grad(grad: Span<f32>) -> Done {
    pieces(grad.len(), 1 << 16, 1, |r| {
        // SAFETY: tasks have disjoint ranges.
        unsafe { grad.get_mut(r) }.fill(0.0);
    })
}

/// total_norm = √Σ grad²; grad is multiplied by clip / (total_norm + 1e-6) if that is below 1, as PyTorch's
/// `clip_grad_norm_` does; a norm that is NaN makes all of it NaN.
///
/// # Safety
/// See [the module](super); total_norm: 1.
///
/// # Errors
/// See [the module](super).
pub unsafe fn grad_clip(grad: Span<f32>, total_norm: Span<f32>, clip: f32) -> Done {
    let isa = isa();
    let partials: Vec<AtomicU64> = (0..grad.len().div_ceil(NORM_CHUNK)).map(|_| AtomicU64::new(0)).collect();
    pieces(grad.len(), NORM_CHUNK, 1, |r| {
        let index = r.start / NORM_CHUNK;
        // SAFETY: nobody writes the gradients here.
        let sum = sum_sq_streams(isa, unsafe { grad.get(r) });
        partials[index].store(sum.to_bits(), Ordering::Relaxed);
    })?;
    let norm = partials.iter().map(|x| f64::from_bits(x.load(Ordering::Relaxed))).sum::<f64>().sqrt() as f32;
    // SAFETY: one thread; apart from the gradients.
    unsafe { total_norm.all_mut()[0] = norm };
    let factor = clip / (norm + CLIP_EPS);
    if factor >= 1.0 {
        return Ok(());
    }
    pieces(grad.len(), 1 << 14, 1, |r| {
        // SAFETY: tasks have disjoint ranges.
        scale_in_place(isa, unsafe { grad.get_mut(r) }, factor);
    })
}
