//! What changes parameters and gradients in place.

use super::{Object, Optional, Result};
use crate::array::{Array, Call, Sharing, Size};
use ironhorse::ops;
use pyo3::prelude::*;

/// One step of AdamW on param, m and v.
#[pyfunction]
#[pyo3(signature = (param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, n=None, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn adamw_step<'py>(
    param: &Object<'py>,
    grad: &Object<'py>,
    m: &Object<'py>,
    v: &Object<'py>,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    step: Size,
    n: Option<Size>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(param.py(), "adamw_step", device)?;
    let param = call.output::<f32>("param", param)?;
    let grad = call.input::<f32>("grad", grad)?;
    let (m, v) = (call.output::<f32>("m", m)?, call.output::<f32>("v", v)?);
    for (name, array) in [("grad", &grad), ("m", &m), ("v", &v)] {
        call.expect(name, array, param.shape())?;
    }
    let n = first(&call, ("param", &param), n)?;
    let step = i32::try_from(step.0)
        .map_err(|_| call.invalid(format_args!("step is {}, which is too large", step.0)))?;
    let (at, from, one, two) = (param.at(), grad.at(), m.at(), v.at());
    // SAFETY: all have at least n elements; `run` refuses arrays that share memory.
    call.run(Sharing::Nothing, param.len(), |on| unsafe {
        let (at, from, one, two) = (on.write(at), on.read(from), on.write(one), on.write(two));
        ops::adamw_step(at, from, one, two, lr, beta1, beta2, eps, weight_decay, step, n, on.stream())
    })?;
    Ok(param.object())
}

/// grad = 0
#[pyfunction]
#[pyo3(signature = (grad, n=None, device="auto"))]
pub fn zero_grad<'py>(grad: &Object<'py>, n: Option<Size>, device: &str) -> Result<'py> {
    let mut call = Call::new(grad.py(), "zero_grad", device)?;
    let grad = call.output::<f32>("grad", grad)?;
    let n = first(&call, ("grad", &grad), n)?;
    let at = grad.at();
    // SAFETY: grad has at least n elements.
    call.run(Sharing::Nothing, grad.len(), |on| unsafe { ops::zero_grad(on.write(at), n, on.stream()) })?;
    Ok(grad.object())
}

/// total_norm = sqrt(sum(grad^2)); grad is scaled down where that is above clip. Returns total_norm.
#[pyfunction]
#[pyo3(signature = (grad, partial, total_norm, clip, n=None, device="auto"))]
pub fn grad_clip<'py>(
    grad: &Object<'py>,
    partial: Optional<'_, 'py>,
    total_norm: Optional<'_, 'py>,
    clip: f32,
    n: Option<Size>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(grad.py(), "grad_clip", device)?;
    let grad = call.output::<f32>("grad", grad)?;
    let partial = match partial {
        Some(partial) => call.output::<f32>("partial", partial)?,
        None => call.output_or_new::<f32>("partial", None, &[1])?,
    };
    let norm = call.output_or_new::<f32>("total_norm", total_norm, &[])?;
    let n = first(&call, ("grad", &grad), n)?;
    let (at, scratch, to) = (grad.at(), partial.at(), norm.at());
    // SAFETY: grad has at least n elements, total_norm 1, and `partial` is not used on the CPU; `run` refuses arrays that
    // share memory.
    call.run(Sharing::Nothing, grad.len(), |on| unsafe {
        ops::grad_clip(on.write(at), on.write(scratch), on.write(to), clip, n, on.stream())
    })?;
    Ok(norm.object())
}

/// How many elements to work on: all, or the first `n`.
fn first(call: &Call<'_>, (name, array): (&str, &Array<'_, f32>), n: Option<Size>) -> PyResult<i64> {
    match n {
        None => Ok(array.count()),
        Some(Size(n)) if (0..=array.count()).contains(&n) => Ok(n),
        Some(Size(n)) => {
            Err(call.invalid(format_args!("n is {n}, and `{name}` has {} elements", array.count())))
        }
    }
}
