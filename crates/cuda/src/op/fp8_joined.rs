//! A tensor in 8 bits computed together with what it is made of: the op before a quantiser, if nothing is between them, becomes one kernel
//! with it, of the same bits, and the tensor is not read again, or not written in bf16 at all.

use super::fp8::{TILE, bias_gradient, file_spec, format_name, scaled, tiles};
use super::lower::Lower;
use super::norm::ResidualNorm;
use super::norm_bwd::Backward as NormBackward;
use super::{grouped_fp8, loss};
use crate::Result;
use crate::args::Grid;
use ironhorse_core::op::{Gate, Op, Permute, Quantize, SwigluBwd, SwigluFwd};
use ironhorse_core::{DType, Fp8, Slot};

/// Columns of a tile of swiglu_bwd_quantize: `BACK_COLUMNS` of fp8/swiglu.cu.
const BACK_COLUMNS: usize = 64;

/// Joins the quantiser with what is before it; `false` if it has to be computed by itself.
pub(super) fn quantize(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    Ok(with_norm(cx, op)?
        || with_loss(cx, op)?
        || with_norm_bwd(cx, op)?
        || grouped_fp8::with_product(cx, op)?
        || with_permute(cx, op)?
        || with_swiglu(cx, op)?
        || with_swiglu_bwd(cx, op)?)
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

/// Rounds a gradient to 8 bits where the backward of a norm writes it, if its launches are the last ones: the same bits, and the gradient is
/// not read again; sums over rows are in another order. `false` if it is not so.
fn with_norm_bwd(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (Some(out), Some(out_t), Some(seen)) = (op.out, op.out_t, op.seen) else { return Ok(false) };
    let Some(index) = cx.op.checked_sub(1) else { return Ok(false) };
    let Some(back) = NormBackward::of(&cx.program.nodes()[index].op) else { return Ok(false) };
    let Some(block) = back.narrowing(cx, op) else { return Ok(false) };
    let whole = back.d_inp == op.inp && op.act.is_none() && op.pre.is_none();
    let apart = are_apart(written(op), &back.touches()) && cx.are_aligned(&[out, out_t])?;
    let Some(first) = cx.out.iter().position(|launch| launch.op == index).filter(|_| whole && apart) else {
        return Ok(false);
    };
    let replaced = cx.out.split_off(first);
    let results = scaled(cx.pointers(&[out, out_t, op.inverse, seen, op.amax])?, op);
    if let Some((partials, rows)) = back.launch_fp8(cx, block, op, results)? {
        bias_gradient(cx, op, partials, rows)?;
    }
    cx.all_join(first, replaced);
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

/// Whether nothing that is written is read too: while some blocks write, others still read.
pub(super) fn are_apart(mut written: impl Iterator<Item = Slot>, read: &[Slot]) -> bool {
    written.all(|to| !read.iter().any(|from| from.overlaps(&to)))
}

/// What fp8/swiglu.cu and fp8/permute.cu take.
fn fits(narrow: Slot) -> bool {
    narrow.dtype == DType::BF16 && narrow.numel() > 0
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
