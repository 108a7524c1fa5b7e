//! Rotary embedding and attention. Tensors are (batch, heads, positions, head_dim); those stored as (batch, positions, heads,
//! head_dim) are used without a copy, and their results are stored the same way.

use super::call::TorchCall;
use super::kernel::{Outputs, ops};
use super::tensor::{Tensor, contiguous, refuse};
use ironhorse::core::eager::{Attention, AttentionBwd, AttentionShape, Pairs, Rope, RopeShape, Strides};
use ironhorse::ops::Result;

ops! {
    "rope",
        "(Tensor x, Tensor cos, Tensor sin, int offset, bool interleaved, bool back) -> Tensor",
        (x: tensor, cos: tensor, sin: tensor, offset: int, interleaved: boolean, back: boolean)
        => rope([x, cos, sin], offset, interleaved, back);
    "attention",
        "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor out, Tensor lse)",
        (q: tensor, k: tensor, v: tensor, causal: boolean, scale: float) => attention([q, k, v], causal, scale);
    "attention_bwd",
        "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale, \
         bool need_q, bool need_k, bool need_v) -> (Tensor, Tensor, Tensor)",
        (d_out: tensor, q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, causal: boolean, scale: float,
         need_q: boolean, need_k: boolean, need_v: boolean)
        => attention_bwd(Kept { d_out, q, k, v, out, lse }, (causal, scale), false, [need_q, need_k, need_v]);
    // An op of its own: code that torch compiled earlier and kept on disk calls the other as it was.
    "attention_any_order_bwd",
        "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale, \
         bool need_q, bool need_k, bool need_v) -> (Tensor, Tensor, Tensor)",
        (d_out: tensor, q: tensor, k: tensor, v: tensor, out: tensor, lse: tensor, causal: boolean, scale: float,
         need_q: boolean, need_k: boolean, need_v: boolean)
        => attention_bwd(Kept { d_out, q, k, v, out, lse }, (causal, scale), true, [need_q, need_k, need_v]);
}

/// The strides of results in the layout of x: positions before heads if the heads of x are closer together than its
/// positions, else contiguous. `_layout` of python/ironhorse/torch/heads.py is the same rule.
fn layout<T: Tensor>(x: &T) -> Vec<i64> {
    match (x.sizes(), x.strides()) {
        (&[_, heads, positions, dim], &[_, head, position, _]) if head < position => {
            let (heads, positions, dim) = (heads.max(1), positions.max(1), dim.max(1));
            vec![positions * heads * dim, dim, heads * dim, 1]
        }
        (sizes, _) => contiguous(sizes),
    }
}

fn rope<T: Tensor>([x, cos, sin]: [T; 3], offset: i64, interleaved: bool, back: bool) -> Result<Outputs<T>> {
    let call = TorchCall::new("rope", "x", &x)?;
    let sizes = x.sizes().to_vec();
    let &[ref outer @ .., seq, head_dim] = sizes.as_slice() else {
        return refuse(call.op, "x", format_args!("{sizes:?}"), "(..., positions, head_dim)");
    };
    if head_dim % 2 != 0 {
        return refuse(call.op, "x", format_args!("{sizes:?}"), "an even head_dim");
    }
    let &[rows, _] = cos.sizes() else {
        return refuse(call.op, "cos", format_args!("{:?}", cos.sizes()), "(positions, head_dim / 2)");
    };
    call.tensor("cos", &cos, call.acc(), &[rows, head_dim / 2])?;
    call.tensor("sin", &sin, call.acc(), &[rows, head_dim / 2])?;
    if offset < 0 || offset.checked_add(seq).is_none_or(|end| end > rows) {
        let found = format_args!("{rows} positions");
        return refuse(call.op, "cos", found, format_args!("at least offset {offset} + {seq}"));
    }
    let strides = layout(&x);
    let x = call.with_strides(x, &strides)?;
    let (cos, sin) = (call.dense(cos)?, call.dense(sin)?);
    let y: T = call.out_strided(&sizes, &strides, call.float)?;
    let positions_first = strides != contiguous(&sizes);
    let (batch, heads) = match *outer {
        [batch, heads] if positions_first => (batch, heads),
        _ => (outer.iter().product(), 1),
    };
    let shape = RopeShape {
        batch: batch as usize,
        seq: seq as usize,
        heads: heads as usize,
        head_dim: head_dim as usize,
        pairs: if interleaved { Pairs::Interleaved } else { Pairs::Halves },
    };
    let table = |tensor: &T| {
        let mut array = tensor.array(call.acc());
        let bytes = (offset * head_dim / 2) as usize * call.acc().size();
        array.at = array.at.wrapping_byte_add(bytes);
        array
    };
    let (x, to) = (call.array(&x), call.array(&y));
    // SAFETY: x and y have the layout of the shape, the tables offset + seq rows; y is new.
    unsafe { call.eager::<T>(&Rope { x, cos: table(&cos), sin: table(&sin), y: to, shape, back }) }?;
    Ok([Some(y), None, None])
}

fn strides_of(strides: &[i64]) -> Strides {
    Strides { batch: strides[0] as usize, head: strides[1] as usize, position: strides[2] as usize }
}

/// The sizes of a call, checked; strides are filled in by the caller.
fn shape_of<T: Tensor>(
    call: &TorchCall,
    [q, k, v]: [&T; 3],
    causal: bool,
    scale: f64,
) -> Result<AttentionShape> {
    let expected = "(batch, heads, positions, head_dim)";
    let &[batch, heads, q_len, head_dim] = q.sizes() else {
        return refuse(call.op, "q", format_args!("{:?}", q.sizes()), expected);
    };
    let &[_, kv_heads, kv_len, _] = k.sizes() else {
        return refuse(call.op, "k", format_args!("{:?}", k.sizes()), expected);
    };
    call.same("k", k, &[batch, kv_heads, kv_len, head_dim])?;
    call.same("v", v, k.sizes())?;
    if heads != kv_heads && (kv_heads == 0 || heads % kv_heads != 0) {
        return refuse(
            call.op,
            "k",
            format_args!("{kv_heads} heads"),
            format_args!("a divisor of q's {heads}"),
        );
    }
    Ok(AttentionShape {
        batch: batch as usize,
        heads: heads as usize,
        kv_heads: kv_heads as usize,
        q_len: q_len as usize,
        kv_len: kv_len as usize,
        head_dim: head_dim as usize,
        scale,
        causal,
        q: strides_of(q.strides()),
        k: strides_of(k.strides()),
        v: strides_of(v.strides()),
        out: strides_of(&layout(q)),
    })
}

/// The tensor itself if the elements of each head are contiguous, else a copy.
fn with_dense_heads<T: Tensor>(call: &TorchCall, x: T) -> Result<T> {
    if let (&[_, _, _, dim], &[_, _, _, stride]) = (x.sizes(), x.strides())
        && dim > 1
        && stride != 1
    {
        let strides = layout(&x);
        return call.with_strides(x, &strides);
    }
    Ok(x)
}

fn attention<T: Tensor>([q, k, v]: [T; 3], causal: bool, scale: f64) -> Result<Outputs<T>> {
    let call = TorchCall::new("attention", "q", &q)?;
    let out_strides = layout(&q);
    let (q, k, v) = (with_dense_heads(&call, q)?, with_dense_heads(&call, k)?, with_dense_heads(&call, v)?);
    let mut shape = shape_of(&call, [&q, &k, &v], causal, scale)?;
    shape.out = strides_of(&out_strides);
    let out: T = call.out_strided(q.sizes(), &out_strides, call.float)?;
    let lse: T = call.out(&q.sizes()[..3], call.acc())?;
    let op = Attention {
        q: call.array(&q),
        k: call.array(&k),
        v: call.array(&v),
        out: call.array(&out),
        lse: call.statistic(&lse),
        shape,
    };
    // SAFETY: all have the layout of the shape; outputs are new.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(out), Some(lse), None])
}

/// What the backward of attention needs.
struct Kept<T> {
    d_out: T,
    q: T,
    k: T,
    v: T,
    out: T,
    lse: T,
}

fn attention_bwd<T: Tensor>(
    kept: Kept<T>,
    (causal, scale): (bool, f64),
    any_order: bool,
    need: [bool; 3],
) -> Result<Outputs<T>> {
    let Kept { d_out, q, k, v, out, lse } = kept;
    let call = TorchCall::new("attention_bwd", "q", &q)?;
    shape_of(&call, [&q, &k, &v], causal, scale)?;
    call.same("d_out", &d_out, q.sizes())?;
    call.same("out", &out, q.sizes())?;
    call.tensor("lse", &lse, call.acc(), &q.sizes()[..3])?;
    // Gradients have the strides of what they are of, so nothing may overlap or have gaps.
    let strides = [layout(&q), layout(&k), layout(&v)];
    let (q, k, v) = (
        call.with_strides(q, &strides[0])?,
        call.with_strides(k, &strides[1])?,
        call.with_strides(v, &strides[2])?,
    );
    let (out, d_out) = (call.with_strides(out, &strides[0])?, call.with_strides(d_out, &strides[0])?);
    let lse = call.dense(lse)?;
    let mut shape = shape_of(&call, [&q, &k, &v], causal, scale)?;
    shape.out = strides_of(&strides[0]);
    let d_q = call.wanted_strided::<T>(need[0], q.sizes(), &strides[0], call.float)?;
    let d_k = call.wanted_strided::<T>(need[1], k.sizes(), &strides[1], call.float)?;
    let d_v = call.wanted_strided::<T>(need[2], v.sizes(), &strides[2], call.float)?;
    [shape.q, shape.k, shape.v] = [&strides[0], &strides[1], &strides[2]].map(|s| strides_of(s));
    let op = AttentionBwd {
        d_out: call.array(&d_out),
        q: call.array(&q),
        k: call.array(&k),
        v: call.array(&v),
        out: call.array(&out),
        lse: call.statistic(&lse),
        d_q: d_q.array,
        d_k: d_k.array,
        d_v: d_v.array,
        shape,
        any_order,
    };
    // SAFETY: all have the layout of the shape; outputs are new, or null if they are not wanted.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_q.tensor), Some(d_k.tensor), Some(d_v.tensor)])
}
