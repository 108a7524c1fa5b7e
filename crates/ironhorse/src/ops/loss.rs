//! Losses. Indices in memory of a device cannot be checked beforehand: nothing outside the arrays is touched, and what comes
//! of a wrong one is said with each function.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{Array, Rows};
use crate::cpu::flat::{self, Router};
use crate::cuda::eager;

/// log_probs = log softmax(logits) for each of `rows` rows of `vocab`; loss\[0\] = mean over the rows of
/// -log_probs\[r, targets\[r\]\] (`reduction="mean"` in PyTorch). `log_probs` may be `logits`. Nothing happens if rows is 0. On a
/// device a target that is not in 0..vocab makes the loss NaN.
///
/// # Safety
/// See [the module](super); logits and log_probs: rows·vocab, targets: rows, loss: 1 element.
///
/// # Errors
/// See [the module](super); a target is not in 0..vocab, or there are rows and vocab is 0.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn cross_entropy_forward(
    logits: *const f32,
    targets: *const i32,
    loss: *mut f32,
    log_probs: *mut f32,
    rows: i64,
    vocab: i64,
    stream: Stream,
) -> Result {
    let mut c = Check::new("cross_entropy_forward");
    let (rows, vocab) = (c.size("rows", rows)?, c.size("vocab", vocab)?);
    if rows > 0 && vocab == 0 {
        return c.refuse("vocab", 0, "at least 1: no target is a class");
    }
    let n = c.product("logits", &[rows, vocab])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, t) = (c.input("logits", logits, n)?, c.input("targets", targets, rows)?);
        let (mean, y) = (c.output("loss", loss, rows.min(1))?, c.output("log_probs", log_probs, n)?);
        let place = c.place(&[("logits", "log_probs")], stream)?;
        run(
            place,
            stream,
            || {
                c.indices("targets", t, vocab)?;
                Ok(flat::cross_entropy_forward(x, t, mean, y)?)
            },
            |at| {
                let outputs = [Array::f32_mut(loss), Array::f32_mut(log_probs)];
                let rows = Rows { rows, cols: vocab };
                eager::cross_entropy_log_probs(at, Array::f32(logits), targets, outputs, rows)
            },
        )
    }
}

/// d_logits = (e^log_probs - onehot(targets\[r\])) · scale, with `log_probs` of [`cross_entropy_forward`]. The gradient of its
/// mean loss has scale 1 / rows. `d_logits` may be `log_probs`. On a device the row of a target that is not in 0..vocab
/// becomes NaN.
///
/// # Safety
/// See [the module](super); log_probs and d_logits: rows·vocab, targets: rows elements.
///
/// # Errors
/// See [the module](super); a target is not in 0..vocab, or there are rows and vocab is 0.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn cross_entropy_backward(
    log_probs: *const f32,
    targets: *const i32,
    d_logits: *mut f32,
    rows: i64,
    vocab: i64,
    scale: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("cross_entropy_backward");
    let (rows, vocab) = (c.size("rows", rows)?, c.size("vocab", vocab)?);
    if rows > 0 && vocab == 0 {
        return c.refuse("vocab", 0, "at least 1: no target is a class");
    }
    let n = c.product("log_probs", &[rows, vocab])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, t) = (c.input("log_probs", log_probs, n)?, c.input("targets", targets, rows)?);
        let y = c.output("d_logits", d_logits, n)?;
        let place = c.place(&[("log_probs", "d_logits")], stream)?;
        run(
            place,
            stream,
            || {
                c.indices("targets", t, vocab)?;
                Ok(flat::cross_entropy_backward(x, t, y, scale)?)
            },
            |at| {
                let (log_probs, d_logits) = (Array::f32(log_probs), Array::f32_mut(d_logits));
                let rows = Rows { rows, cols: vocab };
                eager::cross_entropy_log_probs_bwd(at, log_probs, targets, d_logits, rows, scale.into())
            },
        )
    }
}

/// The load-balancing loss of a router: f_counts\[e\] = share of the rows that were sent to expert e (a row that names e
/// twice counts once), p_means\[e\] = mean of probs\[:, e\], aux\[0\] = alpha · experts · Σ f_counts · p_means. Even routing
/// gives alpha · k. Nothing happens if rows or experts is 0. On a device an index that is not in 0..experts counts for none.
///
/// # Safety
/// See [the module](super); probs: rows·experts, idx: rows·k, aux: 1, f_counts and p_means: experts elements.
///
/// # Errors
/// See [the module](super); an index is not in 0..experts.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn aux_loss_forward(
    probs: *const f32,
    idx: *const i32,
    aux: *mut f32,
    f_counts: *mut f32,
    p_means: *mut f32,
    rows: i64,
    experts: i64,
    k: i64,
    alpha: f32,
    stream: Stream,
) -> Result {
    let mut c = Check::new("aux_loss_forward");
    let [rows, experts, k] = [c.size("rows", rows)?, c.size("experts", experts)?, c.size("k", k)?];
    let (n, choices) = (c.product("probs", &[rows, experts])?, c.product("idx", &[rows, k])?);
    // Two floats and a count are kept for each expert.
    c.product("f_counts", &[experts, 4])?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let router =
            Router { probs: c.input("probs", probs, n)?, chosen: c.input("idx", idx, choices)?, rows };
        let loss = c.output("aux", aux, 1)?;
        let (f, p) = (c.output("f_counts", f_counts, experts)?, c.output("p_means", p_means, experts)?);
        let place = c.place(&[], stream)?;
        run(
            place,
            stream,
            || {
                c.indices("idx", router.chosen, experts)?;
                Ok(flat::aux_loss_forward(&router, loss, [f, p], alpha)?)
            },
            |at| {
                let router = eager::Router { probs: Array::f32(probs), chosen: idx, rows, experts, k };
                let means = [Array::f32_mut(f_counts), Array::f32_mut(p_means)];
                eager::aux_loss(at, &router, Array::f32_mut(aux), means, alpha.into())
            },
        )
    }
}
