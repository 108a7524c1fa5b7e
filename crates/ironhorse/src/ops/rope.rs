//! Rotary position embedding.

use super::check::Check;
use super::place::run;
use super::{Pairs, Result, Stream};
use crate::core::eager::{Array, RopeFreqs, RopeShape as Turn};
use crate::cpu::flat::{self, Rope};
use crate::cuda::eager;

/// The angles: freqs\[p, i\] = p / (base · alpha^(d / (d - 2)))^(2 i / d) for p < max_seq, i < d / 2, d = head_dim. alpha is
/// the NTK factor, 1 for none. Computed in f64 and rounded once.
///
/// # Safety
/// See [the module](super); freqs: max_seq·head_dim/2 elements.
///
/// # Errors
/// See [the module](super); head_dim is odd, base or alpha is not a finite number above 0.
pub unsafe fn rope_freqs(
    freqs: *mut f32,
    max_seq: i64,
    head_dim: i64,
    base: f32,
    alpha: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("rope_freqs");
    let (max_seq, head_dim) = (c.size("max_seq", max_seq)?, even(&c, head_dim)?);
    for (name, x) in [("base", base), ("alpha", alpha)] {
        c.number(name, x, |x| x > 0.0 && x.is_finite(), "a finite number above 0")?;
    }
    let n = c.product("freqs", &[max_seq, head_dim / 2])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let table = c.output("freqs", freqs, n)?;
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::rope_freqs(table, head_dim, RopeFreqs::base(head_dim, base, alpha))?),
            |at| eager::rope_freqs(at, freqs, max_seq, head_dim, RopeFreqs::base(head_dim, base, alpha)),
        )
    }
}

/// out = input (batch, seq, heads, head_dim) with the elements 2i and 2i + 1 of each head rotated by freqs\[offset + s, i\]
/// at position s: (a cos - b sin, a sin + b cos). `freqs` is the table of [`rope_freqs`], with at least offset + seq rows;
/// `offset` is how many positions a cache holds already. `out` may be `input`.
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super); head_dim is odd.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn rope_forward(
    input: *const f32,
    freqs: *const f32,
    out: *mut f32,
    batch: i64,
    seq: i64,
    heads: i64,
    head_dim: i64,
    offset: i64,
    stream: Stream,
) -> Result {
    let sizes = [batch, seq, heads, head_dim, offset];
    // SAFETY: the caller's.
    unsafe { one("rope_forward", (input, freqs, out), sizes, Pairs::Interleaved, stream) }
}

/// As [`rope_forward`], but the elements i and i + head_dim/2 are rotated together (GPT-NeoX, Hugging Face).
///
/// # Safety
/// As [`rope_forward`].
///
/// # Errors
/// As [`rope_forward`].
#[allow(clippy::too_many_arguments)] // as `rope_forward`
pub unsafe fn rope_forward_half(
    input: *const f32,
    freqs: *const f32,
    out: *mut f32,
    batch: i64,
    seq: i64,
    heads: i64,
    head_dim: i64,
    offset: i64,
    stream: Stream,
) -> Result {
    let sizes = [batch, seq, heads, head_dim, offset];
    // SAFETY: the caller's.
    unsafe { one("rope_forward_half", (input, freqs, out), sizes, Pairs::Halves, stream) }
}

/// [`rope_forward`] of q (batch, seq, q_heads, head_dim) and k (batch, seq, kv_heads, head_dim) in one call. `q_out` may be
/// `q` and `k_out` may be `k`.
///
/// # Safety
/// See [the module](super); sizes as said.
///
/// # Errors
/// See [the module](super); head_dim is odd.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn rope_qk(
    q: *const f32,
    k: *const f32,
    freqs: *const f32,
    q_out: *mut f32,
    k_out: *mut f32,
    batch: i64,
    seq: i64,
    q_heads: i64,
    kv_heads: i64,
    head_dim: i64,
    offset: i64,
    stream: Stream,
) -> Result {
    let sizes = [batch, seq, q_heads, kv_heads, head_dim, offset];
    // SAFETY: the caller's.
    unsafe { two("rope_qk", [q, k, freqs], [q_out, k_out], sizes, Pairs::Interleaved, stream) }
}

/// As [`rope_qk`], but the elements i and i + head_dim/2 are rotated together.
///
/// # Safety
/// As [`rope_qk`].
///
/// # Errors
/// As [`rope_qk`].
#[allow(clippy::too_many_arguments)] // as `rope_qk`
pub unsafe fn rope_qk_half(
    q: *const f32,
    k: *const f32,
    freqs: *const f32,
    q_out: *mut f32,
    k_out: *mut f32,
    batch: i64,
    seq: i64,
    q_heads: i64,
    kv_heads: i64,
    head_dim: i64,
    offset: i64,
    stream: Stream,
) -> Result {
    let sizes = [batch, seq, q_heads, kv_heads, head_dim, offset];
    // SAFETY: the caller's.
    unsafe { two("rope_qk_half", [q, k, freqs], [q_out, k_out], sizes, Pairs::Halves, stream) }
}

fn even(c: &Check, head_dim: i64) -> Result<usize> {
    match c.size("head_dim", head_dim)? {
        odd if odd % 2 == 1 => c.refuse("head_dim", odd, "an even number"),
        even => Ok(even),
    }
}

/// # Safety
/// As [`rope_forward`].
unsafe fn one(
    op: &'static str,
    (input, freqs, out): (*const f32, *const f32, *mut f32),
    [batch, seq, heads, head_dim, offset]: [i64; 5],
    pairs: Pairs,
    stream: Stream,
) -> Result {
    let mut c = Check::new(op);
    let r = sizes(&c, [batch, seq, heads, head_dim, offset], pairs)?;
    let n = c.product("input", &[r.batch, r.seq, r.heads, r.head_dim])?;
    let angles = table(&c, &r, n)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, by) = (c.input("input", input, n)?, c.input("freqs", freqs, angles)?);
        let y = c.output("out", out, n)?;
        let place = c.place(&[("input", "out")], stream)?;
        let arrays = [(Array::f32(input), Array::f32_mut(out), r.heads)];
        run(
            place,
            stream,
            || Ok(flat::rope_forward(x, by, y, &r)?),
            |at| eager::rope_angles(at, &arrays, freqs, r.offset, &turn(&r)),
        )
    }
}

/// # Safety
/// As [`rope_qk`].
unsafe fn two(
    op: &'static str,
    [q, k, freqs]: [*const f32; 3],
    [q_out, k_out]: [*mut f32; 2],
    [batch, seq, q_heads, kv_heads, head_dim, offset]: [i64; 6],
    pairs: Pairs,
    stream: Stream,
) -> Result {
    let mut c = Check::new(op);
    let of_q = sizes(&c, [batch, seq, q_heads, head_dim, offset], pairs)?;
    let of_k = Rope { heads: c.size("kv_heads", kv_heads)?, ..of_q };
    let q_len = c.product("q", &[of_q.batch, of_q.seq, of_q.heads, of_q.head_dim])?;
    let k_len = c.product("k", &[of_k.batch, of_k.seq, of_k.heads, of_k.head_dim])?;
    let angles = table(&c, &of_q, q_len.max(k_len))?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (from_q, from_k) = (c.input("q", q, q_len)?, c.input("k", k, k_len)?);
        let by = c.input("freqs", freqs, angles)?;
        let (to_q, to_k) = (c.output("q_out", q_out, q_len)?, c.output("k_out", k_out, k_len)?);
        let place = c.place(&[("q", "q_out"), ("k", "k_out")], stream)?;
        let arrays = [(q, q_out, of_q.heads), (k, k_out, of_k.heads)]
            .map(|(from, to, heads)| (Array::f32(from), Array::f32_mut(to), heads));
        run(
            place,
            stream,
            || {
                flat::rope_forward(from_q, by, to_q, &of_q)?;
                Ok(flat::rope_forward(from_k, by, to_k, &of_k)?)
            },
            |at| eager::rope_angles(at, &arrays, freqs, of_q.offset, &turn(&of_q)),
        )
    }
}

fn sizes(c: &Check, [batch, seq, heads, head_dim, offset]: [i64; 5], pairs: Pairs) -> Result<Rope> {
    Ok(Rope {
        batch: c.size("batch", batch)?,
        seq: c.size("seq", seq)?,
        heads: c.size("heads", heads)?,
        head_dim: even(c, head_dim)?,
        offset: c.size("offset", offset)?,
        pairs,
    })
}

/// The sizes as a device's op has them.
fn turn(r: &Rope) -> Turn {
    let &Rope { batch, seq, heads, head_dim, pairs, .. } = r;
    Turn { batch, seq, heads, head_dim, pairs }
}

/// How much of the table a call with `n` elements uses.
fn table(c: &Check, r: &Rope, n: usize) -> Result<usize> {
    if n == 0 {
        return Ok(0);
    }
    match r.offset.checked_add(r.seq) {
        Some(positions) => c.product("freqs", &[positions, r.head_dim / 2]),
        None => c.refuse("offset", r.offset, "a smaller number"),
    }
}
