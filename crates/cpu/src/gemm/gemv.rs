//! Few rows times a matrix whose columns are contiguous (token-by-token generation): b is streamed once, unpacked.
//!
//! order  as [`math::dot`](crate::math::dot): 32 lanes over k and a fixed tree, whatever m and the threads.

use super::{Beta, Gemm};
use crate::isa::Isa;
use crate::math::dot_inline;
use crate::multiversion;
use crate::team::{TaskPanic, Team};

/// More rows than that are faster packed.
const MAX_ROWS: usize = 4;
/// Columns in a task.
const BLOCK: usize = 64;

/// Whether this path can take the product and should.
pub(super) fn fits(g: &Gemm<'_>) -> bool {
    g.m <= MAX_ROWS && g.b.rs == 1 && g.a.cs == 1
}

/// # Safety
/// As [`gemm`](super::gemm), and [`fits`].
pub(super) unsafe fn gemv(team: &Team, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    team.chunks(g.n, BLOCK, |columns, worker| {
        for j in columns.clone() {
            // SAFETY: column j < n of b is k contiguous floats.
            let w = unsafe { std::slice::from_raw_parts(g.b.ptr.add(j * g.b.cs), g.k) };
            for i in 0..g.m {
                // SAFETY: row i < m of a is k contiguous floats.
                let x = unsafe { std::slice::from_raw_parts(g.a.ptr.add(i * g.a.rs), g.k) };
                let sum = g.alpha * column(isa, w, x);
                // SAFETY: element (i, j) of c, which is this task's.
                unsafe {
                    let c = g.c.ptr.add(i * g.c.rs + j);
                    *c = if g.beta == Beta::Accumulate { *c + sum } else { sum };
                }
            }
        }
        g.finish(0..g.m, columns, worker);
    })
}

multiversion! {
    fn column<const FMA: bool>(w: &[f32], x: &[f32]) -> f32 {
        dot_inline::<FMA>(w, x)
    }
}
