//! Ops on single elements. In each, `out` may be the same array as an input.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{Array, BinaryFn, UnaryFn};
use crate::core::op::Act;
use crate::cpu::flat;
use crate::cuda::eager;

/// out\[i\] = x / (1 + e^-x), x = input\[i\], i < n.
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn silu(input: *const f32, out: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("silu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::silu(x, y)?),
            |at| eager::unary(at, UnaryFn::Silu, Array::f32(input), Array::f32_mut(out), n),
        )
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
pub unsafe fn gelu(input: *const f32, out: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("gelu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::gelu(x, y)?),
            |at| eager::unary(at, UnaryFn::Act(Act::Gelu), Array::f32(input), Array::f32_mut(out), n),
        )
    }
}

/// out\[i\] = scale · input\[i\], i < n.
///
/// # Safety
/// See [the module](super); both n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn scale(input: *const f32, out: *mut f32, scale: f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("scale");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::scale(x, y, scale)?),
            |at| eager::unary(at, UnaryFn::Scale(scale.into()), Array::f32(input), Array::f32_mut(out), n),
        )
    }
}

/// out\[i\] = a\[i\] + b\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn add(a: *const f32, b: *const f32, out: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("add");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, z, y) = (c.input("a", a, n)?, c.input("b", b, n)?, c.output("out", out, n)?);
        let place = c.place(&[("a", "out"), ("b", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::add(x, z, y)?),
            |at| eager::binary(at, BinaryFn::Add, [a, b].map(Array::f32), Array::f32_mut(out), n),
        )
    }
}

/// out\[i\] = a\[i\] · b\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn mul(a: *const f32, b: *const f32, out: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("mul");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, z, y) = (c.input("a", a, n)?, c.input("b", b, n)?, c.output("out", out, n)?);
        let place = c.place(&[("a", "out"), ("b", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::mul(x, z, y)?),
            |at| eager::binary(at, BinaryFn::Mul, [a, b].map(Array::f32), Array::f32_mut(out), n),
        )
    }
}

/// out\[i\] = silu(gate\[i\]) · up\[i\], i < n.
///
/// # Safety
/// See [the module](super); all n elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn swiglu(gate: *const f32, up: *const f32, out: *mut f32, n: i64, stream: Stream) -> Result {
    let mut c = Check::new("swiglu");
    let n = c.size("n", n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, z, y) = (c.input("gate", gate, n)?, c.input("up", up, n)?, c.output("out", out, n)?);
        let place = c.place(&[("gate", "out"), ("up", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::swiglu(x, z, y)?),
            |at| eager::binary(at, BinaryFn::Swiglu, [gate, up].map(Array::f32), Array::f32_mut(out), n),
        )
    }
}
