//! Normalisation of rows.

use super::check::Check;
use super::{Result, Stream};
use crate::cpu::flat;

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
    _stream: Stream,
) -> Result {
    let mut c = Check::new("rmsnorm");
    let (rows, dim) = (c.size("rows", rows)?, c.size("dim", dim)?);
    let n = c.product("input", &[rows, dim])?;
    c.number("eps", eps, |x| x >= 0.0, "a number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, weight) =
            (c.input("input", input, n)?, c.input("weight", weight, if n == 0 { 0 } else { dim })?);
        let y = c.output("out", out, n)?;
        c.host(&[("input", "out")])?;
        Ok(flat::rmsnorm(x, weight, y, eps)?)
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
    _stream: Stream,
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
        c.host(&same)?;
        Ok(flat::rmsnorm_residual([x, res, w], y, sum, eps)?)
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
    _stream: Stream,
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
        c.host(&[("input", "out")])?;
        Ok(flat::layernorm([x, w, b], y, eps)?)
    }
}
