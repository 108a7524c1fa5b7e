//! Gradients of RMS and layer normalisation.

use super::gpu::{At, Kernel};
use super::rows::{Team, address, aligned, congruent, empty, lane_width};
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use ironhorse_core::eager::{Array, Float, Rows};

const FILE: &str = "norm/eager_bwd.cu";
/// Threads of a block: `THREADS` of norm/eager_bwd.cu.
const THREADS: usize = 640;
/// Rows whose columns one block of `norm_bwd_columns` sums, at least.
const CHUNK: usize = 64;

/// Vectors to a thread, the most: 16 columns, or 8 of f64.
fn most_vecs(float: Float) -> u32 {
    if float.size() == 2 { 2 } else { 4 }
}

/// One call of norm/eager_bwd.cu.
struct Bwd {
    layer: bool,
    d_y: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    d_x: Array,
    d_weight: Array,
    d_bias: Array,
    rows: Rows,
}

impl Bwd {
    fn kernel(&self, name: &'static str) -> Kernel {
        Kernel::of(FILE, name, self.x.float).number("LAYER", self.layer.into())
    }

    /// Sums per column: of the weight, and of the bias.
    fn columns(&self) -> usize {
        self.rows.cols * if self.layer { 2 } else { 1 }
    }

    fn wants_sums(&self) -> bool {
        !self.d_weight.at.is_null() || !self.d_bias.at.is_null()
    }

    /// Memory for so many partial rows.
    fn partials(&self, at: &At<'_>, count: usize) -> Result<u64> {
        if !self.wants_sums() {
            return Ok(0);
        }
        at.scratch(count * self.columns() * self.x.float.acc().size())
    }

    /// The team of a row, if it is not too wide.
    fn team(&self) -> Option<Team> {
        let float = self.x.float;
        let slots = self.rows.cols.div_ceil(lane_width(float));
        let most = most_vecs(float);
        for vecs in [1, 2, 4].into_iter().filter(|&vecs| vecs <= most) {
            let lanes = slots.div_ceil(vecs as usize).next_power_of_two();
            if lanes <= 32 {
                return Some(Team { vecs, lanes: lanes as u32, threads: 128 });
            }
        }
        let lanes = slots.div_ceil(most as usize).next_multiple_of(32);
        (lanes <= THREADS).then_some(Team { vecs: most, lanes: lanes as u32, threads: lanes as u32 })
    }

    fn launch(&self, at: &At<'_>) -> Result<()> {
        let Rows { rows, cols } = self.rows;
        if empty(self.rows) {
            // Sums over no rows.
            for array in [self.d_weight, self.d_bias].into_iter().filter(|array| !array.at.is_null()) {
                // SAFETY: cols elements, by the contract.
                unsafe { at.zero(array.at, cols * array.float.size())? };
            }
            return Ok(());
        }
        let acc = self.x.float.acc().size();
        let limit = at.info().shared_per_block;
        let team = self.team().filter(|_| self.columns() * acc <= limit);
        let Some(team) = team else { return self.wide(at) };
        // Two rows of x and d_y for each team.
        let staged = 4 * team.vecs as usize * 16 * team.threads as usize;
        let vector =
            aligned(&[self.d_y, self.x, self.d_x, self.weight], cols, self.x.float) && staged <= limit;
        let shared = (self.columns() * acc).max(if vector { staged } else { 0 });
        // Registers of the kernel: 80 a thread, 96 with sums for a bias.
        let resident = if self.layer { 640 } else { 768 } / team.threads as usize;
        // Each block has a kilobyte of its own besides.
        let blocks = resident.min((limit + 1024) / (shared + 1024)).max(1) * at.info().sms as usize;
        let blocks = blocks.min(rows.div_ceil(team.rows()));
        let partials = self.partials(at, blocks)?;
        let kernel = self.kernel("norm_bwd").number("VECS", team.vecs);
        let args = self.args(partials, team.lanes).u32(vector.into());
        at.launch(&kernel, Grid::linear(blocks, team.threads).shared(shared), args)?;
        self.sums(at, partials, blocks)
    }

    fn args(&self, partials: u64, lanes: u32) -> Args {
        let args =
            Args::new().ptr(address(self.d_x)).ptr(partials).ptr(address(self.d_y)).ptr(address(self.x));
        let args = args.ptr(address(self.weight)).ptr(address(self.mean)).ptr(address(self.rstd));
        args.u64(self.rows.rows as u64).u64(self.rows.cols as u64).u32(lanes)
    }

    /// Rows of any width: d_x and the sums by a kernel of their own.
    fn wide(&self, at: &At<'_>) -> Result<()> {
        let Rows { rows, cols } = self.rows;
        let vector = congruent(&[self.d_y, self.x, self.d_x]);
        if !self.d_x.at.is_null() {
            let args = self.args(0, 512).u32(vector.into());
            at.launch(&self.kernel("norm_bwd_rows"), Grid::linear(rows, 512), args)?;
        }
        if !self.wants_sums() {
            return Ok(());
        }
        let chunk = rows.div_ceil(256).max(CHUNK);
        let chunks = rows.div_ceil(chunk);
        let partials = self.partials(at, chunks)?;
        let args = Args::new().ptr(partials).ptr(address(self.d_y)).ptr(address(self.x));
        let args = args.ptr(address(self.mean)).ptr(address(self.rstd));
        let args = args.u64(rows as u64).u64(cols as u64).u64(chunk as u64);
        let grid =
            Grid { grid: [cols.div_ceil(256) as u32, chunks as u32, 1], block: [256, 1, 1], shared: 0 };
        at.launch(&self.kernel("norm_bwd_columns"), grid, args)?;
        self.sums(at, partials, chunks)
    }

    fn sums(&self, at: &At<'_>, partials: u64, count: usize) -> Result<()> {
        if !self.wants_sums() {
            return Ok(());
        }
        let args = Args::new().ptr(address(self.d_weight)).ptr(address(self.d_bias)).ptr(partials);
        let args = args.u32(count as u32).u64(self.rows.cols as u64);
        at.launch(&self.kernel("norm_bwd_sums"), Grid::linear(self.columns().div_ceil(32), 1024), args)
    }
}

/// The gradient of [`rmsnorm`](super::rmsnorm), from the `rstd` it kept. What is null is not written; a null `weight` is 1.
///
/// # Safety
/// See [the module](super); d_y, x and d_x: rows·cols, weight and d_weight: cols, rstd: rows elements.
pub unsafe fn rmsnorm_bwd(
    at: &At<'_>,
    [d_y, x, weight, rstd]: [Array; 4],
    [d_x, d_weight]: [Array; 2],
    rows: Rows,
) -> Result<()> {
    let none = Array::none(x.float);
    Bwd { layer: false, d_y, x, weight, mean: none, rstd, d_x, d_weight, d_bias: none, rows }.launch(at)
}

/// The gradient of [`layernorm`](super::layernorm), from the `mean` and `rstd` it kept. What is null is not written; a null
/// `weight` is 1.
///
/// # Safety
/// See [the module](super); d_y, x and d_x: rows·cols, weight, d_weight and d_bias: cols, mean and rstd: rows elements.
pub unsafe fn layernorm_bwd(
    at: &At<'_>,
    [d_y, x, weight, mean, rstd]: [Array; 5],
    [d_x, d_weight, d_bias]: [Array; 3],
    rows: Rows,
) -> Result<()> {
    Bwd { layer: true, d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows }.launch(at)
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let mut all = Vec::new();
    for float in Float::ALL {
        for layer in [0, 1] {
            let kernel = Kernel::of(FILE, "", float).number("LAYER", layer);
            let vecs = [1, 2, 4].into_iter().filter(|&vecs| vecs <= most_vecs(float));
            all.extend(vecs.map(|vecs| kernel.clone().number("VECS", vecs).spec()));
            all.push(kernel.spec());
        }
    }
    all
}
