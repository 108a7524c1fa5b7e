//! What works on heads: rotary embedding and attention. Arrays are (batch, seq, heads, head_dim).

use super::{Object, Optional, Result};
use crate::array::{Array, Call, Flag, Sharing, Size, count_is};
use ironhorse::ops;
use pyo3::prelude::*;

/// freqs\[p, i\] = p / (base alpha^(d / (d - 2)))^(2 i / d), d = head_dim
#[pyfunction]
#[pyo3(signature = (freqs, max_seq, head_dim, base=10000.0, alpha=1.0, device="auto"))]
pub fn rope_freqs<'py>(
    py: Python<'py>,
    freqs: Optional<'_, 'py>,
    max_seq: Size,
    head_dim: Size,
    base: f32,
    alpha: f32,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(py, "rope_freqs", device)?;
    let (Ok(rows), Ok(width)) = (usize::try_from(max_seq.0), usize::try_from(head_dim.0)) else {
        let text =
            format_args!("max_seq is {} and head_dim {}, which may not be negative", max_seq.0, head_dim.0);
        return Err(call.invalid(text));
    };
    let freqs = call.output_or_new::<f32>("freqs", freqs, &[rows, width / 2])?;
    let to = freqs.at();
    // SAFETY: freqs has max_seq * head_dim / 2 elements.
    call.run(Sharing::Nothing, freqs.len(), |on| unsafe {
        ops::rope_freqs(on.write(to), max_seq.0, head_dim.0, base, alpha, on.stream())
    })?;
    Ok(freqs.object())
}

/// x with pairs of elements of each head rotated by the angles of their position
#[pyfunction]
#[pyo3(signature = (
    x, freqs, out=None, batch=None, seq=None, heads=None, head_dim=None, offset=Size(0), half=Flag(false), device="auto"
))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn rope_forward<'py>(
    x: &Object<'py>,
    freqs: &Object<'py>,
    out: Optional<'_, 'py>,
    batch: Option<Size>,
    seq: Option<Size>,
    heads: Option<Size>,
    head_dim: Option<Size>,
    offset: Size,
    half: Flag,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(x.py(), "rope_forward", device)?;
    let x = call.input::<f32>("x", x)?;
    let freqs = call.input::<f32>("freqs", freqs)?;
    let [batch, seq, heads, head_dim] = four(&call, ("x", &x), [batch, seq, heads, head_dim])?;
    angles(&call, &freqs, (seq, head_dim), offset.0)?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let (from, by, to, offset) = (x.at(), freqs.at(), out.at(), offset.0);
    let rotate = if half.0 { ops::rope_forward_half } else { ops::rope_forward };
    // SAFETY: x and out have as many elements as the sizes say, freqs has offset + seq rows; `run` refuses arrays that
    // overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        rotate(on.read(from), on.read(by), on.write(to), batch, seq, heads, head_dim, offset, on.stream())
    })?;
    Ok(out.object())
}

/// rope_forward of q and of k
#[pyfunction]
#[pyo3(signature = (
    q, k, freqs, q_out=None, k_out=None, batch=None, seq=None, q_heads=None, kv_heads=None, head_dim=None,
    offset=Size(0), half=Flag(false), device="auto"
))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn rope_qk<'py>(
    q: &Object<'py>,
    k: &Object<'py>,
    freqs: &Object<'py>,
    q_out: Optional<'_, 'py>,
    k_out: Optional<'_, 'py>,
    batch: Option<Size>,
    seq: Option<Size>,
    q_heads: Option<Size>,
    kv_heads: Option<Size>,
    head_dim: Option<Size>,
    offset: Size,
    half: Flag,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let mut call = Call::new(q.py(), "rope_qk", device)?;
    let (q, k) = (call.input::<f32>("q", q)?, call.input::<f32>("k", k)?);
    let freqs = call.input::<f32>("freqs", freqs)?;
    let [batch, seq, q_heads, head_dim] = four(&call, ("q", &q), [batch, seq, q_heads, head_dim])?;
    let kv_heads = match kv_heads {
        Some(heads) => heads.0,
        None => four(&call, ("k", &k), [None; 4])?[2],
    };
    count_is(&call, ("k", &k), &[batch, seq, kv_heads, head_dim])?;
    angles(&call, &freqs, (seq, head_dim), offset.0)?;
    let q_out = call.output_or_new::<f32>("q_out", q_out, q.shape())?;
    let k_out = call.output_or_new::<f32>("k_out", k_out, k.shape())?;
    let (q_at, k_at, by, q_to, k_to, offset) = (q.at(), k.at(), freqs.at(), q_out.at(), k_out.at(), offset.0);
    let rotate = if half.0 { ops::rope_qk_half } else { ops::rope_qk };
    // SAFETY: the arrays have as many elements as the sizes say, freqs has offset + seq rows; `run` and the op refuse
    // arrays that overlap.
    call.run(Sharing::Same, q.len() + k.len(), |on| unsafe {
        let (from, to) = ((on.read(q_at), on.read(k_at)), (on.write(q_to), on.write(k_to)));
        let by = on.read(by);
        rotate(from.0, from.1, by, to.0, to.1, batch, seq, q_heads, kv_heads, head_dim, offset, on.stream())
    })?;
    Ok((q_out.object(), k_out.object()))
}

/// softmax(scale q k^T) v for each head
#[pyfunction]
#[pyo3(signature = (
    q, k, v, out=None, batch=None, seq=None, heads=None, head_dim=None, scale=None, causal=Flag(true), device="auto"
))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn flash_attention<'py>(
    q: &Object<'py>,
    k: &Object<'py>,
    v: &Object<'py>,
    out: Optional<'_, 'py>,
    batch: Option<Size>,
    seq: Option<Size>,
    heads: Option<Size>,
    head_dim: Option<Size>,
    scale: Option<f32>,
    causal: Flag,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(q.py(), "flash_attention", device)?;
    let (q, k, v) = (call.input::<f32>("q", q)?, call.input::<f32>("k", k)?, call.input::<f32>("v", v)?);
    let given = batch.is_some();
    let [batch, seq, heads, head_dim] = four(&call, ("q", &q), [batch, seq, heads, head_dim])?;
    let [_, kv_len, kv_heads, _] =
        if given { [batch, seq, heads, head_dim] } else { four(&call, ("k", &k), [None; 4])? };
    count_is(&call, ("k", &k), &[batch, kv_len, kv_heads, head_dim])?;
    count_is(&call, ("v", &v), &[batch, kv_len, kv_heads, head_dim])?;
    if !given
        && (v.shape() != k.shape() || k.shape().last() != q.shape().last() || k.shape()[0] as i64 != batch)
    {
        let (q, k, v) = (q.shape(), k.shape(), v.shape());
        let text = format_args!(
            "`q` is {q:?}, `k` {k:?} and `v` {v:?}, expected [batch, seq, heads, head_dim] with equal batch and head_dim"
        );
        return Err(call.invalid(text));
    }
    let scale = scale.unwrap_or(1.0 / (head_dim.max(1) as f32).sqrt());
    let out = call.output_or_new::<f32>("out", out, q.shape())?;
    let (q_at, k_at, v_at, to) = (q.at(), k.at(), v.at(), out.at());
    let work = q.len().saturating_mul(kv_len.max(1) as usize);
    // SAFETY: the arrays have as many elements as the sizes say; `run` refuses arrays that share memory.
    call.run(Sharing::Nothing, work, |on| unsafe {
        let (q, k, v, out) = (on.read(q_at), on.read(k_at), on.read(v_at), on.write(to));
        ops::attention(
            q,
            k,
            v,
            out,
            batch,
            seq,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            scale,
            causal.0,
            on.stream(),
        )
    })?;
    Ok(out.object())
}

/// batch, seq, heads and head_dim: those given, or those of an array of four dimensions.
fn four(
    call: &Call<'_>,
    (name, array): (&str, &Array<'_, f32>),
    given: [Option<Size>; 4],
) -> PyResult<[i64; 4]> {
    let sizes = match (given, array.shape()) {
        ([Some(a), Some(b), Some(c), Some(d)], _) => [a.0, b.0, c.0, d.0],
        ([None, None, None, None], &[a, b, c, d]) => [a, b, c, d].map(|size| size as i64),
        ([None, None, None, None], found) => {
            let text = format_args!("`{name}` is {found:?}, expected [batch, seq, heads, head_dim]");
            return Err(call.invalid(text));
        }
        _ => return Err(call.invalid("give batch, seq, heads and head_dim, or none of them")),
    };
    count_is(call, (name, array), &sizes)?;
    Ok(sizes)
}

/// Refuses a table of angles for other heads or with too few positions.
fn angles(call: &Call<'_>, freqs: &Array<'_, f32>, (seq, head_dim): (i64, i64), offset: i64) -> PyResult<()> {
    let found = freqs.shape();
    let width = head_dim / 2;
    let rows = if width == 0 { i64::MAX } else { freqs.count() / width };
    let fits = found.len() == 1 || (found.len() == 2 && found[1] as i64 == width);
    if !fits || offset < 0 || offset.checked_add(seq).is_none_or(|need| need > rows) {
        let text = format_args!("`freqs` is {found:?}, expected at least {offset} + {seq} rows of {width}");
        return Err(call.invalid(text));
    }
    Ok(())
}
