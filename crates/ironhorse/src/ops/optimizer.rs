//! What happens to gradients.

use super::check::Check;
use super::{Result, Stream};
use crate::cpu::flat::{self, AdamWStep};

/// One step of PyTorch's AdamW: param = param (1 - lr weight_decay); m = beta1 m + (1 - beta1) grad; v = beta2 v +
/// (1 - beta2) grad²; param = param - lr / (1 - beta1^step) · m / (√v / √(1 - beta2^step) + eps). `step` counts from 1.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super); step is below 1, a beta is not in \[0, 1), another number is negative or NaN.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn adamw_step(
    param: *mut f32,
    grad: *const f32,
    m: *mut f32,
    v: *mut f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    step: i32,
    n: i64,
    _stream: Stream,
) -> Result {
    let mut c = Check::new("adamw_step");
    let n = c.size("n", n)?;
    for (name, x) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay)] {
        c.number(name, x, |x| x >= 0.0, "a number that is not negative")?;
    }
    for (name, x) in [("beta1", beta1), ("beta2", beta2)] {
        c.number(name, x, |x| (0.0..1.0).contains(&x), "0 to 1 exclusive")?;
    }
    c.positive("step", i64::from(step))?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (param, grad) = (c.output("param", param, n)?, c.input("grad", grad, n)?);
        let (m, v) = (c.output("m", m, n)?, c.output("v", v, n)?);
        c.host(&[])?;
        let numbers = AdamWStep { lr, beta1, beta2, eps, weight_decay, step };
        Ok(flat::adamw_step(param, grad, m, v, &numbers)?)
    }
}

/// grad\[i\] = 0, i < n.
///
/// # Safety
/// See [the module](super); n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn zero_grad(grad: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("zero_grad");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let grad = c.output("grad", grad, n)?;
        c.host(&[])?;
        Ok(flat::zero_grad(grad)?)
    }
}

/// total_norm\[0\] = √Σ grad²; if that is more than `clip`, grad is multiplied by clip / (total_norm + 1e-6): PyTorch's
/// `clip_grad_norm_`. A norm of NaN makes every gradient NaN. `partial` is room for ceil(n / 256) partial sums on a device;
/// on the host it is not used and may be null. With n = 0 the norm is 0.
///
/// # Safety
/// See [the module](super); grad: n, total_norm: 1 element.
///
/// # Errors
/// See [the module](super); clip is negative or NaN.
pub unsafe fn grad_clip(
    grad: *mut f32,
    _partial: *mut f32,
    total_norm: *mut f32,
    clip: f32,
    n: i64,
    _stream: Stream,
) -> Result {
    let mut c = Check::new("grad_clip");
    let n = c.size("n", n)?;
    c.number("clip", clip, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (grad, norm) = (c.output("grad", grad, n)?, c.output("total_norm", total_norm, 1)?);
        c.host(&[])?;
        Ok(flat::grad_clip(grad, norm, clip)?)
    }
}

/// grad_weight\[idx\[i\]\] += grad_out\[i\], rows of `dim`, for i < n_idx in order: the gradient of an embedding table. The
/// table must have more rows than the largest index; a call cannot check it (see [`scatter_add_rows`]).
///
/// # Safety
/// See [the module](super); grad_out: n_idx·dim, idx: n_idx, grad_weight: (largest index + 1)·dim elements.
///
/// # Errors
/// See [the module](super); an index is negative.
pub unsafe fn scatter_add(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: i64,
    dim: i64,
    _stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { scatter("scatter_add", grad_out, idx, grad_weight, [n_idx, dim], None) }
}

/// As [`scatter_add`], with the number of rows of the table: an index that is not in 0..rows is an error.
///
/// # Safety
/// See [the module](super); grad_out: n_idx·dim, idx: n_idx, grad_weight: rows·dim elements.
///
/// # Errors
/// See [the module](super); an index is not in 0..rows.
pub unsafe fn scatter_add_rows(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: i64,
    dim: i64,
    rows: i64,
    _stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { scatter("scatter_add_rows", grad_out, idx, grad_weight, [n_idx, dim], Some(rows)) }
}

/// # Safety
/// As [`scatter_add`] or [`scatter_add_rows`].
unsafe fn scatter(
    op: &'static str,
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    [n_idx, dim]: [i64; 2],
    rows: Option<i64>,
) -> Result {
    let mut c = Check::new(op);
    let (n_idx, dim) = (c.size("n_idx", n_idx)?, c.size("dim", dim)?);
    let rows = rows.map(|rows| c.size("rows", rows)).transpose()?;
    let n = c.product("grad_out", &[n_idx, dim])?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (grad_out, idx) = (c.input("grad_out", grad_out, n)?, c.input("idx", idx, n_idx)?);
        c.indices("idx", idx, rows.unwrap_or(i32::MAX as usize + 1))?;
        let largest = idx.all().iter().max().map_or(0, |&i| i as usize);
        let table = c.product("grad_weight", &[rows.unwrap_or(largest + 1), dim])?;
        let grad_weight = c.output("grad_weight", grad_weight, table)?;
        c.host(&[])?;
        Ok(flat::scatter_add(grad_out, idx, grad_weight, dim)?)
    }
}
