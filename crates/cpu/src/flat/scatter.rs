//! The gradient of an embedding table.

use super::pool::{isa, pieces};
use super::{Done, Span};
use crate::op::elementwise::add_in_place;

/// Tasks: each owns the table rows whose number has its remainder, so that every row has one owner and one order.
const OWNERS: usize = 16;

/// grad_weight\[idx\[i\]\] += grad_out\[i\] for every i, in the order of i.
///
/// # Safety
/// See [the module](super); grad_out: n·dim, idx: n, each such that its row lies inside grad_weight.
///
/// # Errors
/// See [the module](super).
pub unsafe fn scatter_add(grad_out: Span<f32>, idx: Span<i32>, grad_weight: Span<f32>, dim: usize) -> Done {
    let isa = isa();
    // On one thread a single owner of all looks at the indices once, not 16 times.
    let (small, each) = (grad_out.len() < 1 << 17, grad_out.len() / OWNERS);
    // SAFETY: nobody writes the indices.
    let idx = unsafe { idx.all() };
    pieces(OWNERS, if small { OWNERS } else { 1 }, each, |owners| {
        for (i, &row) in idx.iter().enumerate() {
            let row = row as usize;
            if owners.contains(&(row % OWNERS)) {
                let at = row * dim;
                // SAFETY: the owner alone uses this row of the table; it is inside, which `get_mut` asks.
                unsafe {
                    let sums = grad_weight.get_mut(at..at + dim);
                    add_in_place(isa, sums, grad_out.get(i * dim..(i + 1) * dim));
                }
            }
        }
    })
}
