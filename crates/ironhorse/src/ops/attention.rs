//! Attention.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{self as plain, Array, Float, Strides};
use crate::cpu::flat::{self, Attention};
use crate::cuda::eager;

/// out = softmax(scale Q Kᵀ) V for each sequence and head; all four (batch, seq, heads, head_dim). `causal` other than 0:
/// position i sees positions up to i only. PyTorch's usual scale is 1 / √head_dim.
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super).
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn flash_attention(
    q: *const f32,
    k: *const f32,
    v: *const f32,
    out: *mut f32,
    batch: i64,
    seq: i64,
    heads: i64,
    head_dim: i64,
    scale: f32,
    causal: bool,
    stream: Stream,
) -> Result {
    let sizes = [batch, seq, seq, heads, heads, head_dim];
    // SAFETY: the caller's.
    unsafe { dispatch("flash_attention", [q, k, v], out, sizes, (scale, causal), stream) }
}

/// [`flash_attention`] with fewer heads of keys and values, and as many of them as there are: q, out (batch, q_len, heads,
/// head_dim), k, v (batch, kv_len, kv_heads, head_dim). Query head h uses key head h / (heads / kv_heads), as
/// `enable_gqa=True` does in PyTorch. With `causal`, query i sees the keys up to kv_len - q_len + i: the last query sees
/// all, which is what decoding with a cache needs (PyTorch's `is_causal` counts from the first instead; for q_len = kv_len
/// both are the same). A query that sees no key gets zeros.
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super); kv_heads does not divide heads.
#[allow(clippy::too_many_arguments)] // as `flash_attention`
pub unsafe fn attention(
    q: *const f32,
    k: *const f32,
    v: *const f32,
    out: *mut f32,
    batch: i64,
    q_len: i64,
    kv_len: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    scale: f32,
    causal: bool,
    stream: Stream,
) -> Result {
    let sizes = [batch, q_len, kv_len, heads, kv_heads, head_dim];
    // SAFETY: the caller's.
    unsafe { dispatch("attention", [q, k, v], out, sizes, (scale, causal), stream) }
}

/// # Safety
/// As [`attention`].
unsafe fn dispatch(
    op: &'static str,
    [q, k, v]: [*const f32; 3],
    out: *mut f32,
    [batch, q_len, kv_len, heads, kv_heads, head_dim]: [i64; 6],
    (scale, causal): (f32, bool),
    stream: Stream,
) -> Result {
    let mut c = Check::new(op);
    let at = Attention {
        batch: c.size("batch", batch)?,
        q_len: c.size("q_len", q_len)?,
        kv_len: c.size("kv_len", kv_len)?,
        heads: c.size("heads", heads)?,
        kv_heads: c.size("kv_heads", kv_heads)?,
        head_dim: c.size("head_dim", head_dim)?,
        scale,
        causal,
    };
    let queries = c.product("q", &[at.batch, at.q_len, at.heads, at.head_dim])?;
    let keys = c.product("k", &[at.batch, at.kv_len, at.kv_heads, at.head_dim])?;
    if queries == 0 {
        return Ok(());
    }
    if at.kv_heads == 0 || !at.heads.is_multiple_of(at.kv_heads) {
        return c.refuse("kv_heads", at.kv_heads, format_args!("a divisor of `heads`, {}", at.heads));
    }
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let x = c.input("q", q, queries)?;
        let (y, z) = (c.input("k", k, keys)?, c.input("v", v, keys)?);
        let o = c.output("out", out, queries)?;
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::attention([x, y, z], o, &at)?),
            |gpu| {
                let (inputs, lse) = ([q, k, v].map(Array::f32), Array::none(Float::F32));
                eager::attention(gpu, inputs, [Array::f32_mut(out), lse], &strided(&at))
            },
        )
    }
}

/// The same for arrays (batch, length, heads, head_dim) of a GPU.
fn strided(at: &Attention) -> plain::AttentionShape {
    let Attention { batch, heads, kv_heads, q_len, kv_len, head_dim, scale, causal } = *at;
    let (q, k) = (
        Strides::position_major(heads, q_len, head_dim),
        Strides::position_major(kv_heads, kv_len, head_dim),
    );
    let scale = scale.into();
    plain::AttentionShape {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        scale,
        causal,
        q,
        k,
        v: k,
        out: q,
    }
}
