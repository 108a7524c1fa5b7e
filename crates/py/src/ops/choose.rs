//! One index per row of logits.

use super::{Object, Optional, Result};
use crate::array::{Array, Call, Pointer, Sharing, Size, Where, product, rows_of};
use ironhorse::ops;
use pyo3::prelude::*;

/// The index of the largest of each row.
#[pyfunction]
#[pyo3(signature = (logits, out=None, rows=None, vocab=None, device="auto"))]
pub fn argmax<'py>(
    logits: &Object<'py>,
    out: Optional<'_, 'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(logits.py(), "argmax", device)?;
    let logits = call.input::<f32>("logits", logits)?;
    let (rows, vocab) = rows_of(&call, ("logits", &logits), (rows, vocab))?;
    let out = outputs(&mut call, &logits, out, rows)?;
    let (from, to) = (logits.at(), out.at());
    // SAFETY: logits has rows * vocab elements, out rows; `run` refuses arrays that share memory.
    call.run(Sharing::Nothing, logits.len(), |on| unsafe {
        ops::argmax(on.read(from), on.write(to), rows, vocab, on.stream())
    })?;
    Ok(out.object())
}

/// An index drawn from softmax(logits / temperature) of each row.
#[pyfunction]
#[pyo3(signature = (logits, out, seeds, rows=None, vocab=None, temperature=1.0, device="auto"))]
pub fn sample<'py>(
    logits: &Object<'py>,
    out: Optional<'_, 'py>,
    seeds: &Object<'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    temperature: f32,
    device: &str,
) -> Result<'py> {
    let call = Call::new(logits.py(), "sample", device)?;
    let d = Draw { logits, out, seeds, rows, vocab };
    draw(call, d, |[rows, vocab], from, to, seeds| {
        // SAFETY: `draw` gives logits of rows * vocab elements, out and seeds of rows.
        move |on: &Where| unsafe {
            ops::sample(on.read(from), on.write(to), on.read(seeds), rows, vocab, temperature, on.stream())
        }
    })
}

/// As sample, from the k largest of each row.
#[pyfunction]
#[pyo3(signature = (logits, out, seeds, rows, vocab, k, temperature=1.0, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn topk_sample<'py>(
    logits: &Object<'py>,
    out: Optional<'_, 'py>,
    seeds: &Object<'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    k: Size,
    temperature: f32,
    device: &str,
) -> Result<'py> {
    let call = Call::new(logits.py(), "topk_sample", device)?;
    let d = Draw { logits, out, seeds, rows, vocab };
    draw(call, d, |[rows, vocab], from, to, seeds| {
        let k = k.0;
        // SAFETY: as in `sample`.
        move |on: &Where| unsafe {
            ops::topk_sample(
                on.read(from),
                on.write(to),
                on.read(seeds),
                rows,
                vocab,
                k,
                temperature,
                on.stream(),
            )
        }
    })
}

/// As sample, from the largest of each row that together have the share p.
#[pyfunction]
#[pyo3(signature = (logits, out, seeds, rows, vocab, p, temperature=1.0, device="auto"))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn topp_sample<'py>(
    logits: &Object<'py>,
    out: Optional<'_, 'py>,
    seeds: &Object<'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    p: f32,
    temperature: f32,
    device: &str,
) -> Result<'py> {
    let call = Call::new(logits.py(), "topp_sample", device)?;
    let d = Draw { logits, out, seeds, rows, vocab };
    draw(call, d, |[rows, vocab], from, to, seeds| {
        // SAFETY: as in `sample`.
        move |on: &Where| unsafe {
            ops::topp_sample(
                on.read(from),
                on.write(to),
                on.read(seeds),
                rows,
                vocab,
                p,
                temperature,
                on.stream(),
            )
        }
    })
}

/// What the three ways to draw share.
struct Draw<'a, 'py> {
    logits: &'a Object<'py>,
    out: Optional<'a, 'py>,
    seeds: &'a Object<'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
}

/// Checks the arrays, has `plan` make the work of the pointers, and runs it.
fn draw<'py, W>(
    mut call: Call<'py>,
    d: Draw<'_, 'py>,
    plan: impl FnOnce([i64; 2], Pointer<f32>, Pointer<i32>, Pointer<u64>) -> W,
) -> Result<'py>
where
    W: FnOnce(&Where) -> std::result::Result<(), ops::OpError> + Send,
{
    let logits = call.input::<f32>("logits", d.logits)?;
    let (rows, vocab) = rows_of(&call, ("logits", &logits), (d.rows, d.vocab))?;
    let seeds = call.input::<u64>("seeds", d.seeds)?;
    if seeds.count() != rows {
        return Err(call.invalid(format_args!("`seeds` is {:?}, expected {rows} elements", seeds.shape())));
    }
    let out = outputs(&mut call, &logits, d.out, rows)?;
    let work = plan([rows, vocab], logits.at(), out.at(), seeds.at());
    call.run(Sharing::Nothing, logits.len(), work)?;
    Ok(out.object())
}

/// One index per row, in the shape of the logits without their last dimension.
fn outputs<'py>(
    call: &mut Call<'py>,
    logits: &Array<'py, f32>,
    out: Optional<'_, 'py>,
    rows: i64,
) -> PyResult<Array<'py, i32>> {
    let shape = logits.shape().split_last().map_or(&[][..], |(_, before)| before);
    let rows = [rows as usize];
    let shape = if product(shape) == Some(rows[0]) { shape } else { &rows };
    call.output_or_new::<i32>("out", out, shape)
}
