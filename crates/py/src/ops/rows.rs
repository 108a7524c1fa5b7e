//! Row by row: softmax and the norms. An output may be an input.

use super::{Object, Optional, Result};
use crate::array::{Call, Sharing, Size, rows_of};
use ironhorse::ops;
use pyo3::prelude::*;

/// softmax of each row
#[pyfunction]
#[pyo3(signature = (x, out=None, rows=None, cols=None, device="auto"))]
pub fn softmax<'py>(
    x: &Object<'py>,
    out: Optional<'_, 'py>,
    rows: Option<Size>,
    cols: Option<Size>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(x.py(), "softmax", device)?;
    let x = call.input::<f32>("x", x)?;
    let (rows, cols) = rows_of(&call, ("x", &x), (rows, cols))?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let (from, to) = (x.at(), out.at());
    // SAFETY: both arrays have rows * cols elements; `run` refuses those that overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        ops::softmax(on.read(from), on.write(to), rows, cols, on.stream())
    })?;
    Ok(out.object())
}

/// The k largest probabilities of each row, divided by their sum, and where they are.
#[pyfunction]
#[pyo3(signature = (x, weights, idx, rows, cols, k, device="auto"))]
pub fn softmax_topk<'py>(
    x: &Object<'py>,
    weights: Optional<'_, 'py>,
    idx: Optional<'_, 'py>,
    rows: Option<Size>,
    cols: Option<Size>,
    k: Size,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let mut call = Call::new(x.py(), "softmax_topk", device)?;
    let x = call.input::<f32>("x", x)?;
    let (rows, cols) = rows_of(&call, ("x", &x), (rows, cols))?;
    if k.0 < 1 || k.0 > cols {
        return Err(call.invalid(format_args!("k is {}, expected 1 to {cols}, the number of columns", k.0)));
    }
    let k = k.0;
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = k as usize;
    }
    if crate::array::product(&shape) != Some(rows as usize * k as usize) {
        shape = vec![rows as usize, k as usize];
    }
    let weights = call.output_or_new::<f32>("weights", weights, &shape)?;
    let idx = call.output_or_new::<i32>("idx", idx, &shape)?;
    let (from, to, at) = (x.at(), weights.at(), idx.at());
    // SAFETY: x has rows * cols elements, the others rows * k; `run` refuses those that share memory.
    call.run(Sharing::Nothing, x.len(), |on| unsafe {
        ops::softmax_topk(on.read(from), on.write(to), on.write(at), rows, cols, k, on.stream())
    })?;
    Ok((weights.object(), idx.object()))
}

/// x / sqrt(mean(x^2) + eps) weight, in each row
#[pyfunction]
#[pyo3(signature = (x, weight, out=None, rows=None, dim=None, eps=1e-6, device="auto"))]
pub fn rmsnorm<'py>(
    x: &Object<'py>,
    weight: &Object<'py>,
    out: Optional<'_, 'py>,
    rows: Option<Size>,
    dim: Option<Size>,
    eps: f32,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(x.py(), "rmsnorm", device)?;
    let x = call.input::<f32>("x", x)?;
    let weight = call.input::<f32>("weight", weight)?;
    let (rows, dim) = rows_of(&call, ("x", &x), (rows, dim))?;
    call.expect("weight", &weight, &[dim as usize])?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let (from, by, to) = (x.at(), weight.at(), out.at());
    // SAFETY: x and out have rows * dim elements, weight dim; `run` refuses those that overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        ops::rmsnorm(on.read(from), on.read(by), on.write(to), rows, dim, eps, on.stream())
    })?;
    Ok(out.object())
}

/// residual_out = x + residual; out = rmsnorm(residual_out)
#[pyfunction]
#[pyo3(signature = (x, residual, weight, out=None, residual_out=None, rows=None, dim=None, eps=1e-6, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn rmsnorm_residual<'py>(
    x: &Object<'py>,
    residual: &Object<'py>,
    weight: &Object<'py>,
    out: Optional<'_, 'py>,
    residual_out: Optional<'_, 'py>,
    rows: Option<Size>,
    dim: Option<Size>,
    eps: f32,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let mut call = Call::new(x.py(), "rmsnorm_residual", device)?;
    let x = call.input::<f32>("x", x)?;
    let residual = call.input::<f32>("residual", residual)?;
    let weight = call.input::<f32>("weight", weight)?;
    let (rows, dim) = rows_of(&call, ("x", &x), (rows, dim))?;
    call.expect("residual", &residual, x.shape())?;
    call.expect("weight", &weight, &[dim as usize])?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let sum = call.output_or_new::<f32>("residual_out", residual_out, x.shape())?;
    let (from, and, by, to, keep) = (x.at(), residual.at(), weight.at(), out.at(), sum.at());
    // SAFETY: weight has dim elements, all others rows * dim; `run` refuses those that overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        ops::rmsnorm_residual(
            on.read(from),
            on.read(and),
            on.read(by),
            on.write(to),
            on.write(keep),
            rows,
            dim,
            eps,
            on.stream(),
        )
    })?;
    Ok((out.object(), sum.object()))
}

/// (x - mean) / sqrt(var + eps) weight + bias, in each row
#[pyfunction]
#[pyo3(signature = (x, weight, bias, out=None, rows=None, dim=None, eps=1e-5, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn layernorm<'py>(
    x: &Object<'py>,
    weight: &Object<'py>,
    bias: &Object<'py>,
    out: Optional<'_, 'py>,
    rows: Option<Size>,
    dim: Option<Size>,
    eps: f32,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(x.py(), "layernorm", device)?;
    let x = call.input::<f32>("x", x)?;
    let weight = call.input::<f32>("weight", weight)?;
    let bias = call.input::<f32>("bias", bias)?;
    let (rows, dim) = rows_of(&call, ("x", &x), (rows, dim))?;
    call.expect("weight", &weight, &[dim as usize])?;
    call.expect("bias", &bias, &[dim as usize])?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let (from, by, plus, to) = (x.at(), weight.at(), bias.at(), out.at());
    // SAFETY: x and out have rows * dim elements, the others dim; `run` refuses those that overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        ops::layernorm(on.read(from), on.read(by), on.read(plus), on.write(to), rows, dim, eps, on.stream())
    })?;
    Ok(out.object())
}
