//! Gradients of RMS and layer normalisation.

use super::layout::{pointers, whole_vectors};
use super::rows::{Team, congruent, empty};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::{Kernel, Spec};
use ironhorse_core::eager::{Array, Float, LayerNormBwd, RmsNormBwd, Rows};

/// Threads of a block: `THREADS` of norm/eager_bwd.cu.
const THREADS: usize = 640;
/// Rows whose columns one block of `norm_bwd_columns` sums, at least.
const CHUNK: usize = 64;

/// `LAYER` is 1 for a layer norm, 0 for an RMS norm; `VECS` compiles the kernel that holds a row in registers.
fn spec(float: Float, layer: bool, vecs: Option<u32>) -> Spec {
    let spec = Spec::of("norm/eager_bwd.cu", float).define("LAYER", u32::from(layer));
    vecs.into_iter().fold(spec, |spec, vecs| spec.define("VECS", vecs))
}

/// The most vectors of a thread: 16 columns, or 8 of f64.
fn most_vecs(float: Float) -> u32 {
    if float.size() == 2 { 2 } else { 4 }
}

/// One call of norm/eager_bwd.cu: a layer norm, of which an RMS norm is the one without mean and bias.
struct Backward<'a> {
    op: &'a LayerNormBwd,
    layer: bool,
}

impl Backward<'_> {
    fn kernel(&self, name: &'static str, vecs: Option<u32>) -> Kernel {
        spec(self.op.x.float, self.layer, vecs).kernel(name)
    }

    /// Sums per column: of the weight, and of the bias.
    fn columns(&self) -> usize {
        self.op.rows.cols * if self.layer { 2 } else { 1 }
    }

    fn wants_sums(&self) -> bool {
        self.op.d_weight.is_some() || self.op.d_bias.is_some()
    }

    /// Memory for `count` partial rows.
    fn partials(&self, at: &OnStream<'_>, count: usize) -> Result<u64> {
        if !self.wants_sums() {
            return Ok(0);
        }
        at.scratch(count * self.columns() * self.op.x.float.acc().size())
    }

    fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let LayerNormBwd { d_y, x, weight, d_x, d_weight, d_bias, rows: Rows { rows, cols }, .. } = *self.op;
        if empty(self.op.rows) {
            return at.fill_zero([d_weight, d_bias], cols); // sums over no rows
        }
        let acc = x.float.acc().size();
        let limit = at.info().shared_per_block;
        let team = Team::held(cols, x.float, false, most_vecs(x.float), |_| THREADS);
        let team = team.filter(|_| self.columns() * acc <= limit);
        let Some(team) = team else { return self.wide(at) };
        // Two rows of x and d_y for each team.
        let staged = 4 * team.vecs as usize * 16 * team.threads as usize;
        let vector = whole_vectors(&[d_y, x, d_x, weight], cols, x.float) && staged <= limit;
        let shared = (self.columns() * acc).max(if vector { staged } else { 0 });
        // Registers of the kernel: 80 a thread, 96 with sums for a bias.
        let resident = if self.layer { 640 } else { 768 } / team.threads as usize;
        // The system takes another kilobyte of shared memory for each block.
        let blocks = resident.min((limit + 1024) / (shared + 1024)).max(1) * at.info().sms as usize;
        let blocks = blocks.min(rows.div_ceil(team.rows()));
        let partials = self.partials(at, blocks)?;
        let kernel = self.kernel("norm_bwd", Some(team.vecs));
        let args = self.args(partials, team.lanes).u32(vector.into());
        at.launch(&kernel, Grid::linear(blocks, team.threads).shared(shared), args)?;
        self.sums(at, partials, blocks)
    }

    fn args(&self, partials: u64, lanes: u32) -> Args {
        let LayerNormBwd { d_y, x, weight, mean, rstd, d_x, rows: Rows { rows, cols }, .. } = *self.op;
        let args = pointers([d_x]).ptr(partials).arrays([d_y, x, weight, mean, rstd]);
        args.u64s([rows, cols]).u32(lanes)
    }

    /// Rows of any width: one kernel for d_x, another for the sums.
    fn wide(&self, at: &OnStream<'_>) -> Result<()> {
        let LayerNormBwd { d_y, x, mean, rstd, d_x, rows: Rows { rows, cols }, .. } = *self.op;
        let vector = congruent(&[d_y, x, d_x]);
        if d_x.is_some() {
            let args = self.args(0, 512).u32(vector.into());
            at.launch(&self.kernel("norm_bwd_rows", None), Grid::linear(rows, 512), args)?;
        }
        if !self.wants_sums() {
            return Ok(());
        }
        let chunk = rows.div_ceil(256).max(CHUNK);
        let chunks = rows.div_ceil(chunk);
        let partials = self.partials(at, chunks)?;
        let args = Args::new().ptr(partials).arrays([d_y, x, mean, rstd]).u64s([rows, cols, chunk]);
        let grid = Grid::plane(cols.div_ceil(256), chunks, 256);
        at.launch(&self.kernel("norm_bwd_columns", None), grid, args)?;
        self.sums(at, partials, chunks)
    }

    fn sums(&self, at: &OnStream<'_>, partials: u64, count: usize) -> Result<()> {
        if !self.wants_sums() {
            return Ok(());
        }
        let args = pointers([self.op.d_weight, self.op.d_bias]).ptr(partials);
        let args = args.u32(count as u32).u64(self.op.rows.cols as u64);
        at.launch(&self.kernel("norm_bwd_sums", None), Grid::linear(self.columns().div_ceil(32), 1024), args)
    }
}

/// A null `weight` is 1.
impl Launch for RmsNormBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { d_y, x, weight, rstd, d_x, d_weight, rows } = *self;
        let none = Array::none(x.float);
        let op = &LayerNormBwd { d_y, x, weight, mean: none, rstd, d_x, d_weight, d_bias: none, rows };
        Backward { op, layer: false }.launch(at)
    }
}

/// A null `weight` is 1.
impl Launch for LayerNormBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        Backward { op: self, layer: true }.launch(at)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    let mut all = Vec::new();
    for float in Float::ALL {
        for layer in [false, true] {
            let vecs = [1, 2, 4].into_iter().filter(|&vecs| vecs <= most_vecs(float)).map(Some);
            all.extend(vecs.chain([None]).map(|vecs| spec(float, layer, vecs)));
        }
    }
    all
}
