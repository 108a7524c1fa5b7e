//! Sums down the columns: gradients of what all rows share.
//!
//! order  rows in blocks of [`BLOCK`], one after the other from zero, then the blocks in order: whether tasks have some of the columns or
//! some of the blocks changes no bit.

use super::{Ctx, TASK};
use crate::memory::Span;
use ironhorse_core::Result;
use std::ops::Range;

/// Columns a task handles, at most.
const COLS: usize = 64;
/// Rows summed in one accumulator before it is added to the total: keeps rounding low over many rows.
const BLOCK: usize = 32;

/// Writes to, or with `adds` adds to, each of `sums` what `tally(row, columns, blocks)` adds to its block over all rows. Each task owns
/// some columns and goes through all rows.
pub fn column_sums<const N: usize>(
    ctx: &Ctx<'_>,
    sums: [Span<f32>; N],
    rows: usize,
    adds: bool,
    tally: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    ctx.chunks(sums[0].len(), columns_of_task(sums[0].len()), |cols, _| {
        let n = cols.len();
        let mut totals = [[0.0_f32; COLS]; N];
        for first in (0..rows).step_by(BLOCK) {
            let mut blocks = [[0.0_f32; COLS]; N];
            for row in first..rows.min(first + BLOCK) {
                tally(row, cols.clone(), blocks.each_mut().map(|block| &mut block[..n]));
            }
            for (total, block) in totals.iter_mut().flatten().zip(blocks.iter().flatten()) {
                *total += block;
            }
        }
        for (sums, total) in sums.iter().zip(&totals) {
            // SAFETY: tasks have disjoint columns of the sums, which share no memory with anything else (`Op::check`).
            super::store(unsafe { sums.get_mut(cols.clone()) }, &total[..n], adds);
        }
    })
}

/// The columns of a small model are two tasks at least.
fn columns_of_task(columns: usize) -> usize {
    if columns <= COLS { COLS / 2 } else { COLS }
}

/// Floats that [`sums_beside`] needs for the blocks of `N` sums over `rows` rows.
pub fn beside_len<const N: usize>(rows: usize, columns: usize) -> usize {
    rows.div_ceil(BLOCK) * N * columns
}

/// As [`column_sums`], where tasks have rows, with which `tally(row, blocks)` does other work while they are in a cache. `room` is for
/// the blocks: [`beside_len`] floats.
pub fn sums_beside<const N: usize>(
    ctx: &Ctx<'_>,
    sums: [Span<f32>; N],
    (rows, room): (usize, Span<f32>),
    adds: bool,
    tally: impl Fn(usize, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let (columns, blocks) = (sums[0].len(), rows.div_ceil(BLOCK));
    ctx.chunks(blocks, (TASK / (BLOCK * columns).max(1)).max(1), |task, _| {
        for block in task {
            // SAFETY: every block has one task and room of its own.
            let mut own: [&mut [f32]; N] =
                std::array::from_fn(|i| unsafe { room.row(block * N + i, columns).all_mut() });
            own.iter_mut().for_each(|own| own.fill(0.0));
            for row in block * BLOCK..rows.min((block + 1) * BLOCK) {
                tally(row, own.each_mut().map(|own| &mut **own));
            }
        }
    })?;
    ctx.chunks(columns, columns_of_task(columns), |part, _| {
        for (i, sums) in sums.iter().enumerate() {
            let mut total = [0.0_f32; COLS];
            for block in 0..blocks {
                // SAFETY: all blocks are done.
                let block = unsafe { room.row(block * N + i, columns).get(part.clone()) };
                total.iter_mut().zip(block).for_each(|(total, block)| *total += block);
            }
            // SAFETY: as in `column_sums`.
            super::store(unsafe { sums.get_mut(part.clone()) }, &total[..part.len()], adds);
        }
    })
}
