//! 8-bit numbers and their products: our quantiser, and cuBLASLt.

use super::linear::library_scaled;
use super::loss;
use super::lower::Lower;
use super::norm::ResidualNorm;
use super::{fp8_many, grouped_fp8};
use crate::args::{Args, Grid};
use crate::device::FP8_COMPUTE;
use crate::gemm::{Addresses, Extra, Problem, Sizes, spec as bias_spec};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{Amax, Gate, MatmulFp8, Op, Permute, Quantize, ScaleUpdate, SwigluBwd, SwigluFwd};
use ironhorse_core::{DType, Fp8, Slot};

/// The side of the tile of a block of fp8/quantize.cu.
pub(super) const TILE: usize = 128;
pub(super) const THREADS: u32 = 256;
/// Columns of a tile of swiglu_bwd_quantize: `BACK_COLUMNS` of fp8/swiglu.cu.
const BACK_COLUMNS: usize = 64;
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
    let joined = with_norm(cx, op)?
        || with_loss(cx, op)?
        || grouped_fp8::with_product(cx, op)?
        || with_permute(cx, op)?
        || with_swiglu(cx, op)?
        || with_swiglu_bwd(cx, op)?
        || fp8_many::quantize(cx, op)?;
    if joined {
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
    let Some(d_bias) = op.d_bias.filter(|_| cols > 0) else { return Ok(()) };
    let adds = cx.adds(op.accum);
    let args = Args::new().ptr(cx.ptr(d_bias)?).ptr(partials).u32(down as u32);
    let args = args.u64(cols as u64).u32(adds.into());
    let spec = bias_spec("product/bias.cu", op.inp.dtype, d_bias.dtype)?;
    cx.launch(&spec, "bias_finish", Grid::linear(cols.div_ceil(32), 1024), args)
}

/// Computes a tensor in 8 bits together with the norm that it is the result of, if that was the last launch: the same bits in one pass.
/// `false` if it is not so, or if the kernel does not take the rows.
fn with_norm(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (Some(out), Some(out_t), Some(seen)) = (op.out, op.out_t, op.seen) else { return Ok(false) };
    let Some(norm) = norm_ahead(cx, op) else { return Ok(false) };
    let apart = are_apart(written(op), &[norm.a, norm.b]);
    let Some((kernel, grid)) = norm.fp8(format_name(op.format))?.filter(|_| apart) else { return Ok(false) };
    let replaced = cx.out.pop(); // the norm's launch
    let args = cx.pointers(&[out, out_t, op.inverse, seen, op.amax])?;
    let [residual, of_norm, rest @ ..] = norm.slots();
    let of_norm = of_norm.filter(|slot| is_read_later(cx, *slot));
    let args = cx.append(cx.append(args, &[residual, of_norm])?, &rest)?.f32(norm.eps);
    let args = scaled(args.u32s([norm.a.shape.rows(), norm.a.shape.cols()]), op);
    cx.launch(&kernel.spec, kernel.name, grid, args)?;
    cx.joins(replaced);
    Ok(true)
}

/// The norm whose result is quantised as it is, if its launch is the last one.
fn norm_ahead(cx: &Lower<'_>, op: &Quantize) -> Option<ResidualNorm> {
    let index = cx.op.checked_sub(1).filter(|&index| cx.out.last().is_some_and(|last| last.op == index))?;
    let norm = ResidualNorm::of(&cx.program.nodes()[index].op)?;
    (is_plain(op) && norm.out == op.inp).then_some(norm)
}

/// Rounds the gradient of logits to 8 bits where the loss would have written it, if that was the last launch: the same bits, and the
/// logits are read once more instead of the gradient being written and read. `false` if it is not so.
fn with_loss(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (Some(out), Some(out_t), Some(seen)) = (op.out, op.out_t, op.seen) else { return Ok(false) };
    let Some(of) = loss::gradient_ahead(cx, op.inp).filter(|_| is_plain(op)) else { return Ok(false) };
    let alone = are_apart(written(op), &[of.logits, of.targets]) && !is_read_later(cx, op.inp);
    let Some(grid) = tiles(op.inp, TILE).filter(|_| alone) else { return Ok(false) };
    let of_rows = loss::leave_sums(cx, &of)?;
    let args = cx.pointers(&[out, out_t, op.inverse, seen, op.amax, of.logits, of.targets])?.ptr(of_rows);
    let args = scaled(args.u32s([op.inp.shape.rows(), op.inp.shape.cols(), of.vocab]), op);
    cx.launch(&file_spec("loss/fp8.cu", op.format)?, "cross_entropy_quantize", grid, args)?;
    Ok(true)
}

/// Computes the 8 bits of SwiGLU's result together with it, if that was the last launch and nothing else reads it in bf16: the same bits,
/// which are neither written nor read in between. `false` if it is not so.
fn with_swiglu(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let Some(Op::SwigluFwd(SwigluFwd { out, inp, gate: Gate::Silu })) = ahead(cx, 1) else {
        return Ok(false);
    };
    let Some(grid) = grid_instead(cx, op, out, &[inp]) else { return Ok(false) };
    let replaced = cx.out.pop(); // SwiGLU's launch
    let args =
        cx.optional_pointers(&[op.out, op.out_t, Some(op.inverse), op.seen, Some(op.amax), Some(inp)])?;
    let args = scaled(args.u32s([op.inp.shape.rows(), op.inp.shape.cols()]), op);
    cx.launch(&file_spec("fp8/swiglu.cu", op.format)?, "swiglu_quantize", grid, args)?;
    cx.joins(replaced);
    Ok(true)
}

/// Permutes tokens to their experts and rounds them to 8 bits in one pass, if that was the last launch and nothing else reads the rows in
/// bf16: the same bits. `false` if it is not so.
fn with_permute(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let Some(Op::Permute(Permute { out, inp, order })) = ahead(cx, 1) else { return Ok(false) };
    let aligned = cx.are_aligned(&[inp])?;
    let Some(grid) = grid_instead(cx, op, out, &[inp, order]).filter(|_| aligned) else { return Ok(false) };
    let replaced = cx.out.pop(); // the launch of the permutation
    let args = cx.optional_pointers(&[
        op.out,
        op.out_t,
        Some(op.inverse),
        op.seen,
        Some(op.amax),
        Some(inp),
        Some(order),
    ])?;
    let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
    let args = scaled(args.ptr(cx.fault).u32s([rows, cols, rows / inp.shape.rows().max(1)]), op);
    cx.launch(&file_spec("fp8/permute.cu", op.format)?, "permute_quantize", grid, args)?;
    cx.joins(replaced);
    Ok(true)
}

/// As [`with_swiglu`], for SwiGLU's backward, whose gradient was quantised in rows and columns right before, and whose recomputed
/// result this op quantises in columns.
fn with_swiglu_bwd(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (Some(Op::Quantize(of)), Some(Op::SwigluBwd(back))) = (ahead(cx, 1), ahead(cx, 2)) else {
        return Ok(false);
    };
    let (Some(d_rows), Some(d_columns), Some(seen)) = (of.out, of.out_t, of.seen) else { return Ok(false) };
    let (None, Some(columns), None) = (op.out, op.out_t, op.seen) else { return Ok(false) };
    let SwigluBwd { d_inp, act, d_out, inp, gate } = back;
    let whole = act == Some(op.inp) && of.inp == d_inp && gate == Gate::Silu && op.format == Fp8::E4M3;
    let written = [d_rows, d_columns, of.inverse, seen, columns, op.inverse];
    let alone = are_apart(written.into_iter(), &[d_out, inp])
        && !is_read_later(cx, d_inp)
        && !is_read_later(cx, op.inp);
    if !whole || !alone || !is_plain(op) || !is_plain(&of) {
        return Ok(false);
    }
    // A launch that computes the product before it too (grouped_swiglu_bwd.rs) cannot be replaced: `d_out` would be missing.
    let by_itself = cx.out.iter().rev().nth(1).is_some_and(|launch| launch.name == "swiglu_bwd");
    let Some(grid) = tiles(op.inp, BACK_COLUMNS).filter(|_| by_itself && fits(op.inp)) else {
        return Ok(false);
    };
    let replaced = cx.out.split_off(cx.out.len() - 2); // the launches of SwiGLU's backward and of the quantiser behind it
    let args = cx.pointers(&[
        d_rows, d_columns, of.inverse, seen, of.amax, columns, op.inverse, op.amax, d_out, inp,
    ])?;
    let args = args.u32s([op.inp.shape.rows(), op.inp.shape.cols()]);
    let args =
        [of.margin, of.unknown, op.margin, op.unknown].into_iter().fold(args, |args, n| args.u32(n as u32));
    cx.launch(&file_spec("fp8/swiglu.cu", of.format)?, "swiglu_bwd_quantize", grid, args)?;
    cx.joins(replaced);
    Ok(true)
}

/// The grid of a kernel that computes `out` in 8 bits in place of the op that wrote it, from what that op read: if nothing else needs
/// `out` in bf16, and fp8/swiglu.cu and fp8/permute.cu take it.
fn grid_instead(cx: &Lower<'_>, op: &Quantize, out: Slot, read: &[Slot]) -> Option<Grid> {
    let alone = are_apart(written(op), read) && !is_read_later(cx, out);
    tiles(op.inp, TILE).filter(|_| is_plain(op) && out == op.inp && alone && fits(op.inp))
}

/// The op that is `back` ops before the one being lowered, if it has one launch, which is `back` places from the end of the list.
pub(super) fn ahead(cx: &Lower<'_>, back: usize) -> Option<Op> {
    let index = cx.op.checked_sub(back)?;
    let of =
        |place: usize| cx.out.len().checked_sub(place).and_then(|at| cx.out.get(at)).map(|launch| launch.op);
    let alone = of(back) == Some(index) && of(back + 1) != Some(index);
    alone.then(|| cx.program.nodes()[index].op)
}

pub(super) fn is_plain(op: &Quantize) -> bool {
    op.act.is_none() && op.pre.is_none() && op.d_bias.is_none()
}

fn written(op: &Quantize) -> impl Iterator<Item = Slot> {
    [op.out, op.out_t, op.seen, Some(op.inverse)].into_iter().flatten()
}

/// Adds how the scale is chosen to other arguments.
pub(super) fn scaled(args: Args, op: &Quantize) -> Args {
    args.u32(op.margin as u32).u32(op.unknown as u32)
}

/// Whether nothing that is written is read too: while some blocks write, others still read.
pub(super) fn are_apart(mut written: impl Iterator<Item = Slot>, read: &[Slot]) -> bool {
    written.all(|to| !read.iter().any(|from| from.overlaps(&to)))
}

/// What fp8/swiglu.cu and fp8/permute.cu take.
fn fits(narrow: Slot) -> bool {
    narrow.dtype == DType::BF16 && narrow.numel() > 0
}

/// A file for bf16 and a format.
fn file_spec(file: &'static str, format: Fp8) -> Result<Spec> {
    Ok(Spec::act(file, DType::BF16)?.define("FORMAT", format_name(format)))
}

/// The tiles of a tensor, `columns` columns each, if a grid has room for them; at least one, whose block writes the inverse of the scale.
fn tiles(of: Slot, columns: usize) -> Option<Grid> {
    let [across, down] = [of.shape.cols().div_ceil(columns), of.shape.rows().div_ceil(TILE)];
    (down <= usize::from(u16::MAX)).then(|| Grid::plane(across.max(1), down.max(1), THREADS))
}

/// Whether an op after the one being lowered reads this memory before another one overwrites it.
pub(super) fn is_read_later(cx: &Lower<'_>, slot: Slot) -> bool {
    for node in &cx.program.nodes()[cx.op + 1..] {
        let args = node.op.args();
        let touching = || args.iter().filter(|arg| arg.slot.overlaps(&slot));
        if touching().any(|arg| arg.access.reads()) {
            return true;
        }
        if touching().any(|arg| arg.access.writes()) {
            return false;
        }
    }
    false
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
