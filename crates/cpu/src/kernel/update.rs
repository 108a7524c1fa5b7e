//! The update: the norm of the gradients, AdamW, and the elementwise parts of Muon.

use crate::element::tree;
use crate::math::fma;
use crate::memory::Span;
use crate::multiversion;
use crate::team::{Split, TaskPanic};

/// Elements whose squares one task sums; the partial sums are added in order.
pub const NORM_CHUNK: usize = ironhorse_core::ranks::PIECE_ELEMENTS;
/// Elements one AdamW task updates: four streams of 64 KiB.
pub const ADAM_CHUNK: usize = 1 << 14;
/// What PyTorch's clip_grad_norm_ adds to the norm before dividing.
pub const CLIP_EPS: f32 = 1e-6;

/// √Σ x², from partial sums of which each task writes its own.
///
/// # Safety
/// Nobody writes `x`; the caller alone uses `partials`, of which there are as many as pieces of [`NORM_CHUNK`] elements.
///
/// # Errors
/// A task panicked.
pub unsafe fn norm(on: &impl Split, x: Span<f32>, partials: Span<f64>) -> Result<f32, TaskPanic> {
    // SAFETY: guaranteed by the caller.
    unsafe { norm_parts(on, x, partials) }?;
    // SAFETY: all tasks are done.
    Ok(norm_of(unsafe { partials.all() }))
}

/// The partial sums of [`norm`].
///
/// # Safety
/// As for [`norm`].
///
/// # Errors
/// A task panicked.
pub unsafe fn norm_parts(on: &impl Split, x: Span<f32>, partials: Span<f64>) -> Result<(), TaskPanic> {
    let isa = on.isa();
    on.pieces(x.len(), NORM_CHUNK, 1, |r| {
        // SAFETY: guaranteed by the caller; tasks write different partial sums.
        unsafe { partials.set(r.start / NORM_CHUNK, sum_sq_streams(isa, x.get(r))) };
    })
}

/// The norm of which these are the partial sums.
pub fn norm_of(partials: &[f64]) -> f32 {
    partials.iter().sum::<f64>().sqrt() as f32
}

/// The settings of a step of AdamW.
#[derive(Clone, Copy)]
pub struct AdamWSettings {
    pub lr: f32,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f32,
    pub weight_decay: f32,
    /// The number of the step, from 1.
    pub step: i32,
    /// Gradients are multiplied by this: clipping.
    pub grad_scale: f32,
}

/// The constants of a step, the same for every element.
#[derive(Clone, Copy)]
pub struct Coefficients {
    /// 1 - lr·decay
    pub keep: f32,
    pub beta2: f32,
    /// 1 - β₁ and 1 - β₂, rounded once
    pub rest1: f32,
    pub rest2: f32,
    /// lr / (1 - β₁ᵗ)
    pub step_size: f32,
    /// 1 / √(1 - β₂ᵗ)
    pub root_correction: f32,
    pub eps: f32,
    /// gradients are multiplied by this: clipping
    pub grad_scale: f32,
}

impl Coefficients {
    /// The coefficients of a step with weight decay.
    pub fn new(s: &AdamWSettings) -> Self {
        let (lr, correction) = (f64::from(s.lr), |beta: f64| 1.0 - beta.powi(s.step));
        Self {
            keep: (1.0 - lr * f64::from(s.weight_decay)) as f32,
            beta2: s.beta2 as f32,
            rest1: (1.0 - s.beta1) as f32,
            rest2: (1.0 - s.beta2) as f32,
            step_size: (lr / correction(s.beta1)) as f32,
            root_correction: (1.0 / correction(s.beta2).sqrt()) as f32,
            eps: s.eps,
            grad_scale: s.grad_scale,
        }
    }
}

/// Places a task reads at once: one stream per core does not fill the memory's bandwidth.
const STREAMS: usize = 4;
const LANES: usize = 16;

multiversion! {
    /// Σ x² in f64, reading four places of x at a time.
    fn sum_sq_streams<const FMA: bool>(x: &[f32]) -> f64 {
        let quarter = x.len() / (STREAMS * LANES) * LANES;
        let (parts, rest) = x.split_at(STREAMS * quarter);
        let [a, b, c, d]: [&[[f32; LANES]]; STREAMS] =
            std::array::from_fn(|s| parts[s * quarter..(s + 1) * quarter].as_chunks().0);
        let mut sums = [[0.0_f64; LANES]; STREAMS];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for i in 0..LANES {
                sums[0][i] += f64::from(a[i]) * f64::from(a[i]);
                sums[1][i] += f64::from(b[i]) * f64::from(b[i]);
                sums[2][i] += f64::from(c[i]) * f64::from(c[i]);
                sums[3][i] += f64::from(d[i]) * f64::from(d[i]);
            }
        }
        let mut tail = [0.0_f64; crate::element::LANES];
        for (i, &x) in rest.iter().enumerate() {
            tail[i % crate::element::LANES] += f64::from(x) * f64::from(x);
        }
        sums.iter().flatten().sum::<f64>() + tree(tail, |a, b| a + b)
    }

    /// AdamW on some elements.
    pub fn adamw_update<const FMA: bool>(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], k: Coefficients) {
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
            let g = g * k.grad_scale;
            *m = fma::<FMA>(k.rest1, g - *m, *m);
            *v = fma::<FMA>(k.beta2, *v, k.rest2 * (g * g));
            let denominator = fma::<FMA>(v.sqrt(), k.root_correction, k.eps);
            *w = fma::<FMA>(*w, k.keep, -(k.step_size * (*m / denominator)));
        }
    }

    /// The momentum of some elements of a matrix, and in `out` what Nesterov makes of it; returns Σ out².
    pub fn muon_momentum<const FMA: bool>(out: &mut [f32], m: &mut [f32], g: &[f32], momentum: f32, grad_scale: f32) -> f64 {
        let rest = 1.0 - momentum;
        let mut sums = [0.0_f64; LANES];
        for ((out, m), g) in out.chunks_mut(LANES).zip(m.chunks_mut(LANES)).zip(g.chunks(LANES)) {
            for (((out, m), g), sum) in out.iter_mut().zip(m).zip(g).zip(&mut sums) {
                let g = g * grad_scale;
                *m = fma::<FMA>(rest, g - *m, *m);
                *out = fma::<FMA>(momentum, *m - g, g);
                *sum += f64::from(*out) * f64::from(*out);
            }
        }
        sums.iter().sum()
    }

    /// `x = x·by`
    pub fn scale_in_place<const FMA: bool>(x: &mut [f32], by: f32) {
        x.iter_mut().for_each(|x| *x *= by);
    }

    /// `out = x·by`
    pub fn scaled<const FMA: bool>(out: &mut [f32], x: &[f32], by: f32) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = x * by);
    }

    /// `w = w·keep - step·x`
    pub fn muon_update<const FMA: bool>(w: &mut [f32], x: &[f32], keep: f32, step: f32) {
        for (w, x) in w.iter_mut().zip(x) {
            *w = fma::<FMA>(*w, keep, -(step * x));
        }
    }
}
