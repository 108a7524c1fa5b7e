//! The choice of a router, and its load-balancing loss. All f32.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, empty};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::eager::{Array, Float, Rows};

const FILE: &str = "experts/eager_router.cu";

/// Per row the k largest, largest first, the lower index first among equals, NaN before all: `weights` are their softmax
/// among themselves, `indices` where they stand.
///
/// # Safety
/// See [the module](super); x: rows·cols, weights and indices: rows·k elements, k <= cols < 2³¹.
pub unsafe fn softmax_topk(
    at: &At<'_>,
    x: Array,
    weights: Array,
    indices: *mut i32,
    rows: Rows,
    k: usize,
) -> Result<()> {
    if empty(rows) || k == 0 {
        return Ok(());
    }
    let team = Team::streamed(rows.cols, 8, 256);
    let args = Args::new().ptr(address(weights)).ptr(indices.addr() as u64).ptr(address(x));
    let args = args.u64(rows.rows as u64).u64(rows.cols as u64).u64(k as u64).u32(team.lanes);
    at.launch(&Kernel::of(FILE, "softmax_topk", Float::F32), team.grid(rows.rows), args)
}

/// What a router did: `probs` (rows, experts), `chosen` (rows, k).
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Probabilities of all experts.
    pub probs: Array,
    /// The experts each row was sent to; what is not in 0..experts counts for none.
    pub chosen: *const i32,
    /// Rows; not 0.
    pub rows: usize,
    /// Experts; not 0.
    pub experts: usize,
    /// Experts chosen by a row.
    pub k: usize,
}

/// fractions\[e\] = share of the rows sent to e, means\[e\] = mean probability of e,
/// aux = alpha · experts · Σ fractions · means. An expert chosen twice by a row counts once.
///
/// # Safety
/// See [the module](super); fractions and means: experts, aux: 1 element.
pub unsafe fn aux_loss(
    at: &At<'_>,
    router: &Router,
    aux: Array,
    [fractions, means]: [Array; 2],
    alpha: f64,
) -> Result<()> {
    let Router { probs, chosen, rows, experts, k } = *router;
    if rows == 0 || experts == 0 {
        return Ok(());
    }
    let chunk = rows.div_ceil(256).max(64);
    let chunks = rows.div_ceil(chunk);
    let partials = at.scratch(chunks * 2 * experts * size_of::<f64>())?;
    let args = Args::new().ptr(partials).ptr(address(probs)).ptr(chosen.addr() as u64);
    let args = args.u64(rows as u64).u64(experts as u64).u64(k as u64).u64(chunk as u64);
    let grid = Grid { grid: [experts.div_ceil(32) as u32, chunks as u32, 1], block: [256, 1, 1], shared: 0 };
    at.launch(&Kernel::of(FILE, "aux_partials", Float::F32), grid, args)?;
    let args = Args::new().ptr(address(aux)).ptr(address(fractions)).ptr(address(means)).ptr(partials);
    let args = args.u64(rows as u64).u64(experts as u64).u64(chunks as u64).f64(alpha);
    at.launch(&Kernel::of(FILE, "aux_loss", Float::F32), Grid::linear(1, 1024), args)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Kernel::of(FILE, "", Float::F32).spec()]
}
