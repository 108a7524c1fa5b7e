//! Adapters beside linear layers, on the GEMM: one product for each part, on its columns of the layer's result.

use super::{Ctx, engine_error};
use crate::gemm::{Beta, Gemm, MatMut, MatRef, gemm};
use crate::memory::Span;
use ironhorse_core::Result;
use ironhorse_core::op::{LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd};

/// Rows of `width` floats, read from this element on.
pub(super) fn columns(span: Span<f32>, width: usize, first: usize) -> MatRef {
    MatRef::row_major(span.ptr().wrapping_add(first).cast_const(), width)
}

/// Rows of `width` floats, written from this element on.
pub(super) fn columns_mut(span: Span<f32>, width: usize, first: usize) -> MatMut {
    MatMut { ptr: span.ptr().wrapping_add(first), rs: width }
}

/// Runs a product.
///
/// # Safety
/// The matrices are inside slots of the op; `c` shares no memory with `a` and `b`.
unsafe fn product(ctx: &mut Ctx<'_>, product: Gemm<'_>) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { gemm(ctx.team, ctx.workspace, ctx.isa, &product) }.map_err(engine_error)
}

pub fn lora_fwd(ctx: &mut Ctx<'_>, op: &LoraFwd) -> Result<()> {
    let (out, hidden, b) = (ctx.f32(op.out)?, ctx.f32(op.hidden)?, ctx.f32(op.b)?);
    let (rows, oc, wide) = (op.out.shape.rows(), op.out.shape.cols(), op.hidden.shape.cols());
    let rank = op.b.shape.cols();
    for part in op.parts.each(rank) {
        let b = columns(b, rank, part.b.start * rank).transposed();
        let g = Gemm::new(
            (rows, part.out.len(), rank),
            columns(hidden, wide, part.hidden.start),
            b,
            columns_mut(out, oc, part.out.start),
        );
        // SAFETY: shapes and aliasing were checked by `Op::check`; parts are columns of `out`.
        unsafe { product(ctx, g.beta(Beta::Accumulate).alpha(op.scale).rows_apart(ctx.apart)) }?;
    }
    Ok(())
}

pub fn lora_bwd_hidden(ctx: &mut Ctx<'_>, op: &LoraBwdHidden) -> Result<()> {
    let (d_hidden, d_out, b) = (ctx.f32(op.d_hidden)?, ctx.f32(op.d_out)?, ctx.f32(op.b)?);
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.d_hidden.shape.cols());
    let rank = op.b.shape.cols();
    for part in op.parts.each(rank) {
        let g = Gemm::new(
            (rows, rank, part.out.len()),
            columns(d_out, oc, part.out.start),
            columns(b, rank, part.b.start * rank),
            columns_mut(d_hidden, wide, part.hidden.start),
        );
        // SAFETY: shapes and aliasing were checked by `Op::check`; parts are columns of `d_hidden`.
        unsafe { product(ctx, g.alpha(op.scale)) }?;
    }
    Ok(())
}

pub fn lora_bwd_weight(ctx: &mut Ctx<'_>, op: &LoraBwdWeight) -> Result<()> {
    let (d_b, d_out, hidden) = (ctx.f32(op.d_b)?, ctx.f32(op.d_out)?, ctx.f32(op.hidden)?);
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.hidden.shape.cols());
    let rank = op.d_b.shape.cols();
    let beta = if op.accum.adds(ctx.scalars.added()) { Beta::Accumulate } else { Beta::Overwrite };
    for part in op.parts.each(rank) {
        let g = Gemm::new(
            (part.out.len(), rank, rows),
            columns(d_out, oc, part.out.start).transposed(),
            columns(hidden, wide, part.hidden.start),
            columns_mut(d_b, rank, part.b.start * rank),
        );
        // SAFETY: shapes and aliasing were checked by `Op::check`; parts are rows of `d_b`.
        unsafe { product(ctx, g.beta(beta).alpha(op.scale)) }?;
    }
    Ok(())
}

pub fn lora_bwd_input(ctx: &mut Ctx<'_>, op: &LoraBwdInput) -> Result<()> {
    let (d_inp, d_hidden, a) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_hidden)?, ctx.f32(op.a)?);
    let (rows, ic, wide) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    let g =
        Gemm::new((rows, ic, wide), columns(d_hidden, wide, 0), columns(a, ic, 0), columns_mut(d_inp, ic, 0));
    // SAFETY: shapes and aliasing were checked by `Op::check`.
    unsafe { product(ctx, g.beta(Beta::Accumulate)) }
}
