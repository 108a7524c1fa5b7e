//! Sums down the columns: gradients of what all rows share.
//!
//! Rows are cut into at most 64 chunks, by their number and length alone. A task adds its rows, 64 at a time in the type of
//! sums, these in f64; the chunks are added in order. So the bits do not depend on the threads.

use super::Span;
use super::process_team::ProcessTeam;
use crate::element::{Elem, Real};
use crate::team::{Done, Split};
use ironhorse_core::eager::Rows;

/// Chunks at most.
const CHUNKS: usize = 64;
/// Elements of a chunk at least.
const CHUNK: usize = 1 << 14;
/// Rows added before the sum joins the f64 total.
const ROWS_PER_SUM: usize = 64;

/// Runs `task(row, sums)` on every row and writes the N sums down the columns to those of `to` that are given. The sums of a
/// gradient that is not given are empty.
///
/// # Safety
/// `to`: cols each, or not given; nobody else uses them.
pub unsafe fn rows_and_columns<T: Elem, const N: usize>(
    rows: Rows,
    weight: usize,
    to: [Span<T>; N],
    task: impl Fn(usize, &mut [Vec<T::Acc>; N]) + Sync,
) -> Done {
    let cols = rows.cols;
    let chunk = rows.rows.div_ceil(CHUNKS).max(CHUNK / cols.max(1)).max(1);
    let chunks = rows.rows.div_ceil(chunk);
    let lengths = to.map(|x| if x.is_some() { cols } else { 0 });
    let mut partials = lengths.map(|len| vec![0.0_f64; chunks.max(1) * len]);
    let shared = partials.each_mut().map(|x| Span::of_slice(x));
    let work = chunk.saturating_mul(cols).saturating_mul(weight);
    ProcessTeam.pieces(chunks, 1, work, |range| {
        for number in range {
            let mut sums = lengths.map(|len| vec![T::Acc::ZERO; len]);
            let end = rows.rows.min((number + 1) * chunk);
            for first in (number * chunk..end).step_by(ROWS_PER_SUM) {
                (first..end.min(first + ROWS_PER_SUM)).for_each(|row| task(row, &mut sums));
                for (sums, partial) in sums.iter_mut().zip(shared) {
                    // SAFETY: chunk `number` of the partial sums is this task's.
                    let partial = unsafe { partial.row(number, sums.len()).all_mut() };
                    for (partial, sum) in partial.iter_mut().zip(sums) {
                        *partial += std::mem::take(sum).wide();
                    }
                }
            }
        }
    })?;
    for ((to, partials), len) in to.into_iter().zip(&mut partials).zip(lengths) {
        for number in 1..chunks {
            let (first, later) = partials.split_at_mut(number * len);
            first[..len].iter_mut().zip(&later[..len]).for_each(|(sum, x)| *sum += x);
        }
        // SAFETY: the tasks are done; nobody else uses the results, as the caller guarantees.
        let to = unsafe { to.get_mut(0..len) };
        to.iter_mut().zip(&*partials).for_each(|(to, &sum)| *to = T::store(T::Acc::of(sum)));
    }
    Ok(())
}
