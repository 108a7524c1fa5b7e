//! Normalisation of rows.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{Array, Float, Rows};
use crate::cpu::flat;
use crate::cuda::eager;

/// out\[r\] = x / √(mean(x²) + eps) · weight, x = input\[r\], for each of `rows` rows of `dim`. `out` may be `input`.
///
/// # Safety
/// See [the module](super); input and out: rows·dim, weight: dim elements.
///
/// # Errors
/// See [the module](super); eps is negative or NaN.
pub unsafe fn rmsnorm(
    input: *const f32,
    weight: *const f32,
    out: *mut f32,
    rows: i64,
    dim: i64,
    eps: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("rmsnorm");
    let (rows, dim) = (c.size("rows", rows)?, c.size("dim", dim)?);
    let n = c.product("input", &[rows, dim])?;
    c.number("eps", eps, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, w) = (c.input("input", input, n)?, c.input("weight", weight, if n == 0 { 0 } else { dim })?);
        let y = c.output("out", out, n)?;
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::rmsnorm(x, w, y, eps)?),
            |at| {
                let inputs = [Array::f32(input), Array::f32(weight)];
                let outputs = [Array::f32_mut(out), Array::none(Float::F32)];
                eager::rmsnorm(at, inputs, outputs, Rows { rows, cols: dim }, eps.into())
            },
        )
    }
}

/// residual_out = input + residual; out = rmsnorm(residual_out). `residual_out` may be `input` or `residual`; so may `out`,
/// if `residual_out` is another array.
///
/// # Safety
/// See [the module](super); weight: dim, all others: rows·dim elements.
///
/// # Errors
/// See [the module](super); eps is negative or NaN.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn rmsnorm_residual(
    input: *const f32,
    residual: *const f32,
    weight: *const f32,
    out: *mut f32,
    residual_out: *mut f32,
    rows: i64,
    dim: i64,
    eps: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("rmsnorm_residual");
    let (rows, dim) = (c.size("rows", rows)?, c.size("dim", dim)?);
    let n = c.product("input", &[rows, dim])?;
    c.number("eps", eps, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, res) = (c.input("input", input, n)?, c.input("residual", residual, n)?);
        let w = c.input("weight", weight, if n == 0 { 0 } else { dim })?;
        let (y, sum) = (c.output("out", out, n)?, c.output("residual_out", residual_out, n)?);
        let same =
            [("input", "residual_out"), ("residual", "residual_out"), ("input", "out"), ("residual", "out")];
        let place = c.place(&same, stream)?;
        run(
            place,
            stream,
            || Ok(flat::rmsnorm_residual([x, res, w], y, sum, eps)?),
            |at| {
                let inputs = [Array::f32(input), Array::f32(residual), Array::f32(weight)];
                let outputs = [Array::f32_mut(out), Array::f32_mut(residual_out)];
                eager::rmsnorm_residual(at, inputs, outputs, Rows { rows, cols: dim }, eps.into())
            },
        )
    }
}

/// out\[r\] = (x - mean) / √(var + eps) · weight + bias, x = input\[r\], for each of `rows` rows of `dim`; var is divided by
/// dim. `out` may be `input`.
///
/// # Safety
/// See [the module](super); input and out: rows·dim, weight and bias: dim elements.
///
/// # Errors
/// See [the module](super); eps is negative or NaN.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn layernorm(
    input: *const f32,
    weight: *const f32,
    bias: *const f32,
    out: *mut f32,
    rows: i64,
    dim: i64,
    eps: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("layernorm");
    let (rows, dim) = (c.size("rows", rows)?, c.size("dim", dim)?);
    let n = c.product("input", &[rows, dim])?;
    let dim = if n == 0 { 0 } else { dim };
    c.number("eps", eps, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let x = c.input("input", input, n)?;
        let (w, b) = (c.input("weight", weight, dim)?, c.input("bias", bias, dim)?);
        let y = c.output("out", out, n)?;
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::layernorm([x, w, b], y, eps)?),
            |at| {
                let inputs = [Array::f32(input), Array::f32(weight), Array::f32(bias)];
                let none = Array::none(Float::F32);
                let outputs = [Array::f32_mut(out), none, none];
                eager::layernorm(at, inputs, outputs, Rows { rows, cols: dim }, eps.into())
            },
        )
    }
}
