//! What happens to gradients.

use super::check::Check;
use super::place::{Place, run};
use super::{Result, Stream};
use crate::cpu::flat::{self, AdamWStep};
use crate::cuda::eager;

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
    stream: Stream,
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
        let (w, g) = (c.output("param", param, n)?, c.input("grad", grad, n)?);
        let (one, two) = (c.output("m", m, n)?, c.output("v", v, n)?);
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || {
                let numbers = AdamWStep { lr, beta1, beta2, eps, weight_decay, step };
                Ok(flat::adamw_step(w, g, one, two, &numbers)?)
            },
            |at| {
                let numbers = eager::AdamWStep { lr, beta1, beta2, eps, weight_decay, step };
                eager::adamw_step(at, [param, m, v], grad, n, &numbers)
            },
        )
    }
}

/// grad\[i\] = 0, i < n.
///
/// # Safety
/// See [the module](super); n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn zero_grad(grad: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("zero_grad");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let all = c.output("grad", grad, n)?;
        let place = c.place(&[], stream)?;
        run(place, stream, || Ok(flat::zero_grad(all)?), |at| at.zero(grad.cast(), n * size_of::<f32>()))
    }
}

/// total_norm\[0\] = √Σ grad²; if that is more than `clip`, grad is multiplied by clip / (total_norm + 1e-6): PyTorch's
/// `clip_grad_norm_`. A norm of NaN makes every gradient NaN. `partial`, room for ceil(n / 256) partial sums, is not used and
/// may be null: sums are f64 in memory of the library's own. With n = 0 the norm is 0.
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
    stream: Stream,
) -> Result {
    let mut c = Check::new("grad_clip");
    let n = c.size("n", n)?;
    c.number("clip", clip, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (all, norm) = (c.output("grad", grad, n)?, c.output("total_norm", total_norm, 1)?);
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::grad_clip(all, norm, clip)?),
            |at| eager::grad_clip(at, grad, total_norm, clip, n),
        )
    }
}

/// grad_weight\[idx\[i\]\] += grad_out\[i\], rows of `dim`, for i < n_idx in order: the gradient of an embedding table. The
/// table must have more rows than the largest index; a call cannot check it (see [`scatter_add_rows`]). On a device nobody
/// looks at the indices before the call: a negative one is skipped there, and of many equal ones the sum is not made one
/// by one, but always in the same order.
///
/// # Safety
/// See [the module](super); grad_out: n_idx·dim, idx: n_idx, grad_weight: (largest index + 1)·dim elements.
///
/// # Errors
/// See [the module](super); an index in memory of the host is negative.
pub unsafe fn scatter_add(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: i64,
    dim: i64,
    stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { scatter("scatter_add", (grad_out, idx), grad_weight, [n_idx, dim], None, stream) }
}

/// As [`scatter_add`], with the number of rows of the table: an index that is not in 0..rows is an error, on a device it is
/// skipped.
///
/// # Safety
/// See [the module](super); grad_out: n_idx·dim, idx: n_idx, grad_weight: rows·dim elements.
///
/// # Errors
/// See [the module](super); an index in memory of the host is not in 0..rows.
pub unsafe fn scatter_add_rows(
    grad_out: *const f32,
    idx: *const i32,
    grad_weight: *mut f32,
    n_idx: i64,
    dim: i64,
    rows: i64,
    stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { scatter("scatter_add_rows", (grad_out, idx), grad_weight, [n_idx, dim], Some(rows), stream) }
}

/// # Safety
/// As [`scatter_add`] or [`scatter_add_rows`].
unsafe fn scatter(
    op: &'static str,
    (grad_out, idx): (*const f32, *const i32),
    grad_weight: *mut f32,
    [n_idx, dim]: [i64; 2],
    rows: Option<i64>,
    stream: Stream,
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
        let (from, by) = (c.input("grad_out", grad_out, n)?, c.input("idx", idx, n_idx)?);
        let largest = match c.place(&[], stream)? {
            Place::Device(_) => 0,
            Place::Host => {
                c.indices("idx", by, rows.unwrap_or(i32::MAX as usize + 1))?;
                by.all().iter().max().map_or(0, |&i| i as usize)
            }
        };
        let table = c.product("grad_weight", &[rows.unwrap_or(largest + 1), dim])?;
        let to = c.output("grad_weight", grad_weight, table)?;
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::scatter_add(from, by, to, dim)?),
            |at| eager::scatter_add(at, (grad_out, idx), grad_weight, [n_idx, dim], rows),
        )
    }
}
