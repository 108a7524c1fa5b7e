//! Cross entropy, the load-balancing loss, and the gradient of an embedding.

use super::{Object, Optional, Result};
use crate::array::{Call, Sharing, Size, rows_of};
use ironhorse::ops;
use pyo3::prelude::*;

/// Refuses rows without classes: there is nothing that a target could name.
fn has_classes(call: &Call<'_>, name: &str, rows: i64, vocab: i64) -> PyResult<()> {
    if rows > 0 && vocab == 0 {
        return Err(call.invalid(format_args!("`{name}` has {rows} rows of 0 classes, expected at least 1")));
    }
    Ok(())
}

/// log_probs = log softmax(logits); loss = mean of -log_probs at the targets
#[pyfunction]
#[pyo3(signature = (logits, targets, loss=None, log_probs=None, rows=None, vocab=None, device="auto"))]
pub fn cross_entropy_forward<'py>(
    logits: &Object<'py>,
    targets: &Object<'py>,
    loss: Optional<'_, 'py>,
    log_probs: Optional<'_, 'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>)> {
    let mut call = Call::new(logits.py(), "cross_entropy_forward", device)?;
    let logits = call.input::<f32>("logits", logits)?;
    let (rows, vocab) = rows_of(&call, ("logits", &logits), (rows, vocab))?;
    has_classes(&call, "logits", rows, vocab)?;
    let targets = call.input::<i32>("targets", targets)?;
    let targets = call.indices(("targets", &targets), rows, vocab)?;
    let loss = call.output_or_filled("loss", loss, &[], f32::NAN)?;
    let log_probs = call.output_or_new::<f32>("log_probs", log_probs, logits.shape())?;
    let (from, to, total) = (logits.at(), log_probs.at(), loss.at());
    // SAFETY: logits and log_probs have rows * vocab elements, targets rows, loss 1; `run` refuses arrays that overlap in
    // part.
    call.run(Sharing::Same, logits.len(), |on| unsafe {
        let targets = on.read(targets.at());
        ops::cross_entropy_forward(
            on.read(from),
            targets,
            on.write(total),
            on.write(to),
            rows,
            vocab,
            on.stream(),
        )
    })?;
    Ok((loss.object(), log_probs.object()))
}

/// d_logits = (e^log_probs - onehot(targets)) scale
#[pyfunction]
#[pyo3(signature = (log_probs, targets, d_logits=None, rows=None, vocab=None, scale=None, device="auto"))]
pub fn cross_entropy_backward<'py>(
    log_probs: &Object<'py>,
    targets: &Object<'py>,
    d_logits: Optional<'_, 'py>,
    rows: Option<Size>,
    vocab: Option<Size>,
    scale: Option<f32>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(log_probs.py(), "cross_entropy_backward", device)?;
    let log_probs = call.input::<f32>("log_probs", log_probs)?;
    let (rows, vocab) = rows_of(&call, ("log_probs", &log_probs), (rows, vocab))?;
    has_classes(&call, "log_probs", rows, vocab)?;
    let targets = call.input::<i32>("targets", targets)?;
    let targets = call.indices(("targets", &targets), rows, vocab)?;
    let d_logits = call.output_or_new::<f32>("d_logits", d_logits, log_probs.shape())?;
    // without a scale: the gradient of the mean
    let scale = scale.unwrap_or(1.0 / rows.max(1) as f32);
    let (from, to) = (log_probs.at(), d_logits.at());
    // SAFETY: log_probs and d_logits have rows * vocab elements, targets rows; `run` refuses arrays that overlap in part.
    call.run(Sharing::Same, log_probs.len(), |on| unsafe {
        ops::cross_entropy_backward(
            on.read(from),
            on.read(targets.at()),
            on.write(to),
            rows,
            vocab,
            scale,
            on.stream(),
        )
    })?;
    Ok(d_logits.object())
}

/// f_counts = share of rows sent to each expert, p_means = its mean probability, aux = alpha experts sum(f p)
#[pyfunction]
#[pyo3(signature = (
    probs, idx, aux=None, f_counts=None, p_means=None, rows=None, experts=None, k=None, alpha=0.01, device="auto"
))]
#[allow(clippy::too_many_arguments, reason = "the order is that of the C function")]
pub fn aux_loss_forward<'py>(
    probs: &Object<'py>,
    idx: &Object<'py>,
    aux: Optional<'_, 'py>,
    f_counts: Optional<'_, 'py>,
    p_means: Optional<'_, 'py>,
    rows: Option<Size>,
    experts: Option<Size>,
    k: Option<Size>,
    alpha: f32,
    device: &str,
) -> PyResult<(Object<'py>, Object<'py>, Object<'py>)> {
    let mut call = Call::new(probs.py(), "aux_loss_forward", device)?;
    let probs = call.input::<f32>("probs", probs)?;
    let (rows, experts) = rows_of(&call, ("probs", &probs), (rows, experts))?;
    let idx = call.input::<i32>("idx", idx)?;
    let k = match k {
        Some(k) => k.0,
        None => idx.count() / rows.max(1),
    };
    let chosen = rows.saturating_mul(k);
    let idx = call.indices(("idx", &idx), chosen, experts)?;
    let aux = call.output_or_filled("aux", aux, &[], 0.0)?;
    let shares = call.output_or_filled("f_counts", f_counts, &[experts as usize], 0.0)?;
    let means = call.output_or_filled("p_means", p_means, &[experts as usize], 0.0)?;
    let (from, total, share, mean) = (probs.at(), aux.at(), shares.at(), means.at());
    // SAFETY: probs has rows * experts elements, idx rows * k, aux 1, the others experts; `run` refuses arrays that share
    // memory.
    call.run(Sharing::Nothing, probs.len(), |on| unsafe {
        let idx = on.read(idx.at());
        let (total, share, mean) = (on.write(total), on.write(share), on.write(mean));
        ops::aux_loss_forward(on.read(from), idx, total, share, mean, rows, experts, k, alpha, on.stream())
    })?;
    Ok((aux.object(), shares.object(), means.object()))
}

/// grad_weight\[idx\[i\]\] += grad_out\[i\]
#[pyfunction]
#[pyo3(signature = (grad_out, idx, grad_weight, n_idx=None, dim=None, device="auto"))]
pub fn scatter_add<'py>(
    grad_out: &Object<'py>,
    idx: &Object<'py>,
    grad_weight: &Object<'py>,
    n_idx: Option<Size>,
    dim: Option<Size>,
    device: &str,
) -> Result<'py> {
    let mut call = Call::new(grad_out.py(), "scatter_add", device)?;
    let grad_out = call.input::<f32>("grad_out", grad_out)?;
    let (n_idx, dim) = rows_of(&call, ("grad_out", &grad_out), (n_idx, dim))?;
    let idx = call.input::<i32>("idx", idx)?;
    let grad_weight = call.output::<f32>("grad_weight", grad_weight)?;
    let table = grad_weight.shape();
    let width = dim.max(1) as usize;
    let fits =
        if table.len() == 1 { grad_weight.len() % width == 0 } else { table.last() == Some(&(dim as usize)) };
    if !fits {
        return Err(call.invalid(format_args!("`grad_weight` is {table:?}, expected rows of {dim}")));
    }
    let idx = call.indices(("idx", &idx), n_idx, (grad_weight.len() / width) as i64)?;
    let (from, to) = (grad_out.at(), grad_weight.at());
    // SAFETY: grad_out has n_idx * dim elements, idx n_idx, each a row of grad_weight; `run` refuses arrays that share
    // memory.
    call.run(Sharing::Nothing, grad_out.len(), |on| unsafe {
        ops::scatter_add(on.read(from), on.read(idx.at()), on.write(to), n_idx, dim, on.stream())
    })?;
    Ok(grad_weight.object())
}
