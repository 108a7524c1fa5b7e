//! Activations, SwiGLU, addition and dropout.

use super::Ctx;
use crate::isa::Isa;
use crate::kernel::dropout::dropout_row;
use crate::kernel::elementwise::{binary, geglu, geglu_bwd, swiglu_bwd as swiglu_bwd_row, unary, unary_bwd};
use crate::kernel::tasks::pieces;
use crate::memory::Span;
use ironhorse_core::eager::{BinaryFn, UnaryFn};
use ironhorse_core::op::{ActBwd, ActFwd, Add, Dropout, Gate, SwigluBwd, SwigluFwd};
use ironhorse_core::{DropMask, Result};

pub fn act_fwd(ctx: &mut Ctx<'_>, op: &ActFwd) -> Result<()> {
    let (windows, act) = (([ctx.f32(op.inp)?], [ctx.f32(op.out)?]), UnaryFn::Act(op.act));
    ctx.done(pieces(&ctx.split(), 1, windows, |isa, [x], [y]| unary(isa, act, x, y)))
}

pub fn act_bwd(ctx: &mut Ctx<'_>, op: &ActBwd) -> Result<()> {
    let windows = ([ctx.f32(op.d_out)?, ctx.f32(op.inp)?], [ctx.f32(op.d_inp)?]);
    let act = UnaryFn::Act(op.act);
    ctx.done(pieces(&ctx.split(), 1, windows, |isa, from, [d_x]| unary_bwd(isa, act, from, d_x)))
}

pub fn add(ctx: &mut Ctx<'_>, op: &Add) -> Result<()> {
    let windows = ([ctx.f32(op.a)?, ctx.f32(op.b)?], [ctx.f32(op.out)?]);
    ctx.done(pieces(&ctx.split(), 1, windows, |isa, from, [y]| binary(isa, BinaryFn::Add, from, y)))
}

pub fn dropout(ctx: &mut Ctx<'_>, op: &Dropout) -> Result<()> {
    let (out, inp, isa) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.isa);
    let (width, scale) = (op.out.shape.cols(), op.drop.rate.scale());
    let mask = DropMask::new(op.drop, ctx.scalars, width);
    ctx.rows(op.out.shape.rows(), width, |row| {
        dropout_row(isa, inp.row(row, width), out.row(row, width), mask.row(row as u64), scale);
    })
}

/// The two halves of a row: gate and up.
fn halves(x: Span<f32>, row: usize, width: usize) -> [Span<f32>; 2] {
    [x.row(2 * row, width), x.row(2 * row + 1, width)]
}

pub fn swiglu_fwd(ctx: &mut Ctx<'_>, op: &SwigluFwd) -> Result<()> {
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    let (isa, width) = (ctx.isa, op.out.shape.cols());
    ctx.rows(op.out.shape.rows(), width, |row| swiglu_row(isa, op.gate, (inp, out), [row, width]))
}

/// One row of the activation, from its gate and its up.
pub(super) fn swiglu_row(isa: Isa, gate: Gate, (inp, out): (Span<f32>, Span<f32>), [row, width]: [usize; 2]) {
    let (from, out) = (halves(inp, row, width), out.row(row, width));
    match gate {
        Gate::Silu => binary(isa, BinaryFn::Swiglu, from, out),
        Gate::Gelu => geglu(isa, from, out),
    }
}

pub fn swiglu_bwd(ctx: &mut Ctx<'_>, op: &SwigluBwd) -> Result<()> {
    let (rows, isa) = (SwigluRows::new(ctx, op)?, ctx.isa);
    ctx.rows(op.d_out.shape.rows(), rows.width, |row| rows.backward(isa, row))
}

/// The windows of a backward.
pub(super) struct SwigluRows {
    d_inp: Span<f32>,
    act: Span<f32>,
    d_out: Span<f32>,
    pub inp: Span<f32>,
    pub width: usize,
    gate: Gate,
}

impl SwigluRows {
    pub fn new(ctx: &Ctx<'_>, op: &SwigluBwd) -> Result<Self> {
        let (d_inp, d_out, inp) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
        let act = match op.act {
            Some(slot) => ctx.f32(slot)?,
            None => Span::none(d_out.len()),
        };
        Ok(Self { d_inp, act, d_out, inp, width: op.d_out.shape.cols(), gate: op.gate })
    }

    pub fn backward(&self, isa: Isa, row: usize) {
        let &Self { width, .. } = self;
        let ([gate, up], [d_gate, d_up]) = (halves(self.inp, row, width), halves(self.d_inp, row, width));
        let (from, to) = ([self.d_out.row(row, width), gate, up], [d_gate, d_up, self.act.row(row, width)]);
        match self.gate {
            Gate::Silu => swiglu_bwd_row(isa, from, to),
            Gate::Gelu => geglu_bwd(isa, from, to),
        }
    }
}
