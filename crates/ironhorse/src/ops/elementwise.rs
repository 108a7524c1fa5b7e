//! Ops on single elements. In each, `out` may be the same array as an input.

use super::check::Check;
use super::{Result, Stream};
use crate::cpu::flat;

/// out\[i\] = x / (1 + e^-x), x = input\[i\], i < n.
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn silu(input: *const f32, out: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("silu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        c.host(&[("input", "out")])?;
        Ok(flat::silu(x, y)?)
    }
}

/// out\[i\] = x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, x = input\[i\], i < n: GELU in its tanh form
/// (`approximate="tanh"` in PyTorch).
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gelu(input: *const f32, out: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("gelu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        c.host(&[("input", "out")])?;
        Ok(flat::gelu(x, y)?)
    }
}

/// out\[i\] = scale · input\[i\], i < n.
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn scale(input: *const f32, out: *mut f32, scale: f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("scale");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        c.host(&[("input", "out")])?;
        Ok(flat::scale(x, y, scale)?)
    }
}

/// out\[i\] = a\[i\] + b\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn add(a: *const f32, b: *const f32, out: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("add");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (a, b, y) = (c.input("a", a, n)?, c.input("b", b, n)?, c.output("out", out, n)?);
        c.host(&[("a", "out"), ("b", "out")])?;
        Ok(flat::add(a, b, y)?)
    }
}

/// out\[i\] = a\[i\] · b\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn mul(a: *const f32, b: *const f32, out: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("mul");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (a, b, y) = (c.input("a", a, n)?, c.input("b", b, n)?, c.output("out", out, n)?);
        c.host(&[("a", "out"), ("b", "out")])?;
        Ok(flat::mul(a, b, y)?)
    }
}

/// out\[i\] = silu(gate\[i\]) · up\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn swiglu(gate: *const f32, up: *const f32, out: *mut f32, n: i64, _stream: Stream) -> Result {
    let mut c = Check::new("swiglu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (gate, up, y) = (c.input("gate", gate, n)?, c.input("up", up, n)?, c.output("out", out, n)?);
        c.host(&[("gate", "out"), ("up", "out")])?;
        Ok(flat::swiglu(gate, up, y)?)
    }
}
