//! Choosing tokens. For the random ones the number in \[0, 1) of a row is
//! [`uniform_of_seed`](super::uniform_of_seed)\(seeds\[row\]\): equal seeds, equal tokens, on every machine. Logits in memory of a
//! device cannot be checked beforehand: the index of a row from which nothing can be drawn is -1 there.

use super::check::Check;
use super::error::OpError;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{Array, Rows};
use crate::cpu::flat::{self, Choice};
use crate::cuda::eager;

/// out\[b\] = index of the largest of logits\[b\], the lowest among equals, the first NaN if there is one (as in PyTorch and
/// numpy); `batch` rows of `vocab`.
///
/// # Safety
/// See [the module](super); logits: batch·vocab, out: batch elements.
///
/// # Errors
/// See [the module](super); vocab is 0 and batch is not.
pub unsafe fn argmax(logits: *const f32, out: *mut i32, batch: i64, vocab: i64, stream: Stream) -> Result {
    let mut c = Check::new("argmax");
    let (size, n) = rows(&c, batch, vocab)?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, indices) = (c.input("logits", logits, n)?, c.output("out", out, size.rows)?);
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || Ok(flat::argmax(x, indices)?),
            |at| eager::argmax(at, Array::f32(logits), out, size),
        )
    }
}

/// out\[b\] = an index drawn from softmax(logits\[b\] / temperature). A temperature of 0 takes the largest. A logit of -inf is
/// never drawn.
///
/// # Safety
/// See [the module](super); logits: batch·vocab, out and seeds: batch elements.
///
/// # Errors
/// See [the module](super); the temperature is negative or not finite, a logit is NaN or +inf, all of a row are -inf.
pub unsafe fn sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: i64,
    vocab: i64,
    temperature: f32,
    stream: Stream,
) -> Result {
    let choice = Choice { temperature, top_k: None, top_p: None };
    // SAFETY: the caller's.
    unsafe { draw(Check::new("sample"), (logits, out, seeds), [batch, vocab], choice, stream) }
}

/// [`sample`] from the k most likely only, and those that tie with the k-th (as Hugging Face's `generate`). A k beyond `vocab`
/// means all.
///
/// # Safety
/// As [`sample`].
///
/// # Errors
/// As [`sample`]; k is below 1.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn topk_sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: i64,
    vocab: i64,
    k: i64,
    temperature: f32,
    stream: Stream,
) -> Result {
    let c = Check::new("topk_sample");
    let choice = Choice { temperature, top_k: Some(c.positive("k", k)?), top_p: None };
    // SAFETY: the caller's.
    unsafe { draw(c, (logits, out, seeds), [batch, vocab], choice, stream) }
}

/// [`sample`] from the smallest set of the most likely tokens that together have at least the probability p, after the
/// temperature.
///
/// # Safety
/// As [`sample`].
///
/// # Errors
/// As [`sample`]; p is not in (0, 1].
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn topp_sample(
    logits: *const f32,
    out: *mut i32,
    seeds: *const u64,
    batch: i64,
    vocab: i64,
    p: f32,
    temperature: f32,
    stream: Stream,
) -> Result {
    let c = Check::new("topp_sample");
    c.number("p", p, |p| p > 0.0 && p <= 1.0, "more than 0 and at most 1")?;
    let choice = Choice { temperature, top_k: None, top_p: Some(p) };
    // SAFETY: the caller's.
    unsafe { draw(c, (logits, out, seeds), [batch, vocab], choice, stream) }
}

/// (rows, elements); an index must exist in every row, and fit an i32.
fn rows(c: &Check, batch: i64, vocab: i64) -> Result<(Rows, usize)> {
    let (batch, vocab) = (c.size("batch", batch)?, c.size("vocab", vocab)?);
    if batch > 0 && (vocab == 0 || vocab > i32::MAX as usize) {
        return c.refuse("vocab", vocab, "at least 1 and below 2^31");
    }
    c.product("out", &[batch])?;
    Ok((Rows { rows: batch, cols: vocab }, c.product("logits", &[batch, vocab])?))
}

/// # Safety
/// As [`sample`].
unsafe fn draw(
    mut c: Check,
    (logits, out, seeds): (*const f32, *mut i32, *const u64),
    [batch, vocab]: [i64; 2],
    choice: Choice,
    stream: Stream,
) -> Result {
    let (size, n) = rows(&c, batch, vocab)?;
    let good = |x: f32| x.is_finite() && x >= 0.0;
    c.number("temperature", choice.temperature, good, "a finite number that is not negative")?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, numbers) = (c.input("logits", logits, n)?, c.input("seeds", seeds, size.rows)?);
        let indices = c.output("out", out, size.rows)?;
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || match flat::choose(x, indices, numbers, &choice)? {
                None => Ok(()),
                Some(row) => {
                    Err(OpError::invalid(format!("{}: row {} of `logits`: {}", c.op(), row.row, row.why)))
                }
            },
            |at| {
                let Choice { temperature, top_k, top_p } = choice;
                let choice = eager::Choice { temperature, top_k, top_p };
                eager::choose(at, Array::f32(logits), seeds, out, size, &choice)
            },
        )
    }
}
