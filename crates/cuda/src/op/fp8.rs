//! 8-bit numbers and their products: our quantiser, and cuBLASLt.

use super::linear::library_scaled;
use super::lower::Lower;
use super::{fp8_joined, fp8_many};
use crate::args::{Args, Grid};
use crate::device::FP8_COMPUTE;
use crate::gemm::{Addresses, Extra, Problem, Sizes, spec as bias_spec};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Amax, MatmulFp8, Quantize, ScaleUpdate};
use ironhorse_core::{DType, Fp8, Slot};

/// The side of the tile of a block of fp8/quantize.cu.
pub(super) const TILE: usize = 128;
pub(super) const THREADS: u32 = 256;
/// The most blocks of `amax`: enough to fill any GPU.
const AMAX_BLOCKS: usize = 1056;

/// What kernels call a format.
pub(super) fn format_name(format: Fp8) -> &'static str {
    match format {
        Fp8::E4M3 => "E4M3",
        Fp8::E5M2 => "E5M2",
    }
}

fn spec(act: DType, format: Fp8) -> Result<Spec> {
    Ok(Spec::act("fp8/quantize.cu", act)?.define("FORMAT", format_name(format)))
}

pub(crate) fn amax(cx: &mut Lower<'_>, op: &Amax) -> Result<()> {
    if fp8_many::amax(cx, op)? {
        return Ok(());
    }
    let (to, n) = (cx.ptr(op.amax)?, op.inp.numel());
    cx.zero(to, op.amax.bytes());
    if n == 0 {
        return Ok(());
    }
    let blocks = op.inp.bytes().div_ceil(16 * THREADS as usize).min(AMAX_BLOCKS);
    let args = Args::new().ptr(to).ptr(cx.ptr(op.inp)?).u64(n as u64);
    cx.launch(&spec(op.inp.dtype, Fp8::E4M3)?, "amax", Grid::linear(blocks, THREADS), args)
}

pub(crate) fn quantize(cx: &mut Lower<'_>, op: &Quantize) -> Result<()> {
    for slot in [op.out, op.out_t].into_iter().flatten() {
        if slot.dtype != DType::F8(op.format) {
            let what = format!("quantize: the result is {}, expected {}", slot.dtype, op.format);
            return Err(Error::Unsupported(what));
        }
    }
    if fp8_joined::quantize(cx, op)? || fp8_many::quantize(cx, op)? {
        return Ok(());
    }
    let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
    let Some(grid) = tiles(op.inp, TILE) else {
        let most = TILE * usize::from(u16::MAX);
        return Err(Error::Unsupported(format!("quantize: {rows} rows, expected at most {most}")));
    };
    let down = rows.div_ceil(TILE);
    let partials = match op.d_bias {
        Some(_) => cx.scratch((down * cols * size_of::<f32>()).max(16))?,
        None => 0,
    };
    let args = cx.optional_pointers(&[op.out, op.out_t, Some(op.inverse), op.seen])?.ptr(partials);
    let args = cx.append(args, &[Some(op.amax), Some(op.inp)])?;
    let (args, kernel) = match (op.act, op.pre) {
        (_, Some(pre)) => (cx.append(args, &[Some(pre.slot)])?, pre.act.quantizing()[1]),
        (Some(act), None) => (args, act.quantizing()[0]),
        (None, None) => (args, "quantize"),
    };
    let args = scaled(args.u32s([rows, cols]), op);
    cx.launch(&spec(op.inp.dtype, op.format)?, kernel, grid, args)?;
    bias_gradient(cx, op, partials, down)
}

/// The gradient of the bias, if there is one, from partial sums of `rows` rows.
pub(super) fn bias_gradient(cx: &mut Lower<'_>, op: &Quantize, partials: u64, rows: usize) -> Result<()> {
    let cols = op.inp.shape.cols();
    let Some(d_bias) = op.d_bias.filter(|_| cols > 0) else { return Ok(()) };
    let adds = cx.adds(op.accum);
    let args = Args::new().ptr(cx.ptr(d_bias)?).ptr(partials).u32(rows as u32);
    let args = args.u64(cols as u64).u32(adds.into());
    let spec = bias_spec("product/bias.cu", op.inp.dtype, d_bias.dtype)?;
    cx.launch(&spec, "bias_finish", Grid::linear(cols.div_ceil(32), 1024), args)
}

/// Adds how the scale is chosen to other arguments.
pub(super) fn scaled(args: Args, op: &Quantize) -> Args {
    args.u32(op.margin as u32).u32(op.unknown as u32)
}

/// A file for bf16 and a format.
pub(super) fn file_spec(file: &'static str, format: Fp8) -> Result<Spec> {
    Ok(Spec::act(file, DType::BF16)?.define("FORMAT", format_name(format)))
}

/// The tiles of a tensor, `columns` columns each, if a grid has room for them; at least one, whose block writes the inverse of the scale.
pub(super) fn tiles(of: Slot, columns: usize) -> Option<Grid> {
    let [across, down] = [of.shape.cols().div_ceil(columns), of.shape.rows().div_ceil(TILE)];
    (down <= usize::from(u16::MAX)).then(|| Grid::plane(across.max(1), down.max(1), THREADS))
}

/// Refuses a GPU without products of 8-bit numbers.
pub(super) fn needs_fp8(cx: &Lower<'_>) -> Result<()> {
    if cx.device.info.has_fp8() {
        return Ok(());
    }
    let ((least, under), (major, minor)) = (FP8_COMPUTE, cx.device.info.compute);
    Err(Error::Unsupported(format!(
        "products of 8-bit numbers need compute capability {least}.{under} or newer; {} has {major}.{minor}: use --dtype bf16",
        cx.device.info.name
    )))
}

pub(crate) fn matmul_fp8(cx: &mut Lower<'_>, op: &MatmulFp8) -> Result<()> {
    needs_fp8(cx)?;
    let (rows, ic, oc) = (op.a.shape.rows(), op.a.shape.cols(), op.b.shape.rows());
    if rows == 0 || oc == 0 {
        return Ok(());
    }
    let adds = cx.adds(op.accum);
    let d = cx.ptr(op.out)?;
    if ic == 0 && op.bias.is_none() {
        if !adds {
            cx.zero(d, op.out.bytes());
        }
        return Ok(());
    }
    let sizes = Sizes { rows, ic, oc, inputs: op.b.dtype, output: op.out.dtype, tf32: false };
    let scales = [cx.ptr(op.b_inverse)?, cx.ptr(op.a_inverse)?];
    let bias = cx.optional(op.bias)?;
    let at = Addresses { a: cx.ptr(op.b)?, b: cx.ptr(op.a)?, d, bias, scales, ..Addresses::default() };
    let extra = if bias == 0 { Extra::None } else { Extra::Bias };
    let problem = Problem::fp8(&sizes, op.a.dtype, op.fast, &at).extra(extra).adds(adds);
    if library_scaled(cx, "matmul_fp8", &problem, &at, [1.0, if adds { 1.0 } else { 0.0 }])? {
        return Ok(());
    }
    Err(Error::Unsupported(format!("cuBLASLt has no algorithm for {problem}: use --dtype bf16")))
}

pub(crate) fn scale_update(cx: &mut Lower<'_>, op: &ScaleUpdate) -> Result<()> {
    let pairs = op.scales.numel() / 2;
    if pairs == 0 {
        return Ok(());
    }
    let args = Args::new().ptr(cx.ptr(op.scales)?).u32(pairs as u32).f32(ScaleUpdate::DECAY);
    let grid = Grid::linear(pairs.div_ceil(THREADS as usize), THREADS);
    cx.launch(&spec(DType::BF16, Fp8::E4M3)?, "scale_update", grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    let types = [DType::F32, DType::BF16];
    let quantize = types.into_iter().flat_map(|act| Fp8::ALL.map(|format| spec(act, format))).flatten();
    let joined = ["loss/fp8.cu", "fp8/swiglu.cu", "fp8/permute.cu"];
    let joined = joined.into_iter().flat_map(|file| Fp8::ALL.map(|format| file_spec(file, format))).flatten();
    quantize.chain(joined).collect()
}
