//! How the windows of an op are cut into those of its tasks.

use crate::element::Elem;
use crate::isa::Isa;
use crate::memory::Span;
use crate::team::{Done, Split};
use ironhorse_core::eager::Rows;

/// Elements of a task: few enough to balance, enough to be worth handing out.
const CHUNK: usize = 8192;

/// Runs `task` on pieces of windows of equal length, inputs and outputs. `weight`: see [`Split::pieces`].
pub fn pieces<T: Elem, const IN: usize, const OUT: usize>(
    on: &impl Split,
    weight: usize,
    (from, to): ([Span<T>; IN], [Span<T>; OUT]),
    task: impl Fn(Isa, [Span<T>; IN], [Span<T>; OUT]) + Sync,
) -> Done {
    let isa = on.isa();
    on.pieces(from[0].len(), CHUNK, weight, |r| {
        task(isa, from.map(|x| x.part(r.clone())), to.map(|x| x.part(r.clone())));
    })
}

/// Runs `task` on the rows of windows of equal size, inputs and outputs. `weight`: see [`Split::rows`].
pub fn rows<T: Elem, const IN: usize, const OUT: usize>(
    on: &impl Split,
    (Rows { rows, cols }, weight): (Rows, usize),
    (from, to): ([Span<T>; IN], [Span<T>; OUT]),
    task: impl Fn(Isa, [Span<T>; IN], [Span<T>; OUT]) + Sync,
) -> Done {
    let isa = on.isa();
    on.rows(rows, cols, weight, |row| {
        task(isa, from.map(|x| x.row(row, cols)), to.map(|x| x.row(row, cols)));
    })
}
