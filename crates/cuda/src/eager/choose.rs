//! Choosing one index per row of logits.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, empty};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::eager::{Array, Float, Rows};

const FILE: &str = "sampling/eager.cu";

/// How to draw; the rules are those of `ironhorse_cpu::flat::Choice`.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Logits are divided by this; 0 means the largest wins.
    pub temperature: f32,
    /// Only the k largest, and what ties with the k-th; at least 1.
    pub top_k: Option<usize>,
    /// Only the largest that together reach this share, in (0, 1].
    pub top_p: Option<f32>,
}

/// out\[row\] = index of the largest of the row, the lowest among equals, the first NaN if there is one.
///
/// # Safety
/// See [the module](super); logits: rows·cols f32, 1 <= cols < 2³¹, out: rows elements.
pub unsafe fn argmax(at: &At<'_>, logits: Array, out: *mut i32, rows: Rows) -> Result<()> {
    if empty(rows) {
        return Ok(());
    }
    let team = Team::streamed(rows.cols, 16, 512);
    let args = Args::new().ptr(out.addr() as u64).ptr(address(logits));
    let args = args.u64(rows.rows as u64).u64(rows.cols as u64).u32(team.lanes);
    at.launch(&Kernel::of(FILE, "argmax", logits.float), team.grid(rows.rows), args)
}

/// out\[row\] = an index drawn by `choice` with the random number `uniform_of_seed`(seeds\[row\]); -1 if a row holds NaN or +inf,
/// or nothing above -inf.
///
/// # Safety
/// See [the module](super); logits: rows·cols f32, 1 <= cols < 2³¹, out and seeds: rows elements.
pub unsafe fn choose(
    at: &At<'_>,
    logits: Array,
    seeds: *const u64,
    out: *mut i32,
    rows: Rows,
    choice: &Choice,
) -> Result<()> {
    if empty(rows) {
        return Ok(());
    }
    // Weights are whole multiples of 1 / scale; the sum of all stays below 2^63, and a weight has 52 bits at most.
    let scale = 2_f64.powi((62 - (usize::BITS - rows.cols.leading_zeros()) as i32).min(52));
    let top_k = choice.top_k.map_or(0, |k| u32::try_from(k).unwrap_or(0));
    let args = Args::new().ptr(out.addr() as u64).ptr(address(logits)).ptr(seeds.addr() as u64);
    let args = args.u32(rows.cols as u32).f64(choice.temperature.into()).f64(scale);
    let top_p = if choice.top_k.is_some() { 0.0 } else { choice.top_p.unwrap_or(0.0) };
    let args = args.u32(top_k).f32(top_p);
    at.launch(&Kernel::of(FILE, "choose", logits.float), Grid::linear(rows.rows, 1024), args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Kernel::of(FILE, "", Float::F32).spec()]
}
