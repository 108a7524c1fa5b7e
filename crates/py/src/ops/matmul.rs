//! Matrix products, row-major.

use super::{Object, Optional, Result};
use crate::array::{Array, Call, Sharing, Size, count_is};
use ironhorse::ops;
use pyo3::prelude::*;

/// batch, m, n, k
type Sizes = [i64; 4];

/// c = alpha a b + beta c
#[pyfunction]
#[pyo3(signature = (a, b, c=None, m=None, n=None, k=None, alpha=1.0, beta=0.0, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn gemm<'py>(
    a: &Object<'py>,
    b: &Object<'py>,
    c: Optional<'_, 'py>,
    m: Option<Size>,
    n: Option<Size>,
    k: Option<Size>,
    alpha: f32,
    beta: f32,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(a.py(), "gemm", device)?;
    let (a, b) = (call.input::<f32>("a", a)?, call.input::<f32>("b", b)?);
    let sizes = match (m, n, k) {
        (Some(m), Some(n), Some(k)) => [1, m.0, n.0, k.0],
        (None, None, None) => sizes_of(&call, &a, &b, 2)?,
        _ => return Err(call.invalid("give m, n and k, or none of them")),
    };
    let (c, [_, m, n, k], work) = prepare(&mut call, (&a, &b), c, (sizes, 2), beta)?;
    let (left, right, to) = (a.at(), b.at(), c.at());
    // SAFETY: `prepare` saw that a has m * k, b k * n and c m * n elements; `run` refuses those that share memory.
    call.run(Sharing::Nothing, work, |on| unsafe {
        ops::gemm(on.read(left), on.read(right), on.write(to), m, n, k, alpha, beta, on.stream())
    })?;
    Ok(c.object())
}

/// c\[i\] = alpha a\[i\] b\[i\] + beta c\[i\]
#[pyfunction]
#[pyo3(signature = (a, b, c=None, batch=None, m=None, n=None, k=None, alpha=1.0, beta=0.0, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn gemm_batched<'py>(
    a: &Object<'py>,
    b: &Object<'py>,
    c: Optional<'_, 'py>,
    batch: Option<Size>,
    m: Option<Size>,
    n: Option<Size>,
    k: Option<Size>,
    alpha: f32,
    beta: f32,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(a.py(), "gemm_batched", device)?;
    let (a, b) = (call.input::<f32>("a", a)?, call.input::<f32>("b", b)?);
    let sizes = match (batch, m, n, k) {
        (Some(batch), Some(m), Some(n), Some(k)) => [batch.0, m.0, n.0, k.0],
        (None, None, None, None) => sizes_of(&call, &a, &b, 3)?,
        _ => return Err(call.invalid("give batch, m, n and k, or none of them")),
    };
    let (c, [batch, m, n, k], work) = prepare(&mut call, (&a, &b), c, (sizes, 3), beta)?;
    let (left, right, to) = (a.at(), b.at(), c.at());
    // SAFETY: `prepare` saw that a has batch * m * k, b batch * k * n and c batch * m * n elements; `run` refuses those
    // that share memory.
    call.run(Sharing::Nothing, work, |on| unsafe {
        ops::gemm_batched(
            on.read(left),
            on.read(right),
            on.write(to),
            batch,
            m,
            n,
            k,
            alpha,
            beta,
            on.stream(),
        )
    })?;
    Ok(c.object())
}

/// The sizes that two arrays of `dims` dimensions have.
fn sizes_of(call: &Call<'_>, a: &Array<'_, f32>, b: &Array<'_, f32>, dims: usize) -> PyResult<Sizes> {
    let sizes = match (a.shape(), b.shape()) {
        (&[m, k], &[k2, n]) if dims == 2 && k == k2 => Some([1, m, n, k]),
        (&[batch, m, k], &[batch2, k2, n]) if dims == 3 && (batch, k) == (batch2, k2) => {
            Some([batch, m, n, k])
        }
        _ => None,
    };
    let expected = if dims == 2 { "[m, k] and [k, n]" } else { "[batch, m, k] and [batch, k, n]" };
    sizes.map(|sizes| sizes.map(|size| size as i64)).ok_or_else(|| {
        call.invalid(format_args!("`a` is {:?} and `b` {:?}, expected {expected}", a.shape(), b.shape()))
    })
}

/// The output, the sizes, and the number of multiply-adds.
fn prepare<'py>(
    call: &mut Call<'py>,
    (a, b): (&Array<'py, f32>, &Array<'py, f32>),
    c: Optional<'_, 'py>,
    (sizes, dims): (Sizes, usize),
    beta: f32,
) -> PyResult<(Array<'py, f32>, Sizes, usize)> {
    let [batch, m, n, k] = sizes;
    count_is(call, ("a", a), &[batch, m, k])?;
    count_is(call, ("b", b), &[batch, k, n])?;
    if c.is_none() && beta != 0.0 {
        return Err(call.invalid(format_args!("beta is {beta}, which needs a `c` to add to")));
    }
    let shape = [batch, m, n].map(|size| size.max(0) as usize);
    let c = call.output_or_new::<f32>("c", c, &shape[3 - dims..])?;
    Ok((c, sizes, a.len().saturating_mul(shape[2])))
}
