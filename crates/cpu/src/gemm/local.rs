//! Small products on one thread, for use inside a task: a is read in place unless its rows are scattered far, b if its
//! rows are contiguous.

use super::kernel::{Packing, Tile};
use super::plan::slice_len;
use super::workspace::LocalScratch;
use super::{Beta, Gemm, kernels};
use crate::isa::Isa;

/// TileRows of a packed at a time: they stay in the second-level cache.
pub(super) const PACKED_ROWS: usize = 64;
/// Floats between two steps from which on they are far apart, and columns that make packing pay.
const FAR: usize = 128;
const WIDE: usize = 32;

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
        // SAFETY: guaranteed by the caller.
        return unsafe { g.no_steps(0) };
    }
    let kernels = kernels(isa);
    // Columns in panels of equal numbers of vectors: 64 becomes 32 + 32 rather than 48 + 16.
    let vectors = g.n.div_ceil(kernels.lanes);
    let panels = vectors.div_ceil(kernels.nr / kernels.lanes);
    let width = vectors.div_ceil(panels) * kernels.lanes;
    let kc = slice_len(g.k);
    let packs_a = scatters(g);
    if g.b.cs != 1 {
        scratch.packed.reserve(kc * kernels.nr);
    }
    if packs_a {
        scratch.packed_a.reserve(kc * PACKED_ROWS);
    }
    let chunk = if packs_a { PACKED_ROWS } else { g.m };
    for k0 in (0..g.k).step_by(kc) {
        let k = kc.min(g.k - k0);
        for first in (0..g.m).step_by(chunk) {
            let rows = first..g.m.min(first + chunk);
            // SAFETY: element (first, k0) is inside a; the scratch holds so many rows of k steps.
            let a = unsafe {
                let a = g.a.ptr.add(first * g.a.rs + k0 * g.a.cs);
                if packs_a {
                    let packed = scratch.packed_a.as_mut_ptr();
                    (kernels.pack_a)(&Packing {
                        src: a,
                        s_w: g.a.rs,
                        s_k: g.a.cs,
                        count: rows.len(),
                        k,
                        dst: packed,
                    });
                    // Row i of a panel at + i, a panel after mr rows.
                    TileRows { ptr: packed, rs: 1, cs: kernels.mr, tile: kernels.mr * k }
                } else {
                    TileRows { ptr: a, rs: g.a.rs, cs: g.a.cs, tile: kernels.mr * g.a.rs }
                }
            };
            for column in (0..g.n).step_by(width) {
                let columns = width.min(g.n - column);
                // SAFETY: element (k0, column) is inside b; the scratch holds one panel of k steps.
                let (b, b_rs) = unsafe {
                    let b = g.b.ptr.add(k0 * g.b.rs + column * g.b.cs);
                    if g.b.cs == 1 {
                        (b, g.b.rs)
                    } else {
                        let packed = scratch.packed.as_mut_ptr();
                        let panel =
                            Packing { src: b, s_w: g.b.cs, s_k: g.b.rs, count: columns, k, dst: packed };
                        (kernels.pack_b)(&panel);
                        (packed.cast_const(), kernels.nr)
                    }
                };
                let vectors = columns.div_ceil(kernels.lanes);
                let mut tile = Tile {
                    k,
                    a: a.ptr,
                    a_rs: a.rs,
                    a_cs: a.cs,
                    b,
                    b_rs,
                    // SAFETY: first < m, column < n.
                    c: unsafe { g.c.ptr.add(first * g.c.rs + column) },
                    c_rs: g.c.rs,
                    rows: kernels.mr,
                    columns,
                    last: columns - (vectors - 1) * kernels.lanes,
                    alpha: g.alpha,
                    accumulate: g.beta == Beta::Accumulate || k0 > 0,
                    fetch: std::ptr::null(),
                };
                // A tile of this size takes some hundred cycles: from one to the next only what changes is written.
                let full = kernels.strided[kernels.mr - 1][vectors - 1];
                for _ in 0..rows.len() / kernels.mr {
                    // SAFETY: the kernel of the size of the tile, of an `Isa` this machine has.
                    unsafe { full(&tile) };
                    tile.a = tile.a.wrapping_add(a.tile);
                    tile.c = tile.c.wrapping_add(kernels.mr * g.c.rs);
                }
                tile.rows = rows.len() % kernels.mr;
                if tile.rows > 0 {
                    // SAFETY: as above.
                    unsafe { (kernels.strided[tile.rows - 1][vectors - 1])(&tile) };
                }
            }
        }
    }
    g.finish(0..g.m, 0..g.n, 0);
}

/// Where the tiles of some rows of a begin.
struct TileRows {
    ptr: *const f32,
    rs: usize,
    cs: usize,
    /// From the first row of a tile to that of the next, in floats.
    tile: usize,
}

/// Whether the steps of a row of a are so far apart that their cache lines evict each other, and are used often
/// enough that copying them pays.
fn scatters(g: &Gemm<'_>) -> bool {
    g.a.rs == 1 && g.a.cs >= FAR && g.n >= WIDE && g.b.cs == 1
}
