//! Muon: the momentum of matrices of one size, and their step.

use super::Ctx;
use super::optimizer::clip;
use crate::kernel::update::{
    ADAM_CHUNK, muon_momentum as momentum_of, muon_update as update_of, scale_in_place,
};
use ironhorse_core::op::{MuonMomentum, MuonUpdate};
use ironhorse_core::{Error, MuonMatrix, Param, Result, Shape, muon_matrices};
use std::ops::Range;

/// The matrices of an op.
struct Batch<'a> {
    params: &'a [Param],
    /// Rows and columns.
    size: [usize; 2],
    /// The number of the first.
    first: usize,
    count: usize,
}

impl<'a> Batch<'a> {
    fn new(op: &str, params: &'a [Param], shape: Shape, first: usize) -> Result<Self> {
        let &[count, rows, cols] = shape.dims() else {
            return Err(Error::Program(format!("{op}: {shape} is not a batch of matrices")));
        };
        let batch = Self { params, size: [rows, cols], first, count };
        let found = muon_matrices(params, batch.size).skip(first).take(count).count();
        if found < count {
            let what = format!("{op}: the model has {found} matrices of {rows} by {cols}, expected {count}");
            return Err(Error::Program(what));
        }
        Ok(batch)
    }

    /// Elements of a matrix.
    fn len(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Pieces that a matrix is cut into.
    fn pieces(&self) -> usize {
        self.len().div_ceil(ADAM_CHUNK)
    }

    /// Matrix and elements of a piece, counted over all matrices: those of the batch, and those of the flat pools.
    fn piece(&self, number: usize) -> Option<(MuonMatrix, Range<usize>, Range<usize>)> {
        let (at, piece) = (number / self.pieces(), number % self.pieces());
        let matrix = muon_matrices(self.params, self.size).nth(self.first + at)?;
        let part = piece * ADAM_CHUNK..((piece + 1) * ADAM_CHUNK).min(self.len());
        let from = |first: usize| first + part.start..first + part.end;
        Some((matrix, from(at * self.len()), from(matrix.first)))
    }
}

pub fn muon_momentum(ctx: &mut Ctx<'_>, op: &MuonMomentum) -> Result<()> {
    let (out, m, g) = (ctx.f32(op.out)?, ctx.f32(op.moment1)?, ctx.f32(op.grads)?);
    let batch = Batch::new("muon_momentum", ctx.program.params(), op.out.shape, op.first)?;
    let (isa, pieces) = (ctx.isa, batch.pieces());
    let Some(clip) = clip(ctx, [op.norm, op.halt])? else {
        // SAFETY: tasks have disjoint ranges of `out`.
        return ctx.chunks(out.len(), ADAM_CHUNK, |r, _| unsafe { out.get_mut(r) }.fill(0.0));
    };
    let partials = ctx.partials(batch.count * pieces);
    ctx.chunks(batch.count * pieces, 1, |r, _| {
        let Some((_, here, there)) = batch.piece(r.start) else { return };
        // SAFETY: tasks have disjoint ranges of `out`, of the moments and of the partial sums; nothing writes gradients.
        unsafe {
            let (out, m, g) = (out.get_mut(here), m.get_mut(there.clone()), g.get(there));
            partials.set(r.start, momentum_of(isa, out, m, g, op.momentum, clip));
        }
    })?;
    ctx.chunks(batch.count * pieces, 1, |r, _| {
        let Some((_, here, _)) = batch.piece(r.start) else { return };
        let at = r.start / pieces;
        // SAFETY: all partial sums are written; tasks have disjoint ranges of `out`.
        unsafe {
            let norm = partials.get(at * pieces..(at + 1) * pieces).iter().sum::<f64>().sqrt();
            let scale = if norm < MuonMomentum::LEAST_NORM { 0.0 } else { 1.0 / norm };
            scale_in_place(isa, out.get_mut(here), scale as f32);
        }
    })
}

pub fn muon_update(ctx: &mut Ctx<'_>, op: &MuonUpdate) -> Result<()> {
    let (w, inp) = (ctx.f32(op.params)?, ctx.f32(op.inp)?);
    let batch = Batch::new("muon_update", ctx.program.params(), op.inp.shape, op.first)?;
    if clip(ctx, [op.norm, op.halt])?.is_none() {
        return Ok(());
    }
    let (isa, lr, decay) = (ctx.isa, f64::from(ctx.scalars.lr), f64::from(ctx.scalars.weight_decay));
    let (keep, step) = ((1.0 - lr * decay) as f32, (lr * f64::from(op.scale)) as f32);
    ctx.chunks(batch.count * batch.pieces(), 1, |r, _| {
        let Some((matrix, here, there)) = batch.piece(r.start) else { return };
        let keep = if matrix.decay { keep } else { 1.0 };
        // SAFETY: tasks have disjoint ranges of the weights, which share no memory with `inp`.
        unsafe { update_of(isa, w.get_mut(there), inp.get(here), keep, step) };
    })
}
