//! Sums down the columns: gradients of what all rows share.
//!
//! Rows are cut into at most 64 chunks, by their number and length alone. A task adds its rows, 64 at a time in the type of
//! sums, these in f64; the chunks are added in order. So the bits do not depend on the threads.

use super::elem::Elem;
use super::ptr::Ptr;
use super::real::Real;
use crate::flat::Done;
use crate::flat::pool::pieces;
use ironhorse_core::eager::Rows;

/// Chunks at most.
const CHUNKS: usize = 64;
/// Elements of a chunk at least.
const CHUNK: usize = 1 << 14;
/// Rows added before the sum joins the f64 total.
const SPELL: usize = 64;

/// The sums of a task: `N` rows of `cols`; empty where the gradient is not wanted.
pub struct Sums<A, const N: usize> {
    spell: [Vec<A>; N],
}

impl<A: Real, const N: usize> Sums<A, N> {
    /// To add a row to.
    pub fn get(&mut self) -> &mut [Vec<A>; N] {
        &mut self.spell
    }
}

/// Runs `task(row, sums)` on every row and writes the N sums down the columns to `to`, as far as they are wanted.
///
/// # Safety
/// `to`: cols each, or null; nobody else uses them.
pub unsafe fn rows_and_columns<T: Elem, const N: usize>(
    rows: Rows,
    weight: usize,
    to: [Ptr<T>; N],
    task: impl Fn(usize, &mut Sums<T::Acc, N>) + Sync,
) -> Done {
    let cols = rows.cols;
    let chunk = rows.rows.div_ceil(CHUNKS).max(CHUNK / cols.max(1)).max(1);
    let chunks = rows.rows.div_ceil(chunk);
    let lengths = to.map(|x| if x.wanted() { cols } else { 0 });
    let mut partials = lengths.map(|len| vec![0.0_f64; chunks * len]);
    let mut shared = [None; N];
    shared.iter_mut().zip(&mut partials).for_each(|(at, x)| *at = Some(Ptr::of_slice(x)));
    pieces(chunks, 1, chunk.saturating_mul(cols).saturating_mul(weight), |range| {
        for number in range {
            let mut sums = Sums { spell: lengths.map(|len| vec![T::Acc::ZERO; len]) };
            let end = rows.rows.min((number + 1) * chunk);
            let mut row = number * chunk;
            while row < end {
                let stop = end.min(row + SPELL);
                (row..stop).for_each(|row| task(row, &mut sums));
                row = stop;
                for ((spell, at), &len) in sums.spell.iter_mut().zip(shared).zip(&lengths) {
                    let Some(at) = at else { continue };
                    // SAFETY: chunk `number` of the partial sums is this task's.
                    let partial = unsafe { at.at(number * len).slice_mut(len) };
                    for (partial, spell) in partial.iter_mut().zip(spell) {
                        *partial += std::mem::take(spell).wide();
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
        partials.resize(partials.len().max(len), 0.0);
        // SAFETY: the tasks are done; the caller's.
        let to = unsafe { to.slice_mut(len) };
        to.iter_mut().zip(&*partials).for_each(|(to, &sum)| *to = T::store(T::Acc::of(sum)));
    }
    Ok(())
}
