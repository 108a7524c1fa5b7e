//! Matrix products.

use super::check::Check;
use super::{Result, Stream};
use crate::cpu::flat::{self, Product};

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
    _stream: Stream,
) -> Result {
    // SAFETY: a batch of one.
    unsafe { product("gemm", [a, b], c, [1, m, n, k], [alpha, beta]) }
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
    _stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { product("gemm_batched", [a, b], c, [batch, m, n, k], [alpha, beta]) }
}

/// # Safety
/// As [`gemm_batched`].
unsafe fn product(
    op: &'static str,
    [a, b]: [*const f32; 2],
    out: *mut f32,
    [batch, m, n, k]: [i64; 4],
    [alpha, beta]: [f32; 2],
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
        let a = c.input("A", a, c.product("A", &[batch, m, k])?)?;
        let b = c.input("B", b, c.product("B", &[batch, k, n])?)?;
        let out = c.output("C", out, outputs)?;
        c.host(&[])?;
        Ok(flat::gemm_batched(a, b, out, batch, &Product { m, n, k, alpha, beta })?)
    }
}
