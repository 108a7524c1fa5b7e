//! What several ranks exchange, and the sum of what arrives.

use super::Ctx;
use ironhorse_core::op::{AllGather, Exchange, TreeSum};
use ironhorse_core::ranks::PIECE_ELEMENTS;
use ironhorse_core::{Error, Place, Result, Slices, SumTree};
use std::ops::Range;

/// Elements that a task adds at a time: a few cache lines of each row.
const BLOCK: usize = 256;
/// Elements of a task.
const CHUNK: usize = 1 << 14;
/// The most sums that are open at a time: more than a tree of 2³² micro-steps needs.
const OPEN: usize = 34;

/// Checks that the op is for this rank.
fn check(ctx: &Ctx<'_>, place: Place) -> Result<()> {
    let found = ctx.ranks.place();
    if found == place {
        return Ok(());
    }
    let (Place { rank, world }, Place { rank: other, world: of }) = (found, place);
    Err(Error::Program(format!(
        "the engine is rank {rank} of {world}, the program is for rank {other} of {of}"
    )))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    let cells = bytes.as_chunks_mut().0.iter_mut().zip(values);
    cells.for_each(|(cell, value)| *cell = value.to_le_bytes());
    bytes
}

fn store(out: &mut [f32], bytes: &[u8]) {
    let cells = out.iter_mut().zip(bytes.as_chunks().0);
    cells.for_each(|(value, &cell)| *value = f32::from_le_bytes(cell));
}

pub fn exchange(ctx: &mut Ctx<'_>, op: &Exchange) -> Result<()> {
    check(ctx, op.place)?;
    let world = op.place.world;
    let out = ctx.f32(op.out)?;
    let width = out.len() / op.rows();
    let inp = ctx.f32_or_none(op.inp)?;
    // SAFETY: nothing writes the node while the op runs.
    let own = bytes(unsafe { inp.all() });
    let mut send: Vec<&[u8]> = vec![&[]; world];
    for (rank, part) in op.receivers(inp.len()) {
        send[rank] = &own[4 * part.start..4 * part.end];
    }
    let senders = op.senders();
    let mut arrived: Vec<Vec<u8>> = vec![Vec::new(); world];
    senders.iter().for_each(|&(rank, _)| arrived[rank] = vec![0; 4 * width]);
    let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
    ctx.ranks.exchange(&send, &mut receive)?;
    for (rank, row) in senders {
        // SAFETY: one thread; rows do not overlap, and `out` shares no memory with the node (`Op::check`).
        store(unsafe { out.get_mut(row * width..(row + 1) * width) }, &arrived[rank]);
    }
    Ok(())
}

pub fn all_gather(ctx: &mut Ctx<'_>, op: &AllGather) -> Result<()> {
    let (slices, place) = (op.slices, op.slices.place);
    check(ctx, place)?;
    if place.is_alone() {
        return Ok(());
    }
    let data = ctx.f32(op.data)?;
    let part = |rank: usize| slices.part_of(&(0..data.len()), rank);
    // SAFETY: one thread.
    let own = bytes(unsafe { data.get(part(place.rank)) });
    let send: Vec<&[u8]> = vec![&own; place.world];
    let mut arrived: Vec<Vec<u8>> = (0..place.world).map(|rank| vec![0; 4 * part(rank).len()]).collect();
    let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
    ctx.ranks.exchange(&send, &mut receive)?;
    for (rank, bytes) in arrived.iter().enumerate().filter(|(rank, _)| *rank != place.rank) {
        // SAFETY: one thread; parts do not overlap.
        store(unsafe { data.get_mut(part(rank)) }, bytes);
    }
    Ok(())
}

pub fn tree_sum(ctx: &mut Ctx<'_>, op: &TreeSum) -> Result<()> {
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    let merges = SumTree::new(op.micro_steps).merges(op.world);
    let width = out.len();
    ctx.chunks(width, CHUNK, |range, _| {
        for start in range.clone().step_by(BLOCK) {
            let block = start..(start + BLOCK).min(range.end);
            let mut open = [[0.0_f32; BLOCK]; OPEN];
            let mut count = 0;
            for (row, &merges) in merges.iter().enumerate() {
                // SAFETY: nothing writes the rows while the op runs.
                let row = unsafe { inp.get(row * width + block.start..row * width + block.end) };
                open[count][..row.len()].copy_from_slice(row);
                count += 1;
                for _ in 0..merges {
                    let (below, top) = open[..count].split_at_mut(count - 1);
                    if let Some(below) = below.last_mut() {
                        below.iter_mut().zip(&top[0]).for_each(|(below, top)| *below += top);
                    }
                    count -= 1;
                }
            }
            // SAFETY: tasks have disjoint ranges; the two slots share no memory (`Op::check`).
            unsafe { out.get_mut(block.clone()) }.copy_from_slice(&open[0][..block.len()]);
        }
    })
}

/// Gives every rank the sums of all pieces, of which it has those of its own parts; in the order of the pool.
pub fn share_pieces(ctx: &mut Ctx<'_>, slices: Slices, elements: usize) -> Result<()> {
    check(ctx, slices.place)?;
    let pieces = |part: &Range<usize>| part.start / PIECE_ELEMENTS..part.end.div_ceil(PIECE_ELEMENTS);
    let world = slices.place.world;
    let of: Vec<Vec<usize>> = (0..world)
        .map(|rank| {
            slices.parts_of(elements, rank).iter().filter(|part| !part.is_empty()).flat_map(pieces).collect()
        })
        .collect();
    let partials = &mut ctx.partials;
    let own: Vec<u8> =
        of[slices.place.rank].iter().flat_map(|&piece| partials[piece].to_le_bytes()).collect();
    let send: Vec<&[u8]> = vec![&own; world];
    let mut arrived: Vec<Vec<u8>> = of.iter().map(|pieces| vec![0; 8 * pieces.len()]).collect();
    let mut receive: Vec<&mut [u8]> = arrived.iter_mut().map(Vec::as_mut_slice).collect();
    ctx.ranks.exchange(&send, &mut receive)?;
    for (pieces, bytes) in of.iter().zip(&arrived) {
        for (&piece, &cell) in pieces.iter().zip(bytes.as_chunks().0) {
            partials[piece] = f64::from_le_bytes(cell);
        }
    }
    Ok(())
}
