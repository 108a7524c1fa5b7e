//! Linear layers on the GEMM, with bias and activation applied while a block of the result is still in cache.

use super::columns::column_sums;
use super::grouped::products;
use super::loss::LossRows;
use super::{Ctx, engine_error};
use crate::gemm::{Beta, Gemm, Group, MatMut, MatRef, finishes_rows, gemm};
use crate::kernel::elementwise::{add_to, unary, unary_bwd};
use crate::memory::Span;
use ironhorse_core::Result;
use ironhorse_core::eager::UnaryFn;
use ironhorse_core::op::{CrossEntropy, LinearBwdInput, LinearBwdWeight, LinearFwd};
use std::ops::Range;

/// A whole slot as rows of `cols`.
pub(super) fn rows_of(span: Span<f32>, cols: usize) -> MatRef {
    MatRef::row_major(span.ptr().cast_const(), cols)
}

/// Runs a product over whole slots, with operands as the engine rounds them.
///
/// # Safety
/// The matrices are inside slots of the op; `c` shares no memory with `a` and `b`.
pub(super) unsafe fn product(ctx: &mut Ctx<'_>, product: Gemm<'_>) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { gemm(ctx.team, ctx.workspace, ctx.isa, &product.operands(ctx.operands)) }.map_err(engine_error)
}

pub fn linear_fwd(ctx: &mut Ctx<'_>, op: &LinearFwd) -> Result<()> {
    let (out, inp, weight) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.weight(op.weight)?);
    let (weight, kept) = weight;
    let pre = op.pre.map(|pre| Ok((pre.act, ctx.f32(pre.slot)?))).transpose()?;
    let bias = op.bias.map(|slot| ctx.f32(slot)).transpose()?;
    let (rows, ic, oc) = (op.inp.shape.rows(), op.inp.shape.cols(), op.weight.shape.rows());
    let (isa, sums) = (ctx.isa, pre.map_or(out, |(_, pre)| pre));
    let finish = |rows: Range<usize>, cols: Range<usize>, _: usize| {
        for row in rows {
            let r = row * oc + cols.start..row * oc + cols.end;
            // SAFETY: the region is final and belongs to the calling task; written slots share no memory with read ones.
            unsafe {
                if let Some(bias) = bias {
                    add_to(isa, sums.get_mut(r.clone()), bias.get(cols.clone()));
                }
                if let Some((act, pre)) = pre {
                    unary(isa, UnaryFn::Act(act), pre.part(r.clone()), out.part(r));
                }
            }
        }
    };
    let b = rows_of(weight, ic).transposed();
    let mut g = Gemm::new((rows, oc, ic), rows_of(inp, ic), b, MatMut { ptr: sums.ptr(), rs: oc });
    g = kept.map_or_else(|| g.rows_as_many(ctx.apart), |kept| g.kept(kept));
    if bias.is_some() || pre.is_some() {
        g = g.epilogue(&finish);
    }
    // SAFETY: shapes and aliasing were checked by `Op::check`.
    unsafe { product(ctx, g) }
}

/// A layer without a bias, and the loss of each row of its result while the row is in a cache. Returns whether the product is of a size
/// whose rows are; otherwise nothing is done.
pub fn linear_then_loss(ctx: &mut Ctx<'_>, op: &LinearFwd, loss: &CrossEntropy) -> Result<bool> {
    let (out, inp, (weight, kept)) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.weight(op.weight)?);
    let (rows, ic, oc) = (op.inp.shape.rows(), op.inp.shape.cols(), op.weight.shape.rows());
    let (operands, apart) = (ctx.operands, ctx.apart);
    let product = |_: usize| {
        let (a, b, c) =
            (rows_of(inp, ic), rows_of(weight, ic).transposed(), MatMut { ptr: out.ptr(), rs: oc });
        Gemm::new((rows, oc, ic), a, b, c).rows_as_many(apart).operands(operands)
    };
    if kept.is_some() || !finishes_rows(&product(0), ctx.isa, ctx.team.threads()) {
        return Ok(false);
    }
    let losses = LossRows::new(ctx, loss)?;
    let finish = |_: usize, rows: Range<usize>| rows.for_each(|row| losses.row(row));
    let group = Group { finish: Some(&finish), ..Group::new(1, [rows, oc, ic], &product) };
    // SAFETY: shapes and aliasing were checked by `Op::check` and by `run_joined`; a row of the logits belongs to the task that finishes it.
    unsafe { products(ctx, &group) }?;
    Ok(true)
}

pub fn linear_bwd_input(ctx: &mut Ctx<'_>, op: &LinearBwdInput) -> Result<()> {
    let (d_inp, d_out, weight) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?, ctx.f32(op.weight)?);
    let pre = op.pre.map(|pre| Ok((pre.act, ctx.f32(pre.slot)?))).transpose()?;
    let (rows, ic, oc) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.d_out.shape.cols());
    let isa = ctx.isa;
    let finish = |rows: Range<usize>, cols: Range<usize>, _: usize| {
        let Some((act, pre)) = pre else { return };
        for row in rows {
            let r = row * ic + cols.start..row * ic + cols.end;
            // The region is final and belongs to the calling task; `pre` is only read.
            let d_inp = d_inp.part(r.clone());
            unary_bwd(isa, UnaryFn::Act(act), [d_inp, pre.part(r)], d_inp);
        }
    };
    let c = MatMut { ptr: d_inp.ptr(), rs: ic };
    let mut g = Gemm::new((rows, ic, oc), rows_of(d_out, oc), rows_of(weight, ic), c);
    if pre.is_some() {
        g = g.epilogue(&finish);
    }
    // SAFETY: shapes and aliasing were checked by `Op::check`.
    unsafe { product(ctx, g) }
}

pub fn linear_bwd_weight(ctx: &mut Ctx<'_>, op: &LinearBwdWeight) -> Result<()> {
    let (d_weight, d_out, inp) = (ctx.f32(op.d_weight)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
    let (rows, ic, oc) = (op.inp.shape.rows(), op.inp.shape.cols(), op.d_out.shape.cols());
    let adds = op.accum.adds(ctx.scalars.added());
    if let Some(d_bias) = op.d_bias {
        let isa = ctx.isa;
        column_sums(ctx, [ctx.f32(d_bias)?], rows, adds, |row, cols, [sums]| {
            // SAFETY: nothing writes `d_out` while the op runs.
            add_to(isa, sums, unsafe { d_out.get(row * oc + cols.start..row * oc + cols.end) });
        })?;
    }
    let c = MatMut { ptr: d_weight.ptr(), rs: ic };
    let beta = if adds { Beta::Accumulate } else { Beta::Overwrite };
    let g = Gemm::new((oc, ic, rows), rows_of(d_out, oc).transposed(), rows_of(inp, ic), c).beta(beta);
    // SAFETY: shapes and aliasing were checked by `Op::check`.
    unsafe { product(ctx, g) }
}
