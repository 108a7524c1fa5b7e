//! Matrix products of linear layers. Arrays count as matrices of their last dimension.

use super::{Object, Result};
use crate::array::NumpyCall;
use ironhorse::ops::layers::{self, Grouped, GroupedLinear};
use ironhorse::ops::spec::Elem;
use pyo3::prelude::*;

/// a b, where a, b or both are used transposed; added to `c` if that is given. Without it the result has the dimensions of a,
/// save the last.
#[pyfunction]
#[pyo3(signature = (a, b, c, transpose_a, transpose_b, device, /))]
pub fn nn_matmul<'py>(
    a: &Object<'py>,
    b: &Object<'py>,
    c: Option<&Object<'py>>,
    transpose_a: bool,
    transpose_b: bool,
    device: &str,
) -> Result<'py> {
    let mut call = NumpyCall::new(a.py(), "matmul", device)?;
    let (a, b) = (call.read("a", a)?, call.read("b", b)?);
    let swapped = |(rows, cols), swap| if swap { (cols, rows) } else { (rows, cols) };
    let (m, k) = swapped(a.rows(), transpose_a);
    let (depth, n) = swapped(b.rows(), transpose_b);
    if k != depth {
        let (a, b) = (a.shape(), b.shape());
        let text = format_args!("`a` is {a:?} and `b` is {b:?}, whose inner sizes {k} and {depth} differ");
        return Err(call.invalid(text));
    }
    let mut shape = a.shape().to_vec();
    match shape.last_mut() {
        Some(last) if !transpose_a => *last = n,
        _ => shape = vec![m, n],
    }
    let beta = if c.is_some() { 1.0 } else { 0.0 };
    let c = match c {
        Some(c) => call.output("c", Elem::F32, c)?,
        None => call.made(Elem::F32, &shape)?,
    };
    call.expect("c", &c, &shape)?;
    let slots = [a.slot(), b.slot(), c.slot()];
    let [m, n, k] = [m, n, k].map(|size| size as i64);
    call.run(a.len().saturating_mul(n as usize), |on| {
        let [a, b, c] = slots.map(|slot| on.address(slot).cast::<f32>());
        // SAFETY: a has m k elements, b k n and c m n.
        unsafe { layers::gemm_transposed(a, b, c, m, n, k, 1.0, beta, transpose_a, transpose_b, on.stream) }
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
    let call = NumpyCall::new(x.py(), "grouped_linear", device)?;
    grouped(call, Grouped::Forward, [("x", x), ("weight", weight)], None, offsets)
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
    let call = NumpyCall::new(d_y.py(), "grouped_linear_bwd", device)?;
    grouped(call, Grouped::Input, [("d_y", d_y), ("weight", weight)], None, offsets)
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
    let call = NumpyCall::new(d_y.py(), "grouped_linear_bwd", device)?;
    grouped(call, Grouped::Weight, [("d_y", d_y), ("x", x)], Some(d_weight), offsets)
}

fn grouped<'py>(
    mut call: NumpyCall<'py>,
    kind: Grouped,
    [(a_name, a), (b_name, b)]: [(&'static str, &Object<'py>); 2],
    d_weight: Option<&Object<'py>>,
    offsets: &Object<'py>,
) -> Result<'py> {
    let (a, b) = (call.read(a_name, a)?, call.read(b_name, b)?);
    let given = d_weight.map(|c| call.output("d_weight", Elem::F32, c)).transpose()?;
    let weight = given.as_ref().unwrap_or(&b);
    let &[experts, outs, ins] = weight.shape() else {
        return Err(call.invalid(format_args!("weights are {:?}, expected [E, O, I]", weight.shape())));
    };
    let (rows, _) = a.rows();
    let (a_cols, c_cols) = if kind == Grouped::Forward { (ins, outs) } else { (outs, ins) };
    call.expect(a_name, &a, &[rows, a_cols])?;
    if kind == Grouped::Weight {
        call.expect(b_name, &b, &[rows, ins])?;
    }
    let offsets = call.input("offsets", Elem::I32, offsets)?;
    let offsets = call.indices(("offsets", &offsets), experts + 1, rows + 1)?;
    if offsets.values().last().is_none_or(|&last| last as usize != rows) {
        return Err(call.invalid(format_args!("`offsets` does not end with the number of rows, {rows}")));
    }
    let c = match given {
        Some(c) => c,
        None => call.made(Elem::F32, &[rows, c_cols])?,
    };
    let (slots, offsets) = ([a.slot(), b.slot(), c.slot()], offsets.values());
    let work = rows.saturating_mul(outs).saturating_mul(ins);
    call.run(work, |on| {
        let [a, b, c] = slots.map(|slot| on.address(slot).cast::<f32>());
        let linear = GroupedLinear { kind, a, b, c, outs, ins, offsets };
        // SAFETY: the arrays have the sizes of `kind`.
        unsafe { layers::gemm_grouped(&linear, on.stream) }
    })?;
    Ok(c.object())
}
