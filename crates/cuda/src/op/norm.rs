//! Layer norm and RMS norm. Their kernels take the same arguments, with and without a mean and a bias.

use super::elementwise::ctype;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{
    Accum, LayerNormApply, LayerNormBwd, LayerNormFwd, Op, ResidualLayerNormFwd, ResidualRmsNormFwd,
    RmsNormApply, RmsNormBwd, RmsNormFwd,
};
use ironhorse_core::{DType, Slot};

/// `WARPS` of norm/rows_fwd.cuh, a row each.
const FWD_WARPS: usize = 8;
/// `WARPS` of norm/rows_bwd.cuh.
const BWD_WARPS: usize = 4;
/// Widths whose rows are kept in registers; a kernel is compiled for each width met.
const FAST: std::ops::RangeInclusive<usize> = 256..=3072;
/// The most rows that get a block each, on the path for those widths.
const FEW: usize = 8;
/// The most partial rows of column sums on the path for any width.
const MOST_PARTIALS: usize = 512;

/// Names of files and kernels.
struct Names {
    fwd_file: &'static str,
    bwd_file: &'static str,
    /// With a width, and without: rows, columns; and what adds up the partial sums of both.
    bwd: &'static str,
    bwd_rows: &'static str,
    bwd_columns: &'static str,
    bwd_sums: &'static str,
}

const LAYER: Names = Names {
    fwd_file: "norm/layernorm.cu",
    bwd_file: "norm/layernorm_bwd.cu",
    bwd: "layernorm_bwd",
    bwd_rows: "layernorm_bwd_rows",
    bwd_columns: "layernorm_bwd_columns",
    bwd_sums: "layernorm_bwd_sums",
};

const RMS: Names = Names {
    fwd_file: "norm/rmsnorm.cu",
    bwd_file: "norm/rmsnorm_bwd.cu",
    bwd: "rmsnorm_bwd",
    bwd_rows: "rmsnorm_bwd_rows",
    bwd_columns: "rmsnorm_bwd_columns",
    bwd_sums: "rmsnorm_bwd_sums",
};

/// Whether rows are kept in registers.
fn is_fast(width: usize) -> bool {
    width.is_multiple_of(8) && FAST.contains(&width)
}

/// The width as a constant of the kernel, where rows are whole vectors.
fn with_width(spec: Spec, width: usize) -> (Spec, bool) {
    if is_fast(width) { (spec.define("WIDTH", width as u32), true) } else { (spec, false) }
}

impl Names {
    /// Also whether each row gets a block.
    fn fwd_spec(&self, [act, weight]: [DType; 2], rows: usize, width: usize) -> Result<(Spec, bool)> {
        let spec = Spec::new(self.fwd_file).define("ACT", ctype(act)?).define("WEIGHT", ctype(weight)?);
        let (spec, fast) = with_width(spec, width);
        let few = fast && rows <= FEW;
        Ok(if few { (spec.define("FEW", 1), true) } else { (spec, false) })
    }

    fn bwd_spec(&self, [act, weight, grad]: [DType; 3], width: usize) -> Result<(Spec, bool)> {
        let spec = Spec::new(self.bwd_file)
            .define("ACT", ctype(act)?)
            .define("WEIGHT", ctype(weight)?)
            .define("GRAD", ctype(grad)?);
        Ok(with_width(spec, width))
    }

    fn specs(&self) -> Vec<Spec> {
        use DType::{BF16, F32};
        let mut specs = Vec::new();
        for width in [1, 256, 768, 1024, 1280, 1600, 2048, 3072] {
            for types in [[F32; 3], [BF16; 3], [BF16, BF16, F32]] {
                for rows in [1, FEW + 1] {
                    specs.extend(self.fwd_spec([types[0], types[1]], rows, width).ok().map(|(spec, _)| spec));
                }
                specs.extend(self.bwd_spec(types, width).ok().map(|(spec, _)| spec));
            }
        }
        specs.dedup();
        specs
    }

    /// A kernel of `fwd_file` with these slots as its first arguments, weight and bias at their end.
    fn forward(
        &self,
        cx: &mut Lower<'_>,
        kernel: &'static str,
        slots: &[Slot],
        (inp, weight): (Slot, Slot),
        eps: Option<f32>,
    ) -> Result<()> {
        let (rows, width) = (inp.shape.rows(), inp.shape.cols());
        if rows == 0 {
            return Ok(());
        }
        let args = pointers(cx, Args::new(), slots)?;
        let args = eps.into_iter().fold(args, Args::f32).u32(rows as u32).u32(width as u32);
        let (spec, few) = self.fwd_spec([inp.dtype, weight.dtype], rows, width)?;
        if few {
            let grid = Grid::row_blocks(rows, inp.dtype, width);
            let parameters = slots.iter().position(|slot| *slot == weight).map_or(slots, |at| &slots[at..]);
            return cx.launch_chained(&spec.kernel(kernel), grid, args, parameters);
        }
        let grid = Grid::linear(rows.div_ceil(FWD_WARPS), 32 * FWD_WARPS as u32);
        cx.launch(&spec, kernel, grid, args)
    }
}

fn pointers(cx: &mut Lower<'_>, args: Args, slots: &[Slot]) -> Result<Args> {
    slots.iter().try_fold(args, |args, &slot| Ok(args.ptr(cx.ptr(slot)?)))
}

/// A backward: of layernorm the statistics are mean and rstd and the sums d_weight and d_bias, of rmsnorm the first of the
/// sums and the last of the statistics.
struct Backward<'a> {
    names: &'a Names,
    d_inp: Slot,
    d_out: Slot,
    inp: Slot,
    statistics: &'a [Slot],
    weight: Slot,
    sums: &'a [Slot],
    accum_inp: Accum,
    accum: Accum,
}

/// Address and number of the partial rows of all sums.
type Partials = (u64, usize);

impl Backward<'_> {
    fn launch(&self, cx: &mut Lower<'_>) -> Result<()> {
        let (rows, width) = self.size();
        let types = [self.inp.dtype, self.weight.dtype, self.sums[0].dtype];
        let (spec, fast) = self.names.bwd_spec(types, width)?;
        let (partials, count) = match (rows, fast) {
            (0, _) => (0, 0),
            (_, true) => self.fast(cx, &spec)?,
            (_, false) => self.any(cx, &spec)?,
        };
        let args = pointers(cx, Args::new(), self.sums)?.ptr(partials);
        let args = args.u32(count as u32).u32(width as u32).u32(cx.adds(self.accum).into());
        let grid = Grid::linear((self.sums.len() * width).div_ceil(32), 1024);
        cx.launch(&spec, self.names.bwd_sums, grid, args)
    }

    fn size(&self) -> (usize, usize) {
        (self.inp.shape.rows(), self.inp.shape.cols())
    }

    fn scratch(&self, cx: &mut Lower<'_>, count: usize) -> Result<u64> {
        cx.scratch(count * self.sums.len() * self.inp.shape.cols() * size_of::<f32>())
    }

    fn fast(&self, cx: &mut Lower<'_>, spec: &Spec) -> Result<Partials> {
        let (rows, _) = self.size();
        let threads = 32 * BWD_WARPS as u32;
        let function = cx.kernel(spec, self.names.bwd)?;
        let resident = cx.device.info.sms * function.blocks_per_sm(threads, 0)?.max(1);
        // A block without rows would only write zeros, so there is at most one per row.
        let count = rows.div_ceil(BWD_WARPS).min(resident as usize);
        let partials = self.scratch(cx, count)?;
        let args = pointers(cx, Args::new(), &[self.d_inp])?.ptr(partials);
        let args = pointers(cx, args, &[self.d_out, self.inp])?;
        let args = pointers(cx, args, self.statistics)?;
        let args = pointers(cx, args, &[self.weight])?;
        let args = args.u32(rows as u32).u32(cx.adds(self.accum_inp).into());
        cx.launch_function(self.names.bwd, function, Grid::linear(count, threads), args);
        Ok((partials, count))
    }

    fn any(&self, cx: &mut Lower<'_>, spec: &Spec) -> Result<Partials> {
        let (rows, width) = self.size();
        let args = pointers(cx, Args::new(), &[self.d_inp, self.d_out, self.inp])?;
        let args = pointers(cx, args, self.statistics)?;
        let args = pointers(cx, args, &[self.weight])?;
        let args = args.u32(rows as u32).u32(width as u32).u32(cx.adds(self.accum_inp).into());
        let grid = Grid::linear(rows.div_ceil(BWD_WARPS), 32 * BWD_WARPS as u32);
        cx.launch(spec, self.names.bwd_rows, grid, args)?;

        let chunk = rows.div_ceil(MOST_PARTIALS).max(64);
        let count = rows.div_ceil(chunk);
        let partials = self.scratch(cx, count)?;
        let args = pointers(cx, Args::new().ptr(partials), &[self.d_out, self.inp])?;
        let args = pointers(cx, args, self.statistics)?;
        let args = args.u32(rows as u32).u32(width as u32).u32(chunk as u32);
        let grid = Grid { grid: [width.div_ceil(32) as u32, count as u32, 1], block: [256, 1, 1], shared: 0 };
        cx.launch(spec, self.names.bwd_columns, grid, args)?;
        Ok((partials, count))
    }
}

/// A norm of the sum of two tensors: of layernorm with mean and bias, of rmsnorm without.
pub(super) struct ResidualNorm {
    pub residual: Slot,
    pub out: Slot,
    pub mean: Option<Slot>,
    pub rstd: Slot,
    pub a: Slot,
    pub b: Slot,
    pub weight: Slot,
    pub bias: Option<Slot>,
    pub eps: f32,
}

impl ResidualNorm {
    pub fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::ResidualLayerNormFwd(op) => {
                let ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps } = op;
                let (mean, bias) = (Some(mean), Some(bias));
                Some(Self { residual, out, mean, rstd, a, b, weight, bias, eps })
            }
            Op::ResidualRmsNormFwd(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps }) => {
                Some(Self { residual, out, mean: None, rstd, a, b, weight, bias: None, eps })
            }
            _ => None,
        }
    }

    /// Whether its kernel is that of norm/row_block.cuh.
    pub fn has_row_blocks(&self) -> bool {
        let (rows, width) = (self.a.shape.rows(), self.a.shape.cols());
        is_fast(width) && (1..=FEW).contains(&rows)
    }
}

pub(crate) fn layernorm_fwd(cx: &mut Lower<'_>, op: &LayerNormFwd) -> Result<()> {
    let slots = [op.out, op.mean, op.rstd, op.inp, op.weight, op.bias];
    LAYER.forward(cx, "layernorm_fwd", &slots, (op.inp, op.weight), Some(op.eps))
}

pub(crate) fn residual_layernorm_fwd(cx: &mut Lower<'_>, op: &ResidualLayerNormFwd) -> Result<()> {
    let slots = [op.residual, op.out, op.mean, op.rstd, op.a, op.b, op.weight, op.bias];
    LAYER.forward(cx, "residual_layernorm_fwd", &slots, (op.a, op.weight), Some(op.eps))
}

pub(crate) fn layernorm_apply(cx: &mut Lower<'_>, op: &LayerNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.mean, op.rstd, op.weight, op.bias];
    LAYER.forward(cx, "layernorm_apply", &slots, (op.inp, op.weight), None)
}

pub(crate) fn layernorm_bwd(cx: &mut Lower<'_>, op: &LayerNormBwd) -> Result<()> {
    Backward {
        names: &LAYER,
        d_inp: op.d_inp,
        d_out: op.d_out,
        inp: op.inp,
        statistics: &[op.mean, op.rstd],
        weight: op.weight,
        sums: &[op.d_weight, op.d_bias],
        accum_inp: op.accum_inp,
        accum: op.accum,
    }
    .launch(cx)
}

pub(crate) fn rmsnorm_fwd(cx: &mut Lower<'_>, op: &RmsNormFwd) -> Result<()> {
    let slots = [op.out, op.rstd, op.inp, op.weight];
    RMS.forward(cx, "rmsnorm_fwd", &slots, (op.inp, op.weight), Some(op.eps))
}

pub(crate) fn residual_rmsnorm_fwd(cx: &mut Lower<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let slots = [op.residual, op.out, op.rstd, op.a, op.b, op.weight];
    RMS.forward(cx, "residual_rmsnorm_fwd", &slots, (op.a, op.weight), Some(op.eps))
}

pub(crate) fn rmsnorm_apply(cx: &mut Lower<'_>, op: &RmsNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.rstd, op.weight];
    RMS.forward(cx, "rmsnorm_apply", &slots, (op.inp, op.weight), None)
}

pub(crate) fn rmsnorm_bwd(cx: &mut Lower<'_>, op: &RmsNormBwd) -> Result<()> {
    Backward {
        names: &RMS,
        d_inp: op.d_inp,
        d_out: op.d_out,
        inp: op.inp,
        statistics: &[op.rstd],
        weight: op.weight,
        sums: &[op.d_weight],
        accum_inp: op.accum_inp,
        accum: op.accum,
    }
    .launch(cx)
}

pub(super) fn specs() -> Vec<Spec> {
    [LAYER.specs(), RMS.specs()].concat()
}
