//! Row by row and element by element.

use super::{Object, Two};
use crate::array::{Call, Sharing, rows_of};
use ironhorse::core::eager::{Array, Rows};
use ironhorse::eager;
use pyo3::prelude::*;

/// y = x / sqrt(mean(x^2) + eps) weight in each row, and what was multiplied with, one number a row
#[pyfunction]
#[pyo3(signature = (x, weight, eps, device, /))]
pub fn nn_rmsnorm<'py>(x: &Object<'py>, weight: &Object<'py>, eps: f64, device: &str) -> Two<'py> {
    let mut call = Call::new(x.py(), "rmsnorm", device)?;
    let (x, weight) = (call.input::<f32>("x", x)?, call.input::<f32>("weight", weight)?);
    let (rows, cols) = rows_of(&call, ("x", &x), (None, None))?;
    call.expect("weight", &weight, &[cols as usize])?;
    let y = call.output_or_new::<f32>("y", None, x.shape())?;
    let rstd = call.output_or_new::<f32>("rstd", None, &[rows as usize])?;
    let (from, by, to, kept) = (x.at(), weight.at(), y.at(), rstd.at());
    let shape = Rows { rows: rows as usize, cols: cols as usize };
    call.run(Sharing::Nothing, x.len(), |on| {
        let inputs = [Array::f32(on.read(from)), Array::f32(on.read(by))];
        let outputs = [Array::f32_mut(on.write(to)), Array::f32_mut(on.write(kept))];
        // SAFETY: x and y have the rows, weight one row, rstd one number a row; outputs are new.
        on.direct(|at| unsafe { eager::rmsnorm(at, inputs, outputs, shape, eps) })
    })?;
    Ok((y.object(), rstd.object()))
}

/// The gradients of x and weight of `nn_rmsnorm`.
#[pyfunction]
#[pyo3(signature = (d_y, x, weight, rstd, device, /))]
pub fn nn_rmsnorm_bwd<'py>(
    d_y: &Object<'py>,
    x: &Object<'py>,
    weight: &Object<'py>,
    rstd: &Object<'py>,
    device: &str,
) -> Two<'py> {
    let mut call = Call::new(x.py(), "rmsnorm_bwd", device)?;
    let (d_y, x) = (call.input::<f32>("d_y", d_y)?, call.input::<f32>("x", x)?);
    let (weight, rstd) = (call.input::<f32>("weight", weight)?, call.input::<f32>("rstd", rstd)?);
    let (rows, cols) = rows_of(&call, ("x", &x), (None, None))?;
    call.expect("d_y", &d_y, x.shape())?;
    call.expect("weight", &weight, &[cols as usize])?;
    call.expect("rstd", &rstd, &[rows as usize])?;
    let d_x = call.output_or_new::<f32>("d_x", None, x.shape())?;
    let d_weight = call.output_or_new::<f32>("d_weight", None, weight.shape())?;
    let (inputs, outputs) = ([d_y.at(), x.at(), weight.at(), rstd.at()], [d_x.at(), d_weight.at()]);
    let shape = Rows { rows: rows as usize, cols: cols as usize };
    call.run(Sharing::Nothing, 2 * x.len(), |on| {
        let inputs = inputs.map(|input| Array::f32(on.read(input)));
        let outputs = outputs.map(|output| Array::f32_mut(on.write(output)));
        // SAFETY: as forward.
        on.direct(|at| unsafe { eager::rmsnorm_bwd(at, inputs, outputs, shape) })
    })?;
    Ok((d_x.object(), d_weight.object()))
}

/// The gradients of gate and up of silu(gate) up.
#[pyfunction]
#[pyo3(signature = (d_y, gate, up, device, /))]
pub fn nn_swiglu_bwd<'py>(d_y: &Object<'py>, gate: &Object<'py>, up: &Object<'py>, device: &str) -> Two<'py> {
    let mut call = Call::new(gate.py(), "swiglu_bwd", device)?;
    let d_y = call.input::<f32>("d_y", d_y)?;
    let (gate, up) = (call.input::<f32>("gate", gate)?, call.input::<f32>("up", up)?);
    call.expect("d_y", &d_y, gate.shape())?;
    call.expect("up", &up, gate.shape())?;
    let d_gate = call.output_or_new::<f32>("d_gate", None, gate.shape())?;
    let d_up = call.output_or_new::<f32>("d_up", None, gate.shape())?;
    let (inputs, outputs, n) = ([d_y.at(), gate.at(), up.at()], [d_gate.at(), d_up.at()], gate.len());
    call.run(Sharing::Nothing, n, |on| {
        let inputs = inputs.map(|input| Array::f32(on.read(input)));
        let outputs = outputs.map(|output| Array::f32_mut(on.write(output)));
        // SAFETY: all have n elements; outputs are new.
        on.direct(|at| unsafe { eager::swiglu_bwd(at, inputs, outputs, n) })
    })?;
    Ok((d_gate.object(), d_up.object()))
}
