//! Token plus position embedding.

use super::elementwise::{add_in_place, add_into};
use super::{Ctx, check_ids};
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};
use ironhorse_core::{Error, Result};

/// Tokens a forward task handles.
const ROWS: usize = 16;
/// Columns a backward task handles: a task owns its columns of every row, so no two add to the same element.
const COLS: usize = 64;

pub fn embedding_fwd(ctx: &mut Ctx<'_>, op: &EmbeddingFwd) -> Result<()> {
    let (out, tokens) = (ctx.f32(op.out)?, ctx.i32(op.tokens)?);
    let (wte, wpe) = (ctx.f32(op.wte)?, ctx.f32(op.wpe)?);
    let (seq, width, isa) = (op.tokens.shape.cols(), op.wte.shape.cols(), ctx.isa);
    let first = if op.at_position { ctx.scalars.position as usize } else { 0 };
    let context = op.wpe.shape.rows();
    if first + seq > context {
        return Err(Error::Input(format!("position {} is beyond the context of {context}", first + seq - 1)));
    }
    // SAFETY: nothing writes the tokens while the op runs.
    let ids = unsafe { tokens.all() };
    check_ids("token", ids, op.vocab)?;
    ctx.chunks(ids.len(), ROWS, |rows, _| {
        for row in rows {
            let (token, position) = (ids[row] as usize, first + row % seq);
            // SAFETY: tasks have disjoint rows of `out`, which shares no memory with the tables.
            unsafe {
                let te = wte.get(token * width..(token + 1) * width);
                let pe = wpe.get(position * width..(position + 1) * width);
                add_into(isa, out.get_mut(row * width..(row + 1) * width), te, pe);
            }
        }
    })
}

pub fn embedding_bwd(ctx: &mut Ctx<'_>, op: &EmbeddingBwd) -> Result<()> {
    let (d_wte, d_wpe) = (ctx.f32(op.d_wte)?, ctx.f32(op.d_wpe)?);
    let (d_out, tokens) = (ctx.f32(op.d_out)?, ctx.i32(op.tokens)?);
    let (seq, width, isa) = (op.tokens.shape.cols(), op.d_wte.shape.cols(), ctx.isa);
    let adds = op.accum.adds(ctx.scalars.micro_step);
    // SAFETY: nothing writes the tokens while the op runs.
    let ids = unsafe { tokens.all() };
    check_ids("token", ids, op.d_wte.shape.rows())?;
    ctx.chunks(width, COLS, |cols, _| {
        // SAFETY: a task touches only its columns of the two gradients, which share no memory with `d_out`; the
        // mutable pieces are made one at a time.
        unsafe {
            let piece = |row: usize| row * width + cols.start..row * width + cols.end;
            if !adds {
                (0..op.d_wpe.shape.rows()).for_each(|row| d_wpe.get_mut(piece(row)).fill(0.0));
            }
            for (row, &id) in ids.iter().enumerate() {
                let d = d_out.get(piece(row));
                add_in_place(isa, d_wte.get_mut(piece(id as usize)), d);
                add_in_place(isa, d_wpe.get_mut(piece(row % seq)), d);
            }
        }
    })
}
