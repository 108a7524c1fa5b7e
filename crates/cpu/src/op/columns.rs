//! Sums down the columns: gradients of what all rows share. Each task owns some columns, so every sum has one owner and one
//! order.

use super::Ctx;
use crate::memory::Span;
use ironhorse_core::Result;
use std::ops::Range;

/// Columns a task handles, at most.
const COLS: usize = 64;
/// Rows summed in one accumulator before it is added to the total: keeps rounding low over many rows.
const BLOCK: usize = 32;

/// Writes to, or with `adds` adds to, each of `sums` what `tally(row, columns, blocks)` adds to its block over all rows.
pub fn column_sums<const N: usize>(
    ctx: &Ctx<'_>,
    sums: [Span<f32>; N],
    rows: usize,
    adds: bool,
    tally: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    // The columns of a small model are two tasks at least.
    let size = if sums[0].len() <= COLS { COLS / 2 } else { COLS };
    ctx.chunks(sums[0].len(), size, |cols, _| {
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
