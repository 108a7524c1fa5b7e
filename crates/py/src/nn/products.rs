//! Matrix products of linear layers. Arrays count as matrices of their last dimension.

use super::{Object, Optional, Result};
use crate::array::{Call, Sharing, rows_of};
use ironhorse::ops::{self, Grouped};
use pyo3::prelude::*;

/// a b, where a, b or both are used transposed; added to `c` if that is given. Without it the result has the dimensions of a,
/// save the last.
#[pyfunction]
#[pyo3(signature = (a, b, c, transpose_a, transpose_b, device, /))]
pub fn nn_matmul<'py>(
    a: &Object<'py>,
    b: &Object<'py>,
    c: Optional<'_, 'py>,
    transpose_a: bool,
    transpose_b: bool,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(a.py(), "matmul", device)?;
    let (a, b) = (call.input::<f32>("a", a)?, call.input::<f32>("b", b)?);
    let swapped = |(rows, cols), swap| if swap { (cols, rows) } else { (rows, cols) };
    let (m, k) = swapped(rows_of(&call, ("a", &a), (None, None))?, transpose_a);
    let (depth, n) = swapped(rows_of(&call, ("b", &b), (None, None))?, transpose_b);
    if k != depth {
        let (a, b) = (a.shape(), b.shape());
        return Err(call.invalid(format_args!("`a` is {a:?} and `b` {b:?}: {k} and {depth} do not fit")));
    }
    let mut shape = a.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = n as usize;
    }
    if transpose_a {
        shape = vec![m as usize, n as usize];
    }
    let beta = if c.is_some() { 1.0 } else { 0.0 };
    let c = call.output_or_new::<f32>("c", c, &shape)?;
    let (from, to) = ([a.at(), b.at()], c.at());
    // SAFETY: a has m k elements, b k n and c m n; `run` refuses those that share memory.
    call.run(Sharing::Nothing, a.len().saturating_mul(n as usize), |on| unsafe {
        let from = from.map(|array| on.read(array));
        let transposed = [transpose_a, transpose_b];
        ops::gemm_transposed(from, on.write(to), [m, n, k], transposed, [1.0, beta], on.stream())
    })?;
    Ok(c.object())
}

/// out\[r\] = weight\[e\] x\[r\] for rows r in offsets\[e\]..offsets\[e + 1\]
#[pyfunction]
#[pyo3(signature = (x, weight, offsets, device, /))]
pub fn nn_grouped<'py>(
    x: &Object<'py>,
    weight: &Object<'py>,
    offsets: &Object<'py>,
    device: &str,
) -> Result<'py> {
    let call = Call::new(x.py(), "grouped_linear", device)?;
    grouped(call, Grouped::Forward, ("x", x), ("weight", weight), None, offsets)
}

/// d_x\[r\] = d_y\[r\] weight\[e\]
#[pyfunction]
#[pyo3(signature = (d_y, weight, offsets, device, /))]
pub fn nn_grouped_input<'py>(
    d_y: &Object<'py>,
    weight: &Object<'py>,
    offsets: &Object<'py>,
    device: &str,
) -> Result<'py> {
    let call = Call::new(d_y.py(), "grouped_linear_bwd", device)?;
    grouped(call, Grouped::Input, ("d_y", d_y), ("weight", weight), None, offsets)
}

/// d_weight\[e\] += sum of d_y\[r\]^T x\[r\]
#[pyfunction]
#[pyo3(signature = (d_y, x, d_weight, offsets, device, /))]
pub fn nn_grouped_weight<'py>(
    d_y: &Object<'py>,
    x: &Object<'py>,
    d_weight: &Object<'py>,
    offsets: &Object<'py>,
    device: &str,
) -> Result<'py> {
    let call = Call::new(d_y.py(), "grouped_linear_bwd", device)?;
    grouped(call, Grouped::Weight, ("d_y", d_y), ("x", x), Some(d_weight), offsets)
}

fn grouped<'py>(
    mut call: Call<'py>,
    kind: Grouped,
    (a_name, a): (&'static str, &Object<'py>),
    (b_name, b): (&'static str, &Object<'py>),
    d_weight: Optional<'_, 'py>,
    offsets: &Object<'py>,
) -> Result<'py> {
    let (a, b) = (call.input::<f32>(a_name, a)?, call.input::<f32>(b_name, b)?);
    let given = d_weight.map(|c| call.output::<f32>("d_weight", c)).transpose()?;
    let weight = given.as_ref().unwrap_or(&b);
    let &[experts, outs, ins] = weight.shape() else {
        return Err(call.invalid(format_args!("weights are {:?}, expected [E, O, I]", weight.shape())));
    };
    let (rows, _) = rows_of(&call, (a_name, &a), (None, None))?;
    let size = rows as usize;
    let (a_shape, b_shape, c_shape) = match kind {
        Grouped::Forward => ([size, ins], None, [size, outs]),
        Grouped::Input => ([size, outs], None, [size, ins]),
        Grouped::Weight => ([size, outs], Some([size, ins]), [0; 2]),
    };
    call.expect(a_name, &a, &a_shape)?;
    if let Some(shape) = b_shape {
        call.expect(b_name, &b, &shape)?;
    }
    let offsets = call.input::<i32>("offsets", offsets)?;
    let offsets = call.indices(("offsets", &offsets), experts as i64 + 1, rows + 1)?;
    if offsets.values().last().is_none_or(|&last| i64::from(last) != rows) {
        return Err(call.invalid(format_args!("`offsets` does not end with the {rows} rows")));
    }
    let c = match given {
        Some(c) => c,
        None => call.output_or_new::<f32>("out", None, &c_shape)?,
    };
    let (from, to, values) = ([a.at(), b.at()], c.at(), offsets.values());
    let work = size.saturating_mul(outs).saturating_mul(ins);
    // SAFETY: the arrays have the sizes of `kind`; `run` refuses those that share memory.
    call.run(Sharing::Nothing, work, |on| unsafe {
        let from = from.map(|array| on.read(array));
        ops::gemm_grouped(kind, from, on.write(to), [outs as i64, ins as i64], values, on.stream())
    })?;
    Ok(c.object())
}
