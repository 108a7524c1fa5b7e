//! On heads. Arrays are (batch, positions, heads · head_dim), as a linear layer makes them.

use super::{Object, Result, Two};
use crate::array::{Array as NumpyArray, Call, Sharing, count_is};
use ironhorse::core::eager::{Array, AttentionShape, Pairs, RopeShape, Strides};
use ironhorse::eager;
use pyo3::prelude::*;

/// Pairs (i, i + head_dim / 2) of each head turned by the angle of their position, or back. cos and sin are tables
/// (positions, head_dim / 2), used from row `offset` on.
#[pyfunction]
#[pyo3(signature = (x, cos, sin, offset, back, device, /))]
pub fn nn_rope<'py>(
    x: &Object<'py>,
    cos: &Object<'py>,
    sin: &Object<'py>,
    offset: usize,
    back: bool,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(x.py(), "rope", device)?;
    let x = call.input::<f32>("x", x)?;
    let (cos, sin) = (call.input::<f32>("cos", cos)?, call.input::<f32>("sin", sin)?);
    let &[batch, seq, width] = x.shape() else { return Err(shape_of(&call, "x", &x)) };
    let &[positions, half] = cos.shape() else {
        return Err(call.invalid(format_args!("`cos` is {:?}, expected [positions, pairs]", cos.shape())));
    };
    call.expect("sin", &sin, cos.shape())?;
    if half == 0 || !width.is_multiple_of(2 * half) {
        return Err(call.invalid(format_args!("`x` is {:?}, expected heads of {}", x.shape(), 2 * half)));
    }
    if offset.checked_add(seq).is_none_or(|end| end > positions) {
        let text =
            format_args!("{seq} positions from {offset} on, and there are angles for {positions} only");
        return Err(call.invalid(text));
    }
    let y = call.output_or_new::<f32>("y", None, x.shape())?;
    let (from, tables, to) = (x.at(), [cos.at(), sin.at()], y.at());
    let heads = width / (2 * half);
    let shape = RopeShape { batch, seq, heads, head_dim: 2 * half, pairs: Pairs::Halves };
    call.run(Sharing::Nothing, x.len(), |on| {
        let [cos, sin] = tables.map(|table| Array::f32(on.read(table).wrapping_add(offset * half)));
        let (x, y) = (Array::f32(on.read(from)), Array::f32_mut(on.write(to)));
        // SAFETY: x and y have the sizes of the shape, the tables offset + seq rows; y is new.
        on.direct(|at| unsafe { eager::rope(at, [x, cos, sin], y, &shape, back) })
    })?;
    Ok(y.object())
}

/// softmax(q k^T / sqrt(head_dim)) v of each head, causal, and the logarithm of what the softmax divided by. Query head h
/// uses key head h / (heads / kv_heads); the last query sees all keys.
#[pyfunction]
#[pyo3(signature = (q, k, v, heads, kv_heads, device, /))]
pub fn nn_attention<'py>(
    q: &Object<'py>,
    k: &Object<'py>,
    v: &Object<'py>,
    heads: usize,
    kv_heads: usize,
    device: &str,
) -> Two<'py> {
    let mut call = Call::new(q.py(), "attention", device)?;
    let (q, k, v) = (call.input::<f32>("q", q)?, call.input::<f32>("k", k)?, call.input::<f32>("v", v)?);
    let shape = sizes(&call, [&q, &k, &v], [heads, kv_heads])?;
    let out = call.output_or_new::<f32>("out", None, q.shape())?;
    let lse = call.output_or_new::<f32>("lse", None, &[shape.batch, shape.heads, shape.q_len])?;
    let (inputs, outputs) = ([q.at(), k.at(), v.at()], [out.at(), lse.at()]);
    let work = q.len().saturating_mul(shape.kv_len);
    call.run(Sharing::Nothing, work, |on| {
        let inputs = inputs.map(|input| Array::f32(on.read(input)));
        let outputs = outputs.map(|output| Array::f32_mut(on.write(output)));
        // SAFETY: `sizes` saw that the inputs have those of the shape; outputs are new.
        on.direct(|at| unsafe { eager::attention(at, inputs, outputs, &shape) })
    })?;
    Ok((out.object(), lse.object()))
}

/// The gradients of q, k and v of `nn_attention`: `kept` is (q, k, v, out, lse).
#[pyfunction]
#[pyo3(signature = (d_out, kept, heads, kv_heads, device, /))]
pub fn nn_attention_bwd<'py>(
    d_out: &Object<'py>,
    kept: [Object<'py>; 5],
    heads: usize,
    kv_heads: usize,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>, Object<'py>)> {
    let mut call = Call::new(d_out.py(), "attention_bwd", device)?;
    let [q, k, v, out, lse] = &kept;
    let d_out = call.input::<f32>("d_out", d_out)?;
    let (q, k, v) = (call.input::<f32>("q", q)?, call.input::<f32>("k", k)?, call.input::<f32>("v", v)?);
    let (out, lse) = (call.input::<f32>("out", out)?, call.input::<f32>("lse", lse)?);
    let shape = sizes(&call, [&q, &k, &v], [heads, kv_heads])?;
    call.expect("d_out", &d_out, q.shape())?;
    call.expect("out", &out, q.shape())?;
    count_is(&call, ("lse", &lse), &[shape.batch, shape.heads, shape.q_len].map(|size| size as i64))?;
    let d_q = call.output_or_new::<f32>("d_q", None, q.shape())?;
    let d_k = call.output_or_new::<f32>("d_k", None, k.shape())?;
    let d_v = call.output_or_new::<f32>("d_v", None, v.shape())?;
    let inputs = [d_out.at(), q.at(), k.at(), v.at(), out.at(), lse.at()];
    let outputs = [d_q.at(), d_k.at(), d_v.at()];
    let work = q.len().saturating_mul(shape.kv_len);
    call.run(Sharing::Nothing, work, |on| {
        let inputs = inputs.map(|input| Array::f32(on.read(input)));
        let outputs = outputs.map(|output| Array::f32_mut(on.write(output)));
        // SAFETY: as forward.
        on.direct(|at| unsafe { eager::attention_bwd(at, inputs, outputs, &shape) })
    })?;
    Ok((d_q.object(), d_k.object(), d_v.object()))
}

/// The sizes of a call, checked.
fn sizes(
    call: &Call<'_>,
    [q, k, v]: [&NumpyArray<'_, f32>; 3],
    [heads, kv_heads]: [usize; 2],
) -> PyResult<AttentionShape> {
    let &[batch, q_len, width] = q.shape() else { return Err(shape_of(call, "q", q)) };
    let &[_, kv_len, _] = k.shape() else { return Err(shape_of(call, "k", k)) };
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || !width.is_multiple_of(heads) {
        let text = format_args!("{heads} heads and {kv_heads} of keys do not divide `q`, {:?}", q.shape());
        return Err(call.invalid(text));
    }
    let head_dim = width / heads;
    call.expect("k", k, &[batch, kv_len, kv_heads * head_dim])?;
    call.expect("v", v, k.shape())?;
    let (by_query, by_key) = (
        Strides::position_major(heads, q_len, head_dim),
        Strides::position_major(kv_heads, kv_len, head_dim),
    );
    Ok(AttentionShape {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        scale: 1.0 / (head_dim.max(1) as f64).sqrt(),
        causal: true,
        q: by_query,
        k: by_key,
        v: by_key,
        out: by_query,
    })
}

fn shape_of(call: &Call<'_>, name: &str, array: &NumpyArray<'_, f32>) -> PyErr {
    call.invalid(format_args!(
        "`{name}` is {:?}, expected [batch, positions, heads · head_dim]",
        array.shape()
    ))
}
