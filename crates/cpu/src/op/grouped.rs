//! Linear layers of many experts, on the GEMM.

use super::elementwise::{SwigluRows, swiglu_row};
use super::{Ctx, engine_error};
use crate::gemm::{Beside, Beta, Gemm, Group, MatMut, MatRef, gemm_grouped};
use crate::memory::Span;
use ironhorse_core::op::{
    Gate, GroupedFp8, GroupedFp8BwdWeight, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd,
    SwigluBwd,
};
use ironhorse_core::{Error, Result, Slot};
use std::ops::Range;

/// The index of each expert's first row, then the number of rows.
pub(super) struct Groups<'a>(&'a [i32]);

impl Groups<'_> {
    /// Refuses offsets that do not rise from 0 to `rows`.
    pub fn new(ctx: &Ctx<'_>, offsets: Slot, rows: usize) -> Result<Self> {
        // SAFETY: nothing writes the offsets while the op runs.
        let offsets = unsafe { ctx.i32(offsets)?.all() };
        let ends = offsets.first() == Some(&0) && offsets.last().is_some_and(|&end| end as usize == rows);
        if ends && offsets.is_sorted() {
            return Ok(Self(offsets));
        }
        let what =
            format!("the `offsets` of the experts are {offsets:?}, expected them to rise from 0 to {rows}");
        Err(Error::Input(what))
    }

    pub fn experts(&self) -> usize {
        self.0.len() - 1
    }

    pub fn rows(&self, expert: usize) -> Range<usize> {
        self.0[expert] as usize..self.0[expert + 1] as usize
    }
}

/// The rows from `first` on.
fn rows_from(span: Span<f32>, first: usize, cols: usize) -> MatRef {
    MatRef::row_major(span.ptr().wrapping_add(first * cols).cast_const(), cols)
}

/// Rows of another array that belong to an expert's rows.
fn beside(span: Span<f32>, first: usize, width: usize) -> Beside {
    Beside { ptr: rows_from(span, first, width).ptr, rs: width, width }
}

fn writable(m: MatRef) -> MatMut {
    MatMut { ptr: m.ptr.cast_mut(), rs: m.rs }
}

/// Computes products with the threads of the engine.
///
/// # Safety
/// As [`gemm_grouped`].
pub(super) unsafe fn products(ctx: &mut Ctx<'_>, group: &Group<'_>) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { gemm_grouped(ctx.team, ctx.workspace, ctx.isa, group) }.map_err(engine_error)
}

pub fn grouped_linear_fwd(ctx: &mut Ctx<'_>, op: &GroupedLinearFwd) -> Result<()> {
    let (out, inp, weight) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.f32(op.weight)?);
    let (ic, oc) = (op.inp.shape.cols(), op.out.shape.cols());
    let groups = Groups::new(ctx, op.offsets, op.inp.shape.rows())?;
    let (apart, operands) = (ctx.apart, ctx.operands);
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        let b = rows_from(weight, expert * oc, ic).transposed();
        let c = writable(rows_from(out, rows.start, oc));
        Gemm::new((rows.len(), oc, ic), rows_from(inp, rows.start, ic), b, c)
            .rows_apart(apart)
            .operands(operands)
    };
    let most = [op.inp.shape.rows(), oc, ic];
    let Some(act) = op.act else {
        // SAFETY: shapes and aliasing were checked by `Op::check`; the rows of the experts are inside the slots and disjoint.
        return unsafe { products(ctx, &Group::new(groups.experts(), most, &product)) };
    };
    let (act, isa) = (ctx.f32(act)?, ctx.isa);
    let finish = |expert: usize, rows: Range<usize>| {
        let first = groups.rows(expert).start;
        (first + rows.start..first + rows.end)
            .for_each(|row| swiglu_row(isa, Gate::Silu, (out, act), [row, oc / 2]));
    };
    let written = |expert: usize| beside(act, groups.rows(expert).start, oc / 2);
    let (count, beside) = (groups.experts(), Some(&written as _));
    let group = Group { count, most, product: &product, finish: Some(&finish), beside };
    // SAFETY: as above; a row of `act` is written once the same row of `out` is final.
    unsafe { products(ctx, &group) }
}

/// The gradient of the input. With `then`, SwiGLU's backward runs on each row of `d_inp` as soon as that row is complete.
pub fn grouped_linear_bwd_input(
    ctx: &mut Ctx<'_>,
    op: &GroupedLinearBwdInput,
    then: Option<&SwigluBwd>,
) -> Result<()> {
    let (d_inp, d_out, weight) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?, ctx.f32(op.weight)?);
    let (ic, oc) = (op.d_inp.shape.cols(), op.d_out.shape.cols());
    let groups = Groups::new(ctx, op.offsets, op.d_inp.shape.rows())?;
    let operands = ctx.operands;
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        let b = rows_from(weight, expert * oc, ic);
        let c = writable(rows_from(d_inp, rows.start, ic));
        Gemm::new((rows.len(), ic, oc), rows_from(d_out, rows.start, oc), b, c).operands(operands)
    };
    let most = [op.d_inp.shape.rows(), ic, oc];
    let Some(then) = then else {
        // SAFETY: as in `grouped_linear_fwd`.
        return unsafe { products(ctx, &Group::new(groups.experts(), most, &product)) };
    };
    let (rows, isa) = (SwigluRows::new(ctx, then)?, ctx.isa);
    let finish = |expert: usize, part: Range<usize>| {
        let first = groups.rows(expert).start;
        (first + part.start..first + part.end).for_each(|row| rows.backward(isa, row));
    };
    let gates = |expert: usize| beside(rows.inp, groups.rows(expert).start, 2 * rows.width);
    let (count, beside) = (groups.experts(), Some(&gates as _));
    let group = Group { count, most, product: &product, finish: Some(&finish), beside };
    // SAFETY: as above; a row of the activation's gradients is read and written once, when the same row of `d_inp` is final.
    unsafe { products(ctx, &group) }
}

pub fn grouped_linear_bwd_weight(ctx: &mut Ctx<'_>, op: &GroupedLinearBwdWeight) -> Result<()> {
    let (d_weight, d_out, inp) = (ctx.f32(op.d_weight)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
    let (ic, oc) = (op.inp.shape.cols(), op.d_out.shape.cols());
    let groups = Groups::new(ctx, op.offsets, op.inp.shape.rows())?;
    let adds = op.accum.adds(ctx.scalars.added());
    let (beta, operands) = (if adds { Beta::Accumulate } else { Beta::Overwrite }, ctx.operands);
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        let a = rows_from(d_out, rows.start, oc).transposed();
        let c = writable(rows_from(d_weight, expert * oc, ic));
        Gemm::new((oc, ic, rows.len()), a, rows_from(inp, rows.start, ic), c).beta(beta).operands(operands)
    };
    let most = [oc, ic, op.inp.shape.rows()];
    // SAFETY: as in `grouped_linear_fwd`; every expert has a weight of its own.
    unsafe { products(ctx, &Group::new(groups.experts(), most, &product)) }
}

/// The product of two numbers that are the inverses of scales.
fn both(ctx: &Ctx<'_>, inverses: [Slot; 2]) -> Result<f32> {
    let [a, b] = inverses.map(|slot| ctx.f32(slot));
    // SAFETY: nothing writes the scales while the op runs.
    Ok(unsafe { a?.get(0..1)[0] * b?.get(0..1)[0] })
}

pub fn grouped_fp8(ctx: &mut Ctx<'_>, op: &GroupedFp8) -> Result<()> {
    let (out, a, b) = (ctx.f32(op.out)?, ctx.f32(op.a)?, ctx.f32(op.b)?);
    let (inner, cols) = (op.a.shape.cols(), op.out.shape.cols());
    let groups = Groups::new(ctx, op.offsets, op.a.shape.rows())?;
    let (experts, beside) = (groups.experts(), op.beside);
    let alpha = both(ctx, [op.a_inverse, op.b_inverse])?;
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        let b = if beside {
            MatRef::row_major(b.ptr().wrapping_add(expert * inner).cast_const(), experts * inner)
        } else {
            rows_from(b, expert * cols, inner)
        };
        let c = writable(rows_from(out, rows.start, cols));
        let a = rows_from(a, rows.start, inner);
        Gemm::new((rows.len(), cols, inner), a, b.transposed(), c).alpha(alpha)
    };
    let most = [op.a.shape.rows(), cols, inner];
    // SAFETY: as in `grouped_linear_fwd`; the columns of an expert are inside `b`.
    unsafe { products(ctx, &Group::new(groups.experts(), most, &product)) }
}

pub fn grouped_fp8_bwd_weight(ctx: &mut Ctx<'_>, op: &GroupedFp8BwdWeight) -> Result<()> {
    let (d_weight, d_out, inp) = (ctx.f32(op.d_weight)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
    let (oc, ic, all) = (op.d_out.shape.rows(), op.inp.shape.rows(), op.inp.shape.cols());
    let groups = Groups::new(ctx, op.offsets, all)?;
    let alpha = both(ctx, [op.d_out_inverse, op.inp_inverse])?;
    let beta = if op.accum.adds(ctx.scalars.added()) { Beta::Accumulate } else { Beta::Overwrite };
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        // the columns of the expert's rows
        let of = |span: Span<f32>| MatRef::row_major(span.ptr().wrapping_add(rows.start).cast_const(), all);
        let c = writable(rows_from(d_weight, expert * oc, ic));
        Gemm::new((oc, ic, rows.len()), of(d_out), of(inp).transposed(), c).beta(beta).alpha(alpha)
    };
    // SAFETY: as in `grouped_linear_bwd_weight`.
    unsafe { products(ctx, &Group::new(groups.experts(), [oc, ic, all], &product)) }
}
