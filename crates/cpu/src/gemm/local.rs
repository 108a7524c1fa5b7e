//! Small products on one thread, for use inside a task: a is read in place unless its rows are scattered far, b if its
//! rows are contiguous.

use super::kernel::{AHEAD_ROWS, Ahead, Kernels, LINE, Packing, Tile, Tiling, rows_apart};
use super::plan::{KC, slice_len};
use super::workspace::LocalScratch;
use super::{Beta, Gemm, MatMut, MatRef, kernels};
use crate::isa::{Isa, IsaKind};

/// Rows of a packed at a time: they stay in the second-level cache.
pub(super) const PACKED_ROWS: usize = 64;
/// Floats between two steps from which on they are far apart, and columns that make packing pay.
const FAR: usize = 128;
const WIDE: usize = 96;

/// Computes `g` on the calling thread; the epilogue is called once, as worker 0.
///
/// Meant for tiles of about 64 x 64 x 64: neither operand should be larger than the first two levels of cache.
///
/// # Safety
/// As [`gemm`](super::gemm).
pub unsafe fn gemm_local(scratch: &mut LocalScratch, isa: Isa, g: &Gemm<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe { local(scratch, isa, g, Given { packed: None, streams: false, beside: None }) };
}

/// What [`local`] may rely on.
#[derive(Clone, Copy)]
pub(super) struct Given {
    /// All of b in panels, as [`pack_right`] leaves them.
    pub packed: Option<*const f32>,
    /// Rows of a come from memory, so they are fetched a tile ahead, and those of c go there.
    pub streams: bool,
    /// Rows beside those of c, to bring into the cache while the product is computed.
    pub beside: Option<Beside>,
}

/// Rows that are needed as soon as the same rows of c are final.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// The first.
    pub ptr: *const f32,
    /// From one to the next, in floats.
    pub rs: usize,
    /// Floats of a row.
    pub width: usize,
}

impl Beside {
    /// From row `first` on.
    pub(super) fn rows_from(self, first: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(first * self.rs), ..self }
    }

    /// The addresses of [`Ahead`] that cover `rows` rows: [`AHEAD_ROWS`] lines side by side each.
    fn units(self, rows: usize) -> impl Iterator<Item = *const f32> {
        let columns = (0..self.width).step_by(AHEAD_ROWS * LINE);
        (0..rows).flat_map(move |row| {
            columns.clone().map(move |column| self.ptr.wrapping_add(row * self.rs + column))
        })
    }
}

/// Panels of b, and floats of all of them.
pub(super) fn packed_len(kernels: &'static Kernels, g: &Gemm<'_>) -> (usize, usize) {
    let (tiling, kc) = (Tiling::new(kernels, g.n), slice_len(g.k));
    let panels = g.n.div_ceil(tiling.columns);
    (panels, g.k.div_ceil(kc.max(1)) * panels * kc * tiling.width)
}

/// Packs panel number `panel` of b, all slices of it, to where [`local`] looks for it.
///
/// # Safety
/// b is readable; `dst` is good for the floats of [`packed_len`], and nobody else uses this panel of it.
pub(super) unsafe fn pack_right(kernels: &'static Kernels, g: &Gemm<'_>, panel: usize, dst: *mut f32) {
    let (tiling, kc) = (Tiling::new(kernels, g.n), slice_len(g.k));
    let (panels, column) = (g.n.div_ceil(tiling.columns), panel * tiling.columns);
    for (slice, k0) in (0..g.k).step_by(kc).enumerate() {
        // SAFETY: the panel and the slice are inside b and, packed, inside `dst`.
        unsafe {
            let src = g.b.ptr.add(k0 * g.b.rs + column * g.b.cs);
            let dst = dst.add((slice * panels + panel) * kc * tiling.width);
            let (count, k) = (tiling.columns.min(g.n - column), kc.min(g.k - k0));
            (tiling.pack_b)(&Packing { src, s_w: g.b.cs, s_k: g.b.rs, count, k, dst });
        }
    }
}

/// Computes a product on the calling thread, in slices of [`slice_len`] steps also where the matrices are narrow.
///
/// # Safety
/// As [`gemm`](super::gemm); what is given is there.
pub(super) unsafe fn local(scratch: &mut LocalScratch, isa: Isa, g: &Gemm<'_>, given: Given) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    if g.k == 0 {
        // SAFETY: guaranteed by the caller.
        return unsafe { g.no_steps(0) };
    }
    if turns(isa, g) && given.packed.is_none() {
        // SAFETY: guaranteed by the caller.
        return unsafe { turned(scratch, isa, g) };
    }
    let kernels = kernels(isa);
    let packs_a = scatters(g);
    let tiling = if packs_a { Tiling::high(kernels, g.n) } else { Tiling::new(kernels, g.n) };
    let panels = g.n.div_ceil(tiling.columns);
    let kc = slice_len(g.k);
    let mut list = [std::ptr::null(); KC.div_ceil(LINE)];
    if g.b.cs != 1 && given.packed.is_none() {
        scratch.packed.reserve(kc * tiling.width);
    }
    if packs_a {
        scratch.packed_a.reserve(kc * PACKED_ROWS);
    }
    let chunk = if packs_a { PACKED_ROWS } else { g.m };
    // What is beside is fetched by the tiles of all panels but the first, which fetches rows of a.
    let mut units = given.beside.into_iter().flat_map(|beside| beside.units(g.m));
    let tiles = (g.m / tiling.rows).max(1) * (panels - 1).max(1);
    let each = given.beside.map_or(0, |b| (g.m * b.width.div_ceil(AHEAD_ROWS * LINE)).div_ceil(tiles));
    for (slice, k0) in (0..g.k).step_by(kc).enumerate() {
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
                    TileRows { ptr: packed, rs: 1, cs: kernels.mr, apart: k }
                } else {
                    TileRows { ptr: a, rs: g.a.rs, cs: g.a.cs, apart: g.a.rs }
                }
            };
            for (panel, column) in (0..g.n).step_by(tiling.columns).enumerate() {
                let columns = tiling.columns.min(g.n - column);
                // SAFETY: element (k0, column) is inside b; the scratch holds one panel of k steps.
                let (b, b_rs) = unsafe {
                    let b = g.b.ptr.add(k0 * g.b.rs + column * g.b.cs);
                    if let Some(packed) = given.packed {
                        (packed.add((slice * panels + panel) * kc * tiling.width), tiling.width)
                    } else if g.b.cs == 1 {
                        (b, g.b.rs)
                    } else {
                        let packed = scratch.packed.as_mut_ptr();
                        let panel =
                            Packing { src: b, s_w: g.b.cs, s_k: g.b.rs, count: columns, k, dst: packed };
                        (tiling.pack_b)(&panel);
                        (packed.cast_const(), tiling.width)
                    }
                };
                let vectors = columns.div_ceil(kernels.lanes);
                let mut tile = Tile {
                    k,
                    a: a.ptr,
                    a_rows: rows_apart(a.rs),
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
                    ahead: Ahead::NOTHING,
                    fetches_c: given.streams && g.beta == Beta::Overwrite && k0 == 0,
                    past_caches: false,
                };
                let fetches = given.streams && panel == 0 && a.cs == 1;
                // A tile takes some hundred cycles: from one to the next only what changes is written.
                let mut left_rows = rows.len();
                while left_rows > 0 {
                    tile.rows = left_rows.min(tiling.rows);
                    left_rows -= tile.rows;
                    // Steps that the tile has left for what it fetches besides c.
                    let lines_of_c = tile.rows * vectors;
                    let left = if tile.fetches_c && k >= lines_of_c { k - lines_of_c } else { k };
                    if fetches {
                        let next = tile.a.wrapping_add(tile.rows * a.apart);
                        let (count, rs) = lines_of(next, a.rs, (tiling.rows, k), &mut list);
                        tile.ahead = Ahead::new(&list[..count], rs, left);
                    } else if each > 0 {
                        let count = each.min(left / AHEAD_ROWS).min(list.len());
                        let mut taken = 0;
                        for (to, unit) in list[..count].iter_mut().zip(&mut units) {
                            (*to, taken) = (unit, taken + 1);
                        }
                        tile.ahead = Ahead::new(&list[..taken], LINE, left);
                    }
                    // SAFETY: the kernel of the size of the tile, of an `Isa` this machine has.
                    unsafe { tiling.kernel(tile.rows, vectors)(&tile) };
                    tile.a = tile.a.wrapping_add(tile.rows * a.apart);
                    tile.c = tile.c.wrapping_add(tile.rows * g.c.rs);
                }
            }
        }
    }
    g.finish(0..g.m, 0..g.n, 0);
}

/// The addresses of [`Ahead`] that cover `rows` rows, [`AHEAD_ROWS`] at most, of `k` floats from `from` on, and from one line of each to the next: lines side by side where
/// they are whole numbers of them, because memory gives those sooner. Returns how many addresses there are, and the distance.
fn lines_of(
    from: *const f32,
    rs: usize,
    (rows, k): (usize, usize),
    list: &mut [*const f32; KC.div_ceil(LINE)],
) -> (usize, usize) {
    let (count, side) = (k.div_ceil(LINE), AHEAD_ROWS * LINE);
    if k.is_multiple_of(side) {
        let each = k / side;
        for (row, lines) in list[..rows * each].chunks_exact_mut(each).enumerate() {
            for (i, line) in lines.iter_mut().enumerate() {
                *line = from.wrapping_add(row * rs + i * side);
            }
        }
        return (rows * each, LINE);
    }
    for (i, line) in list[..count].iter_mut().enumerate() {
        *line = from.wrapping_add(i * LINE);
    }
    (count, rs)
}

/// Whether c is computed transposed: it has few columns and many rows, and the columns of a are contiguous, so that a is read as whole
/// vectors and a tile has several of them. Few columns make tiles that wait for their loads.
fn turns(isa: Isa, g: &Gemm<'_>) -> bool {
    cfg!(target_arch = "x86_64")
        && isa.kind() == IsaKind::Avx512
        && g.n <= TURNED
        && g.m >= 2 * TURNED
        && g.m <= MOST_TURNED
        && g.a.rs == 1
        && g.b.cs == 1
}

/// Columns of a c that is computed transposed, at most, and its rows.
const TURNED: usize = 16;
const MOST_TURNED: usize = 64;

/// A slice of k at a time: the transposed sums, then c (+)= alpha sums, as a tile does it.
///
/// # Safety
/// As [`gemm`](super::gemm), and [`turns`].
unsafe fn turned(scratch: &mut LocalScratch, isa: Isa, g: &Gemm<'_>) {
    let mut sums = [0.0_f32; TURNED * MOST_TURNED];
    let kc = slice_len(g.k);
    for k0 in (0..g.k).step_by(kc) {
        // SAFETY: step k0 is inside both operands; the sums are as long as the product.
        unsafe {
            let a = MatRef { ptr: g.b.ptr.add(k0 * g.b.rs), ..g.b }.transposed();
            let b = MatRef { ptr: g.a.ptr.add(k0 * g.a.cs), ..g.a }.transposed();
            let c = MatMut { ptr: sums.as_mut_ptr(), rs: g.m };
            gemm_local(scratch, isa, &Gemm::new((g.n, g.m, kc.min(g.k - k0)), a, b, c));
            #[cfg(target_arch = "x86_64")]
            super::x86::add_transposed(&sums, g, g.beta == Beta::Accumulate || k0 > 0);
        }
    }
    g.finish(0..g.m, 0..g.n, 0);
}

/// Where the tiles of some rows of a begin.
struct TileRows {
    ptr: *const f32,
    rs: usize,
    cs: usize,
    /// From the first row of a tile to that of the next, in floats for each row of the tile.
    apart: usize,
}

/// Whether the steps of a row of a are so far apart that their cache lines evict each other, and are used often
/// enough that copying them pays.
fn scatters(g: &Gemm<'_>) -> bool {
    g.a.rs == 1 && g.a.cs >= FAR && g.n >= WIDE && g.b.cs == 1
}
