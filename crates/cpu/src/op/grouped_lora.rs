//! Adapters of experts, on the GEMM: one product for each part of each expert, all in one call.

use super::Ctx;
use super::grouped::{Groups, products};
use super::lora::{columns, columns_mut};
use crate::gemm::{Beta, Gemm, Group};
use ironhorse_core::Result;
use ironhorse_core::op::{
    GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd, LoraPart, LoraParts,
};

/// The products of every part of every expert, numbered part by part.
struct Parts<'a> {
    groups: &'a Groups<'a>,
    parts: Vec<LoraPart>,
    /// Rows of all B of an expert.
    b_rows: usize,
}

impl<'a> Parts<'a> {
    fn new(groups: &'a Groups<'a>, parts: &LoraParts, rank: usize) -> Self {
        Self { groups, parts: parts.each(rank).collect(), b_rows: parts.rows() }
    }

    fn count(&self) -> usize {
        self.parts.len() * self.groups.experts()
    }

    /// The widest part.
    fn widest(&self) -> usize {
        self.parts.iter().map(|part| part.out.len()).max().unwrap_or(0)
    }

    /// The part of a product, its expert, and its first row of all B.
    fn at(&self, product: usize) -> (&LoraPart, usize, usize) {
        let experts = self.groups.experts();
        let (part, expert) = (&self.parts[product / experts], product % experts);
        (part, expert, expert * self.b_rows + part.b.start)
    }
}

pub fn grouped_lora_fwd(ctx: &mut Ctx<'_>, op: &GroupedLoraFwd) -> Result<()> {
    let (out, hidden, b) = (ctx.f32(op.out)?, ctx.f32(op.hidden)?, ctx.f32(op.b)?);
    let (rows, oc, wide) = (op.out.shape.rows(), op.out.shape.cols(), op.hidden.shape.cols());
    let rank = op.b.shape.cols();
    let groups = Groups::new(ctx, op.offsets, rows)?;
    let parts = Parts::new(&groups, &op.parts, rank);
    let apart = ctx.apart;
    let product = |i: usize| {
        let (part, expert, b_row) = parts.at(i);
        let rows = groups.rows(expert);
        Gemm::new(
            (rows.len(), part.out.len(), rank),
            columns(hidden, wide, rows.start * wide + part.hidden.start),
            columns(b, rank, b_row * rank).transposed(),
            columns_mut(out, oc, rows.start * oc + part.out.start),
        )
        .beta(Beta::Accumulate)
        .alpha(op.scale)
        .rows_apart(apart)
    };
    let most = [rows, parts.widest(), rank];
    // SAFETY: shapes and aliasing were checked by `Op::check`; the experts have rows of `out` of their own, and parts are
    // columns of it that do not overlap.
    unsafe { products(ctx, &Group::new(parts.count(), most, &product)) }
}

pub fn grouped_lora_bwd_hidden(ctx: &mut Ctx<'_>, op: &GroupedLoraBwdHidden) -> Result<()> {
    let (d_hidden, d_out, b) = (ctx.f32(op.d_hidden)?, ctx.f32(op.d_out)?, ctx.f32(op.b)?);
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.d_hidden.shape.cols());
    let rank = op.b.shape.cols();
    let groups = Groups::new(ctx, op.offsets, rows)?;
    let parts = Parts::new(&groups, &op.parts, rank);
    let product = |i: usize| {
        let (part, expert, b_row) = parts.at(i);
        let rows = groups.rows(expert);
        Gemm::new(
            (rows.len(), rank, part.out.len()),
            columns(d_out, oc, rows.start * oc + part.out.start),
            columns(b, rank, b_row * rank),
            columns_mut(d_hidden, wide, rows.start * wide + part.hidden.start),
        )
        .alpha(op.scale)
    };
    let most = [rows, rank, parts.widest()];
    // SAFETY: as in `grouped_lora_fwd`, with columns of `d_hidden`.
    unsafe { products(ctx, &Group::new(parts.count(), most, &product)) }
}

pub fn grouped_lora_bwd_weight(ctx: &mut Ctx<'_>, op: &GroupedLoraBwdWeight) -> Result<()> {
    let (d_b, d_out, hidden) = (ctx.f32(op.d_b)?, ctx.f32(op.d_out)?, ctx.f32(op.hidden)?);
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.hidden.shape.cols());
    let rank = op.d_b.shape.cols();
    let groups = Groups::new(ctx, op.offsets, rows)?;
    let parts = Parts::new(&groups, &op.parts, rank);
    let beta = if op.accum.adds(ctx.scalars.added()) { Beta::Accumulate } else { Beta::Overwrite };
    let product = |i: usize| {
        let (part, expert, b_row) = parts.at(i);
        let rows = groups.rows(expert);
        Gemm::new(
            (part.out.len(), rank, rows.len()),
            columns(d_out, oc, rows.start * oc + part.out.start).transposed(),
            columns(hidden, wide, rows.start * wide + part.hidden.start),
            columns_mut(d_b, rank, b_row * rank),
        )
        .beta(beta)
        .alpha(op.scale)
    };
    let most = [parts.widest(), rank, rows];
    // SAFETY: shapes and aliasing were checked by `Op::check`; every part of every expert has rows of `d_b` of its own.
    unsafe { products(ctx, &Group::new(parts.count(), most, &product)) }
}

pub fn grouped_lora_bwd_input(ctx: &mut Ctx<'_>, op: &GroupedLoraBwdInput) -> Result<()> {
    let (d_inp, d_hidden, a) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_hidden)?, ctx.f32(op.a)?);
    let (rows, ic, wide) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    let groups = Groups::new(ctx, op.offsets, rows)?;
    let product = |expert: usize| {
        let rows = groups.rows(expert);
        Gemm::new(
            (rows.len(), ic, wide),
            columns(d_hidden, wide, rows.start * wide),
            columns(a, ic, expert * wide * ic),
            columns_mut(d_inp, ic, rows.start * ic),
        )
        .beta(Beta::Accumulate)
    };
    let group = Group::new(groups.experts(), [rows, ic, wide], &product);
    // SAFETY: shapes and aliasing were checked by `Op::check`; the experts have rows of `d_inp` of their own.
    unsafe { products(ctx, &group) }
}
