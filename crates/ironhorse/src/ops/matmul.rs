//! Matrix products.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::direct::Array;
use crate::cpu::flat::{self, Product};
use crate::cuda::direct;

/// C = alpha A B + beta C with A (M, K), B (K, N), C (M, N), row-major. With beta = 0 the old C is not read; with alpha = 0
/// neither are A and B.
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super).
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn gemm(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    m: i64,
    n: i64,
    k: i64,
    alpha: f32,
    beta: f32,
    stream: Stream,
) -> Result {
    // SAFETY: a batch of one.
    unsafe { product("gemm", [a, b], c, [1, m, n, k], [alpha, beta], stream) }
}

/// As [`gemm`], for `batch` triples of matrices that lie one after the other.
///
/// # Safety
/// See [the module](super); `batch` times the sizes of [`gemm`].
///
/// # Errors
/// See [the module](super).
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn gemm_batched(
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    batch: i64,
    m: i64,
    n: i64,
    k: i64,
    alpha: f32,
    beta: f32,
    stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { product("gemm_batched", [a, b], c, [batch, m, n, k], [alpha, beta], stream) }
}

/// # Safety
/// As [`gemm_batched`].
unsafe fn product(
    op: &'static str,
    [a, b]: [*const f32; 2],
    out: *mut f32,
    [batch, m, n, k]: [i64; 4],
    [alpha, beta]: [f32; 2],
    stream: Stream,
) -> Result {
    let mut c = Check::new(op);
    let batch = c.size("batch", batch)?;
    let (m, n, k) = (c.size("M", m)?, c.size("N", n)?, c.size("K", k)?);
    let outputs = c.product("C", &[batch, m, n])?;
    if outputs == 0 {
        return Ok(());
    }
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let x = c.input("A", a, c.product("A", &[batch, m, k])?)?;
        let y = c.input("B", b, c.product("B", &[batch, k, n])?)?;
        let z = c.output("C", out, outputs)?;
        let place = c.place(&[], stream)?;
        let shape = direct::Gemm { batch, m, n, k, alpha, beta };
        run(
            place,
            stream,
            || Ok(flat::gemm_batched(x, y, z, batch, &Product { m, n, k, alpha, beta })?),
            |at| direct::gemm(at, [Array::f32(a), Array::f32(b)], Array::f32_mut(out), &shape),
        )
    }
}
