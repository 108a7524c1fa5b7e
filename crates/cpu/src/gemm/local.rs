//! Small products on one thread, for use inside a task: a is read in place, b too if its rows are contiguous.

use super::kernel::Tile;
use super::plan::slice_len;
use super::workspace::LocalScratch;
use super::{Beta, Gemm, kernels};
use crate::isa::Isa;

/// Computes `g` on the calling thread; the epilogue is called once, as worker 0.
///
/// Meant for tiles of about 64 x 64 x 64: neither operand should be larger than the first two levels of cache.
///
/// # Safety
/// As [`gemm`](super::gemm).
pub unsafe fn gemm_local(scratch: &mut LocalScratch, isa: Isa, g: &Gemm<'_>) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    if g.k == 0 {
        // SAFETY: the caller's contract.
        return unsafe { g.no_steps(0) };
    }
    let kernels = kernels(isa);
    // Columns in panels of equal numbers of vectors: 64 becomes 32 + 32 rather than 48 + 16.
    let vectors = g.n.div_ceil(kernels.lanes);
    let panels = vectors.div_ceil(kernels.nr / kernels.lanes);
    let width = vectors.div_ceil(panels) * kernels.lanes;
    let kc = slice_len(g.k);
    if g.b.cs != 1 {
        scratch.packed.reserve(kc * kernels.nr);
    }
    for k0 in (0..g.k).step_by(kc) {
        let k = kc.min(g.k - k0);
        for column in (0..g.n).step_by(width) {
            let columns = width.min(g.n - column);
            // SAFETY: element (k0, column) is inside b; the scratch holds one panel of k steps.
            let (b, b_rs) = unsafe {
                let b = g.b.ptr.add(k0 * g.b.rs + column * g.b.cs);
                if g.b.cs == 1 {
                    (b, g.b.rs)
                } else {
                    let packed = scratch.packed.as_mut_ptr();
                    (kernels.pack_b)(b, g.b.cs, g.b.rs, columns, k, packed);
                    (packed.cast_const(), kernels.nr)
                }
            };
            let vectors = columns.div_ceil(kernels.lanes);
            for row in (0..g.m).step_by(kernels.mr) {
                let rows = kernels.mr.min(g.m - row);
                let tile = Tile {
                    k,
                    // SAFETY: row < m, k0 < k.
                    a: unsafe { g.a.ptr.add(row * g.a.rs + k0 * g.a.cs) },
                    a_rs: g.a.rs,
                    a_cs: g.a.cs,
                    b,
                    b_rs,
                    // SAFETY: row < m, column < n.
                    c: unsafe { g.c.ptr.add(row * g.c.rs + column) },
                    c_rs: g.c.rs,
                    last: columns - (vectors - 1) * kernels.lanes,
                    alpha: g.alpha,
                    accumulate: g.beta == Beta::Accumulate || k0 > 0,
                    fetch: std::ptr::null(),
                };
                // SAFETY: the kernel of the size of the tile, of an `Isa` this machine has.
                unsafe { (kernels.strided[rows - 1][vectors - 1])(&tile) };
            }
        }
    }
    g.finish(0..g.m, 0..g.n, 0);
}
