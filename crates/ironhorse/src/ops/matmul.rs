//! Matrix products.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::Array;
use crate::cpu::flat::{self, Part, Product};
use crate::cuda::eager;

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
    unsafe { product("gemm", [a, b], c, [1, m, n, k], [alpha, beta], [false; 2], stream) }
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
    unsafe { product("gemm_batched", [a, b], c, [batch, m, n, k], [alpha, beta], [false; 2], stream) }
}

/// As [`gemm`]; where `transposed` says so A lies in memory as (K, M), and B as (N, K).
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gemm_transposed(
    ab: [*const f32; 2],
    c: *mut f32,
    [m, n, k]: [i64; 3],
    transposed: [bool; 2],
    factors: [f32; 2],
    stream: Stream,
) -> Result {
    // SAFETY: the caller's.
    unsafe { product("gemm_transposed", ab, c, [1, m, n, k], factors, transposed, stream) }
}

/// # Safety
/// As [`gemm_batched`].
unsafe fn product(
    op: &'static str,
    [a, b]: [*const f32; 2],
    out: *mut f32,
    [batch, m, n, k]: [i64; 4],
    [alpha, beta]: [f32; 2],
    transposed: [bool; 2],
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
        let shape = eager::Gemm { batch, m, n, k, alpha, beta, transposed };
        run(
            place,
            stream,
            || Ok(flat::gemm_batched(x, y, z, batch, &Product { m, n, k, alpha, beta, transposed })?),
            |at| eager::gemm(at, [Array::f32(a), Array::f32(b)], Array::f32_mut(out), &shape),
        )
    }
}

/// Which product of a linear layer of several experts: each has a stretch of rows and a weight (O, I) of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouped {
    /// out (rows, O) = inp (rows, I) times the transposed weight: a is inp, b the weights (E, O, I).
    Forward,
    /// d_inp (rows, I) = d_out (rows, O) times the weight: a is d_out, b the weights.
    Input,
    /// d_weight (E, O, I) += transposed d_out (rows, O) times inp (rows, I): a is d_out, b is inp.
    Weight,
}

/// The products of a linear layer of experts. Rows `offsets[e]..offsets[e + 1]` are those of expert e; one without rows
/// costs nothing.
///
/// # Safety
/// See [the module](super); sizes as [`Grouped`] says, with `offsets.len() - 1` experts and `offsets`' last as rows.
///
/// # Errors
/// See [the module](super); offsets that do not begin with 0 or that fall.
pub unsafe fn gemm_grouped(
    kind: Grouped,
    [a, b]: [*const f32; 2],
    out: *mut f32,
    [outs, ins]: [i64; 2],
    offsets: &[i32],
    stream: Stream,
) -> Result {
    let mut c = Check::new("gemm_grouped");
    let (outs, ins) = (c.size("O", outs)?, c.size("I", ins)?);
    let rows = match offsets {
        [0, .., last] if offsets.is_sorted() => *last as usize,
        _ => return c.refuse("offsets", format_args!("{offsets:?}"), "numbers from 0 that do not fall"),
    };
    let weights = c.product("weight", &[offsets.len() - 1, outs, ins])?;
    let (wide, narrow) = (c.product("out", &[rows, outs])?, c.product("inp", &[rows, ins])?);
    let [a_len, b_len, c_len] = match kind {
        Grouped::Forward => [narrow, weights, wide],
        Grouped::Input => [wide, weights, narrow],
        Grouped::Weight => [wide, narrow, weights],
    };
    if c_len == 0 {
        return Ok(());
    }
    let parts: Vec<Part> = (0..offsets.len() - 1).map(|e| part(kind, offsets, e, [outs, ins])).collect();
    // SAFETY: the caller's, which the checks complete; the parts lie inside, and write apart.
    unsafe {
        let (x, y) = (c.input("a", a, a_len)?, c.input("b", b, b_len)?);
        let z = c.output("c", out, c_len)?;
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::gemm_parts(x, y, z, &parts)?),
            |at| {
                parts.iter().try_for_each(|Part { product, from }| {
                    let Product { m, n, k, alpha, beta, transposed } = *product;
                    let shape = eager::Gemm { batch: 1, m, n, k, alpha, beta, transposed };
                    let (a, b) = (a.wrapping_add(from[0]), b.wrapping_add(from[1]));
                    let to = out.wrapping_add(from[2]);
                    eager::gemm(at, [Array::f32(a), Array::f32(b)], Array::f32_mut(to), &shape)
                })
            },
        )
    }
}

/// The product of expert `e`.
fn part(kind: Grouped, offsets: &[i32], e: usize, [outs, ins]: [usize; 2]) -> Part {
    let (first, rows) = (offsets[e] as usize, (offsets[e + 1] - offsets[e]) as usize);
    let (wide, narrow, weight) = (first * outs, first * ins, e * outs * ins);
    let product = |[m, n, k]: [usize; 3], beta, transposed| Product { m, n, k, alpha: 1.0, beta, transposed };
    match kind {
        Grouped::Forward => {
            Part { product: product([rows, outs, ins], 0.0, [false, true]), from: [narrow, weight, wide] }
        }
        Grouped::Input => {
            Part { product: product([rows, ins, outs], 0.0, [false; 2]), from: [wide, weight, narrow] }
        }
        Grouped::Weight => {
            Part { product: product([outs, ins, rows], 1.0, [true, false]), from: [wide, narrow, weight] }
        }
    }
}
