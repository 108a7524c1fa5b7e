//! Losses.

use super::check::Check;
use super::{Result, Stream};
use crate::cpu::flat::{self, Router};

/// log_probs = log softmax(logits) for each of `rows` rows of `vocab`; loss\[0\] = mean over the rows of
/// -log_probs\[r, targets\[r\]\] (`reduction="mean"` in PyTorch). `log_probs` may be `logits`. Nothing happens if rows is 0.
///
/// # Safety
/// See [the module](super); logits and log_probs: rows·vocab, targets: rows, loss: 1 element.
///
/// # Errors
/// See [the module](super); a target is not in 0..vocab.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn cross_entropy_forward(
    logits: *const f32,
    targets: *const i32,
    loss: *mut f32,
    log_probs: *mut f32,
    rows: i64,
    vocab: i64,
    _stream: Stream,
) -> Result {
    let mut c = Check::new("cross_entropy_forward");
    let (rows, vocab) = (c.size("rows", rows)?, c.size("vocab", vocab)?);
    let n = c.product("logits", &[rows, vocab])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, targets) = (c.input("logits", logits, n)?, c.input("targets", targets, rows)?);
        let (loss, y) = (c.output("loss", loss, rows.min(1))?, c.output("log_probs", log_probs, n)?);
        c.host(&[("logits", "log_probs")])?;
        c.indices("targets", targets, vocab)?;
        Ok(flat::cross_entropy_forward(x, targets, loss, y)?)
    }
}

/// d_logits = (e^log_probs - onehot(targets\[r\])) · scale, with `log_probs` of [`cross_entropy_forward`]. The gradient of its
/// mean loss has scale 1 / rows. `d_logits` may be `log_probs`.
///
/// # Safety
/// See [the module](super); log_probs and d_logits: rows·vocab, targets: rows elements.
///
/// # Errors
/// See [the module](super); a target is not in 0..vocab.
#[allow(clippy::too_many_arguments)] // the order of the C function
pub unsafe fn cross_entropy_backward(
    log_probs: *const f32,
    targets: *const i32,
    d_logits: *mut f32,
    rows: i64,
    vocab: i64,
    scale: f32,
    _stream: Stream,
) -> Result {
    let mut c = Check::new("cross_entropy_backward");
    let (rows, vocab) = (c.size("rows", rows)?, c.size("vocab", vocab)?);
    let n = c.product("log_probs", &[rows, vocab])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, targets) = (c.input("log_probs", log_probs, n)?, c.input("targets", targets, rows)?);
        let y = c.output("d_logits", d_logits, n)?;
        c.host(&[("log_probs", "d_logits")])?;
        c.indices("targets", targets, vocab)?;
        Ok(flat::cross_entropy_backward(x, targets, y, scale)?)
    }
}

/// The load-balancing loss of a router: f_counts\[e\] = share of the rows that were sent to expert e (a row that names e
/// twice counts once), p_means\[e\] = mean of probs\[:, e\], aux\[0\] = alpha · experts · Σ f_counts · p_means. Even routing
/// gives alpha · k. Nothing happens if rows or experts is 0.
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
    _stream: Stream,
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
        let (probs, chosen) = (c.input("probs", probs, n)?, c.input("idx", idx, choices)?);
        let aux = c.output("aux", aux, 1)?;
        let (f, p) = (c.output("f_counts", f_counts, experts)?, c.output("p_means", p_means, experts)?);
        c.host(&[])?;
        c.indices("idx", chosen, experts)?;
        Ok(flat::aux_loss_forward(&Router { probs, chosen, rows }, aux, [f, p], alpha)?)
    }
}
