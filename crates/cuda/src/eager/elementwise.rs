//! Element by element.

use super::gpu::{At, Kernel};
use super::layout::{THREADS, address, aligned};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::eager::{Array, BinaryFn, Float, UnaryFn};

const FILE: &str = "elementwise/eager.cu";

/// Blocks for `n` elements: a thread has 16 bytes.
fn grid(n: usize, float: Float) -> Grid {
    Grid::linear(n.div_ceil(THREADS * 16 / float.size()), THREADS as u32)
}

/// y = op(x); `y` may be `x`.
///
/// # Safety
/// See [the module](super); both n elements.
pub unsafe fn unary(at: &At<'_>, op: UnaryFn, x: Array, y: Array, n: usize) -> Result<()> {
    let (name, a) = match op {
        UnaryFn::Silu => ("silu_fwd", 0.0),
        UnaryFn::GeluTanh => ("gelu_tanh", 0.0),
        UnaryFn::GeluErf => ("gelu_erf", 0.0),
        UnaryFn::Square => ("square", 0.0),
        UnaryFn::Scale(a) => ("scale", a),
    };
    if n == 0 {
        return Ok(());
    }
    let args = Args::new().ptr(address(y)).ptr(address(x)).u64(n as u64).u32(aligned(&[x, y]).into()).f64(a);
    at.launch(&Kernel::of(FILE, name, x.float), grid(n, x.float), args)
}

/// d_x = d_y op'(x); `d_x` may be `d_y` or `x`. The gradient of a scale reads no `x`.
///
/// # Safety
/// See [the module](super); all n elements.
pub unsafe fn unary_bwd(at: &At<'_>, op: UnaryFn, [d_y, x]: [Array; 2], d_x: Array, n: usize) -> Result<()> {
    let name = match op {
        UnaryFn::Silu => "silu_bwd",
        UnaryFn::GeluTanh => "gelu_tanh_bwd",
        UnaryFn::GeluErf => "gelu_erf_bwd",
        UnaryFn::Square => "square_bwd",
        // SAFETY: the caller's.
        UnaryFn::Scale(_) => return unsafe { unary(at, op, d_y, d_x, n) },
    };
    two(at, name, [d_y, x], d_x, n)
}

/// y = op(a, b); `y` may be `a` or `b`.
///
/// # Safety
/// See [the module](super); all n elements.
pub unsafe fn binary(at: &At<'_>, op: BinaryFn, [a, b]: [Array; 2], y: Array, n: usize) -> Result<()> {
    let name = match op {
        BinaryFn::Add => "add",
        BinaryFn::Mul => "mul",
        BinaryFn::Swiglu => "swiglu",
    };
    two(at, name, [a, b], y, n)
}

fn two(at: &At<'_>, name: &'static str, [a, b]: [Array; 2], y: Array, n: usize) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let args = Args::new().ptr(address(y)).ptr(address(a)).ptr(address(b)).u64(n as u64);
    let args = args.u32(aligned(&[a, b, y]).into());
    at.launch(&Kernel::of(FILE, name, a.float), grid(n, a.float), args)
}

/// d_gate = d_y up silu'(gate), d_up = d_y silu(gate); either may be null, or be an input.
///
/// # Safety
/// See [the module](super); all n elements.
pub unsafe fn swiglu_bwd(
    at: &At<'_>,
    [d_y, gate, up]: [Array; 3],
    [d_gate, d_up]: [Array; 2],
    n: usize,
) -> Result<()> {
    if n == 0 || (d_gate.at.is_null() && d_up.at.is_null()) {
        return Ok(());
    }
    let arrays = [d_gate, d_up, d_y, gate, up];
    let args = arrays.iter().fold(Args::new(), |args, &array| args.ptr(address(array)));
    let args = args.u64(n as u64).u32(aligned(&arrays).into());
    at.launch(&Kernel::of(FILE, "swiglu_bwd", d_y.float), grid(n, d_y.float), args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Float::ALL.map(|float| Kernel::of(FILE, "", float).spec()).into()
}
