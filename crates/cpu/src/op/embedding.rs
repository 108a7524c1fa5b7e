//! Embedding of tokens, with learned positions or without.

use super::{Ctx, check_ids};
use crate::kernel::elementwise::{add_scaled, add_to, binary, scale_by, scaled};
use ironhorse_core::eager::BinaryFn;
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd, check_at_positions, check_positions};
use ironhorse_core::{Error, Result, Slot};

/// Columns a backward task handles: a task owns its columns of every row, so no two add to the same element.
const COLS: usize = 64;
/// Elements a task that clears handles.
const CHUNK: usize = 65536;

/// The position of each token where sequences hold several documents. They stay below T, and so below the rows of the table. Of
/// tokens that continue sequences in a cache of `cached` positions, they stay below that.
fn places<'a>(ctx: &Ctx<'a>, positions: Option<Slot>, cached: Option<usize>) -> Result<Option<&'a [i32]>> {
    let Some(slot) = positions else { return Ok(None) };
    // SAFETY: nothing writes the positions while the op runs.
    let places = unsafe { ctx.i32(slot)?.all() };
    match cached {
        Some(context) => check_at_positions(places, context)?,
        None => check_positions(places, slot.shape.cols())?,
    }
    Ok(Some(places))
}

pub fn embedding_fwd(ctx: &mut Ctx<'_>, op: &EmbeddingFwd) -> Result<()> {
    let (out, tokens) = (ctx.f32(op.out)?, ctx.i32(op.tokens)?);
    let (wte, kept) = ctx.weight(op.wte)?;
    let wpe = op.wpe.map(|slot| ctx.f32(slot)).transpose()?;
    let (seq, width, isa) = (op.tokens.shape.cols(), op.wte.shape.cols(), ctx.isa);
    let first = if op.at_position && op.positions.is_none() { ctx.scalars.position as usize } else { 0 };
    let context = op.wpe.map_or(usize::MAX, |wpe| wpe.shape.rows());
    if first + seq > context {
        return Err(Error::Input(format!("position {} is beyond the context of {context}", first + seq - 1)));
    }
    // SAFETY: nothing writes the tokens while the op runs.
    let ids = unsafe { tokens.all() };
    check_ids("token", ids, op.vocab, None)?;
    let places = places(ctx, op.positions, op.at_position.then_some(context))?;
    ctx.rows(ids.len(), width, |row| {
        let (id, out) = (ids[row] as usize, out.row(row, width));
        let te = if let Some(kept) = kept {
            // SAFETY: rows have one task each; `out` shares no memory with the table (`Op::check`).
            let (values, table) = unsafe { (out.all_mut(), wte.all()) };
            kept.read_row(isa, (table, [op.wte.shape.rows(), width]), id, values);
            out
        } else {
            wte.row(id, width)
        };
        match wpe {
            Some(wpe) => binary(
                isa,
                BinaryFn::Add,
                [te, wpe.row(places.map_or(first + row % seq, |places| places[row].max(0) as usize), width)],
                out,
            ),
            // SAFETY: rows have one task each; `out` shares no memory with the table (`Op::check`).
            None if kept.is_some() => unsafe { scale_by(isa, out.all_mut(), op.factor) },
            // SAFETY: rows have one task each; `out` shares no memory with the table (`Op::check`).
            None if op.factor == 1.0 => unsafe { out.all_mut().copy_from_slice(te.all()) },
            // SAFETY: rows have one task each; `out` shares no memory with the table (`Op::check`).
            None => unsafe { scaled(isa, out.all_mut(), op.factor, te.all()) },
        }
    })
}

pub fn embedding_bwd(ctx: &mut Ctx<'_>, op: &EmbeddingBwd) -> Result<()> {
    let d_wte = ctx.f32(op.d_wte)?;
    let d_wpe = op.d_wpe.map(|slot| ctx.f32(slot)).transpose()?;
    let (d_out, tokens) = (ctx.f32(op.d_out)?, ctx.i32(op.tokens)?);
    let (seq, width, isa) = (op.tokens.shape.cols(), op.d_wte.shape.cols(), ctx.isa);
    let adds = op.accum.adds(ctx.scalars.added());
    // SAFETY: nothing writes the tokens while the op runs.
    let ids = unsafe { tokens.all() };
    check_ids("token", ids, op.d_wte.shape.rows(), None)?;
    let places = places(ctx, op.positions, None)?;
    if !op.accum_wte.adds(ctx.scalars.added()) {
        // SAFETY: tasks have disjoint ranges of the gradient.
        ctx.chunks(d_wte.len(), CHUNK, |r, _| unsafe { d_wte.get_mut(r).fill(0.0) })?;
    }
    ctx.chunks(width, COLS, |cols, _| {
        // SAFETY: a task touches only its columns of the two gradients, which share no memory with `d_out`; the
        // mutable pieces are made one at a time.
        unsafe {
            let piece = |row: usize| row * width + cols.start..row * width + cols.end;
            if let Some(d_wpe) = d_wpe.filter(|_| !adds) {
                (0..d_wpe.len() / width).for_each(|row| d_wpe.get_mut(piece(row)).fill(0.0));
            }
            for (row, &id) in ids.iter().enumerate() {
                let d = d_out.get(piece(row));
                let d_row = d_wte.get_mut(piece(id as usize));
                if op.factor == 1.0 {
                    add_to(isa, d_row, d);
                } else {
                    add_scaled(isa, d_row, op.factor, d);
                }
                if let Some(d_wpe) = d_wpe {
                    add_to(
                        isa,
                        d_wpe.get_mut(piece(places.map_or(row % seq, |places| places[row] as usize))),
                        d,
                    );
                }
            }
        }
    })
}
