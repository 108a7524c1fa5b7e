//! Softmax over rows.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, congruent, empty};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use ironhorse_core::eager::{Array, Float, Rows};

pub(super) const FILE: &str = "loss/softmax.cu";

/// Threads of a block that holds a row, by vectors to a thread: `THREADS` of loss/softmax.cu.
pub(super) fn threads(at: &At<'_>) -> impl Fn(u32) -> usize {
    let wide = if at.info().compute.0 >= 10 { 768 } else { 1024 };
    move |vecs| if vecs == 8 { wide } else { 512 }
}

/// Whether rows of all arrays of a call may have edges: they do not all start at a multiple of 16 bytes.
pub(super) fn edges(x: Array, cols: usize) -> bool {
    !super::rows::aligned(&[x], cols, x.float)
}

/// y = softmax(x) in each row; `y` may be `x`. As in PyTorch, a row with NaN or +inf, or of -inf alone, becomes NaN.
///
/// # Safety
/// See [the module](super); both rows·cols elements.
pub unsafe fn softmax(at: &At<'_>, x: Array, y: Array, rows: Rows) -> Result<()> {
    if empty(rows) {
        return Ok(());
    }
    let vector = congruent(&[x, y]);
    let held = Team::held(rows.cols, x.float, edges(x, rows.cols), 8, threads(at)).filter(|_| vector);
    let args = Args::new().ptr(address(y)).ptr(address(x)).u64(rows.rows as u64);
    match held {
        Some(team) => {
            let kernel = Kernel::of(FILE, "softmax_held", x.float).number("VECS", team.vecs);
            at.launch(&kernel, team.grid(rows.rows), args.u32(rows.cols as u32).u32(team.lanes))
        }
        None => {
            let team = Team::streamed(rows.cols, 32, 512);
            let args = args.u64(rows.cols as u64).u32(team.lanes).u32(vector.into());
            at.launch(&Kernel::of(FILE, "softmax_any", x.float), team.grid(rows.rows), args)
        }
    }
}

/// d_x = y (d_y - Σ d_y y) in each row; `d_x` may be `d_y` or `y`.
///
/// # Safety
/// See [the module](super); all rows·cols elements.
pub unsafe fn softmax_bwd(at: &At<'_>, [d_y, y]: [Array; 2], d_x: Array, rows: Rows) -> Result<()> {
    if empty(rows) || d_x.at.is_null() {
        return Ok(());
    }
    let vector = congruent(&[d_y, y, d_x]);
    // Two arrays are held: 1024 threads with four vectors of each.
    let held = Team::held(rows.cols, y.float, edges(y, rows.cols), 4, |_| 1024).filter(|_| vector);
    let args = Args::new().ptr(address(d_x)).ptr(address(d_y)).ptr(address(y)).u64(rows.rows as u64);
    match held {
        Some(team) => {
            let kernel = Kernel::of(FILE, "softmax_bwd_held", y.float).number("VECS", team.vecs);
            at.launch(&kernel, team.grid(rows.rows), args.u32(rows.cols as u32).u32(team.lanes))
        }
        None => {
            let team = Team::streamed(rows.cols, 32, 512);
            let args = args.u64(rows.cols as u64).u32(team.lanes).u32(vector.into());
            at.launch(&Kernel::of(FILE, "softmax_bwd_any", y.float), team.grid(rows.rows), args)
        }
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let each = |float: Float| {
        let held = [1, 2, 4, 8].map(|vecs| Kernel::of(FILE, "", float).number("VECS", vecs));
        held.into_iter().chain([Kernel::of(FILE, "", float)])
    };
    let mut all: Vec<Kernel> = Float::ALL.into_iter().flat_map(each).collect();
    // What `cross_entropy_log_probs` uses.
    all.extend(each(Float::F32).map(|kernel| kernel.number("LOG", 1)));
    all.iter().map(Kernel::spec).collect()
}
