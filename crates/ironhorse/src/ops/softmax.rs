//! Softmax over rows.

use super::check::Check;
use super::place::run;
use super::{Result, Stream};
use crate::core::eager::{Array, Rows};
use crate::cpu::flat;
use crate::cuda::eager;

/// out\[r\] = softmax(input\[r\]) for each of `rows` rows of `cols`. `out` may be `input`. As in PyTorch, a row with NaN or
/// +inf, or of -inf alone, becomes NaN.
///
/// # Safety
/// See [the module](super); both rows·cols elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn softmax(input: *const f32, out: *mut f32, rows: i64, cols: i64, stream: Stream) -> Result {
    let mut c = Check::new("softmax");
    let (rows, cols) = (c.size("rows", rows)?, c.size("cols", cols)?);
    let n = c.product("input", &[rows, cols])?;
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let (x, y) = (c.input("input", input, n)?, c.output("out", out, n)?);
        let place = c.place(&[("input", "out")], stream)?;
        run(
            place,
            stream,
            || Ok(flat::softmax(x, y, rows)?),
            |at| eager::softmax(at, Array::f32(input), Array::f32_mut(out), Rows { rows, cols }),
        )
    }
}

/// The choice of a router: per row, softmax over all `cols`, then the k largest, largest first, the lower index first
/// among equals. `weights`: their probabilities divided by their sum, so that they add up to 1; `idx`: where they stand.
/// If the softmax of the row is NaN so are the weights; NaN counts as the largest.
///
/// # Safety
/// See [the module](super); input: rows·cols, weights and idx: rows·k elements.
///
/// # Errors
/// See [the module](super); k is not in 0..=cols.
pub unsafe fn softmax_topk(
    input: *const f32,
    weights: *mut f32,
    idx: *mut i32,
    rows: i64,
    cols: i64,
    k: i64,
    stream: Stream,
) -> Result {
    let mut c = Check::new("softmax_topk");
    let [rows, cols, k] = [c.size("rows", rows)?, c.size("cols", cols)?, c.size("k", k)?];
    if k > cols || cols > i32::MAX as usize {
        return c.refuse("k", format_args!("{k} of {cols}"), "at most `cols`, and that below 2^31");
    }
    let (n, out) = (c.product("input", &[rows, cols])?, c.product("weights", &[rows, k])?);
    // SAFETY: the caller's, which the checks complete.
    unsafe {
        let x = c.input("input", input, n)?;
        let (w, i) = (c.output("weights", weights, out)?, c.output("idx", idx, out)?);
        let place = c.place(&[], stream)?;
        if out == 0 {
            return Ok(());
        }
        run(
            place,
            stream,
            || Ok(flat::softmax_topk(x, w, i, rows, k)?),
            |at| {
                let (input, weights) = (Array::f32(input), Array::f32_mut(weights));
                eager::softmax_topk(at, input, weights, idx, Rows { rows, cols }, k)
            },
        )
    }
}
