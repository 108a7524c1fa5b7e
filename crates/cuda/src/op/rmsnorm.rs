//! Normalisation by the root mean square.

use super::elementwise::ctype;
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::{Grid, Lower};
use ironhorse_core::op::{ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};
use ironhorse_core::{DType, Slot};

/// `WARPS` of rmsnorm.cu, a row each.
const FWD_WARPS: usize = 8;
/// `WARPS` of rmsnorm_bwd.cu.
const BWD_WARPS: usize = 4;
/// Widths whose rows are kept in registers; a kernel is compiled for each width met.
const FAST: std::ops::RangeInclusive<usize> = 256..=3072;
/// The most partial rows of column sums on the path for any width.
const MOST_PARTIALS: usize = 512;

/// The width as a constant of the kernel, where rows are whole vectors.
fn with_width(spec: Spec, width: usize) -> (Spec, bool) {
    if width.is_multiple_of(8) && FAST.contains(&width) {
        (spec.define("WIDTH", width), true)
    } else {
        (spec, false)
    }
}

fn fwd_spec(act: DType, weight: DType, width: usize) -> Result<Spec> {
    let spec = Spec::new("rmsnorm.cu").define("ACT", ctype(act)?).define("WEIGHT", ctype(weight)?);
    Ok(with_width(spec, width).0)
}

fn bwd_spec([act, weight, grad]: [DType; 3], width: usize) -> Result<(Spec, bool)> {
    let spec = Spec::new("rmsnorm_bwd.cu")
        .define("ACT", ctype(act)?)
        .define("WEIGHT", ctype(weight)?)
        .define("GRAD", ctype(grad)?);
    Ok(with_width(spec, width))
}

pub(crate) fn rmsnorm_fwd(cx: &mut Lower<'_>, op: &RmsNormFwd) -> Result<()> {
    let slots = [op.out, op.rstd, op.inp, op.weight];
    forward(cx, "rmsnorm_fwd", &slots, (op.inp, op.weight), Some(op.eps))
}

pub(crate) fn residual_rmsnorm_fwd(cx: &mut Lower<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let slots = [op.residual, op.out, op.rstd, op.a, op.b, op.weight];
    forward(cx, "residual_rmsnorm_fwd", &slots, (op.a, op.weight), Some(op.eps))
}

pub(crate) fn rmsnorm_apply(cx: &mut Lower<'_>, op: &RmsNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.rstd, op.weight];
    forward(cx, "rmsnorm_apply", &slots, (op.inp, op.weight), None)
}

/// A kernel of rmsnorm.cu with these slots as its first arguments.
fn forward(
    cx: &mut Lower<'_>,
    name: &'static str,
    slots: &[Slot],
    (inp, weight): (Slot, Slot),
    eps: Option<f32>,
) -> Result<()> {
    let (rows, width) = (inp.shape.rows(), inp.shape.cols());
    if rows == 0 {
        return Ok(());
    }
    let mut args = Args::new();
    for slot in slots {
        args = args.ptr(cx.ptr(*slot)?);
    }
    args = eps.into_iter().fold(args, Args::f32).u32(rows as u32).u32(width as u32);
    let function = cx.kernel(&fwd_spec(inp.dtype, weight.dtype, width)?, name)?;
    cx.launch(name, function, Grid::linear(rows.div_ceil(FWD_WARPS), 32 * FWD_WARPS as u32), args);
    Ok(())
}

pub(crate) fn rmsnorm_bwd(cx: &mut Lower<'_>, op: &RmsNormBwd) -> Result<()> {
    let (rows, width) = (op.inp.shape.rows(), op.inp.shape.cols());
    let (spec, fast) = bwd_spec([op.inp.dtype, op.weight.dtype, op.d_weight.dtype], width)?;
    let (partials, count) = match (rows, fast) {
        (0, _) => (0, 0),
        (_, true) => bwd_fast(cx, op, &spec)?,
        (_, false) => bwd_any(cx, op, &spec)?,
    };
    let args = Args::new().ptr(cx.ptr(op.d_weight)?).ptr(partials).u32(count as u32).u32(width as u32);
    let args = args.u32(cx.adds(op.accum).into());
    let function = cx.kernel(&spec, "rmsnorm_bwd_sums")?;
    cx.launch("rmsnorm_bwd_sums", function, Grid::linear(width.div_ceil(32), 1024), args);
    Ok(())
}

/// Address and number of the partial rows of `d_weight`.
type Partials = (u64, usize);

fn bwd_fast(cx: &mut Lower<'_>, op: &RmsNormBwd, spec: &Spec) -> Result<Partials> {
    let (rows, width) = (op.inp.shape.rows(), op.inp.shape.cols());
    let threads = 32 * BWD_WARPS as u32;
    let function = cx.kernel(spec, "rmsnorm_bwd")?;
    let resident = cx.device.info.sms * function.blocks_per_sm(threads, 0)?.max(1);
    // A block without rows would only write zeros, so there is at most one per row.
    let count = rows.div_ceil(BWD_WARPS).min(resident as usize);
    let partials = cx.scratch(count * width * size_of::<f32>())?;
    let mut args = Args::new().ptr(cx.ptr(op.d_inp)?).ptr(partials);
    for slot in [op.d_out, op.inp, op.rstd, op.weight] {
        args = args.ptr(cx.ptr(slot)?);
    }
    let args = args.u32(rows as u32).u32(cx.adds(op.accum_inp).into());
    cx.launch("rmsnorm_bwd", function, Grid::linear(count, threads), args);
    Ok((partials, count))
}

fn bwd_any(cx: &mut Lower<'_>, op: &RmsNormBwd, spec: &Spec) -> Result<Partials> {
    let (rows, width) = (op.inp.shape.rows(), op.inp.shape.cols());
    let mut args = Args::new();
    for slot in [op.d_inp, op.d_out, op.inp, op.rstd, op.weight] {
        args = args.ptr(cx.ptr(slot)?);
    }
    let args = args.u32(rows as u32).u32(width as u32).u32(cx.adds(op.accum_inp).into());
    let function = cx.kernel(spec, "rmsnorm_bwd_rows")?;
    let grid = Grid::linear(rows.div_ceil(BWD_WARPS), 32 * BWD_WARPS as u32);
    cx.launch("rmsnorm_bwd_rows", function, grid, args);

    let chunk = rows.div_ceil(MOST_PARTIALS).max(64);
    let count = rows.div_ceil(chunk);
    let partials = cx.scratch(count * width * size_of::<f32>())?;
    let mut args = Args::new().ptr(partials);
    for slot in [op.d_out, op.inp, op.rstd] {
        args = args.ptr(cx.ptr(slot)?);
    }
    let args = args.u32(rows as u32).u32(width as u32).u32(chunk as u32);
    let function = cx.kernel(spec, "rmsnorm_bwd_columns")?;
    let grid = Grid { grid: [width.div_ceil(32) as u32, count as u32, 1], block: [256, 1, 1], shared: 0 };
    cx.launch("rmsnorm_bwd_columns", function, grid, args);
    Ok((partials, count))
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let mut specs = Vec::new();
    for width in [1, 256, 768, 1024, 1280, 1600, 2048, 3072] {
        for types in [[F32; 3], [BF16; 3], [BF16, BF16, F32]] {
            specs.extend(fwd_spec(types[0], types[1], width).ok());
            specs.extend(bwd_spec(types, width).ok().map(|(spec, _)| spec));
        }
    }
    specs.dedup();
    specs
}
