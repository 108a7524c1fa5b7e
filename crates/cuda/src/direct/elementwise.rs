//! Element by element.

use super::gpu::{At, Kernel};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::direct::{Array, Binary, Float, Unary};

const FILE: &str = "direct/map.cu";
const THREADS: u32 = 256;
/// Vectors of 16 bytes for each thread: `UNROLL` of map.cu.
const UNROLL: usize = 2;

/// Blocks for `n` elements.
fn grid(n: usize, float: Float) -> Grid {
    Grid::linear(n.div_ceil(THREADS as usize * UNROLL * 16 / float.size()), THREADS)
}

/// Whether all start at multiples of 16 bytes.
fn aligned(arrays: &[Array]) -> u32 {
    arrays.iter().all(|array| array.at.addr().is_multiple_of(16)).into()
}

fn address(array: Array) -> u64 {
    array.at.addr() as u64
}

/// y = op(x); `y` may be `x`.
///
/// # Safety
/// See [the module](super); both n elements.
pub unsafe fn unary(at: &At<'_>, op: Unary, x: Array, y: Array, n: usize) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let (name, a) = match op {
        Unary::Silu => ("silu_fwd", 0.0),
        Unary::GeluTanh => ("gelu_tanh", 0.0),
        Unary::GeluErf => ("gelu_erf", 0.0),
        Unary::Square => ("square", 0.0),
        Unary::Scale(a) => ("scale", a),
    };
    let args = Args::new().ptr(address(y)).ptr(address(x)).u64(n as u64).u32(aligned(&[x, y])).f64(a);
    at.launch(&Kernel::of(FILE, name, x.float), grid(n, x.float), args)
}

/// y = op(a, b); `y` may be `a` or `b`.
///
/// # Safety
/// See [the module](super); all n elements.
pub unsafe fn binary(at: &At<'_>, op: Binary, a: Array, b: Array, y: Array, n: usize) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let name = match op {
        Binary::Add => "add",
        Binary::Mul => "mul",
        Binary::Swiglu => "swiglu",
    };
    let args = Args::new().ptr(address(y)).ptr(address(a)).ptr(address(b)).u64(n as u64);
    at.launch(&Kernel::of(FILE, name, a.float), grid(n, a.float), args.u32(aligned(&[a, b, y])))
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Float::ALL.map(|float| Kernel::of(FILE, "", float).spec()).into()
}
