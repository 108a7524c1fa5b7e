//! The micro-kernel: one tile of c held in registers, written once over a vector type.
//!
//! order  every element of a tile is a chain of multiply-adds over k, from zero; then c (+)= alpha * sum.

// Lanes are numbered: an index says more than an iterator here.
#![allow(clippy::needless_range_loop)]

use super::dots::{DotKernels, JOINED};
use super::panels::PanelKernel;
use super::queries::{ScoreKernel, WeightedKernel};

/// One tile of work. `a` is `MR` rows, `b` is `NV` vectors wide.
pub(super) struct Tile {
    pub k: usize,
    /// a[i, p] at `a + a_rows[i] + p * a_cs`; in a packed panel at `a + i + p * MR`. A list of rows, because from a stride the compiler
    /// computes addresses by a chain of dependent additions: twice as slow for narrow tiles.
    pub a: *const f32,
    pub a_rows: [usize; MAX_MR],
    pub a_cs: usize,
    /// b[p, j] at `b + p * b_rs + j`.
    pub b: *const f32,
    pub b_rs: usize,
    pub c: *mut f32,
    pub c_rs: usize,
    /// Rows and columns of the tile.
    pub rows: usize,
    pub columns: usize,
    /// Columns in the last vector, 1 to `LANES`.
    pub last: usize,
    pub alpha: f32,
    /// Add to c, or overwrite it unread.
    pub accumulate: bool,
    /// [`Kernels::fetches`] addresses to bring into the cache meanwhile, three lines each; used by full packed tiles only.
    pub fetch: *const *const f32,
    /// What to bring into the cache meanwhile; used by tiles that are not packed.
    pub ahead: Ahead,
    /// Whether the lines of c are fetched meanwhile: they are overwritten, and come from memory. Not for packed tiles, which always do.
    pub fetches_c: bool,
    /// Whether c, whose rows are whole lines, goes to memory past the caches, where the kernel can do that and the tile is whole.
    pub past_caches: bool,
}

/// Lines that a tile asks for while it computes: a line of each of [`AHEAD_ROWS`] rows at each address of a list.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub list: *const *const f32,
    pub count: usize,
    /// From one row to the next, in floats.
    pub rs: usize,
    /// Steps of k from one line to the next; the tile has `AHEAD_ROWS * steps * count` of them at least.
    pub steps: usize,
}

/// Rows of an address of [`Ahead`].
pub(super) const AHEAD_ROWS: usize = 8;

impl Ahead {
    pub const NOTHING: Self = Self { list: std::ptr::null(), count: 0, rs: 0, steps: 1 };

    /// Everything in `list`, or as much of it as a tile of `k` steps has time for.
    pub fn new(list: &[*const f32], rs: usize, k: usize) -> Self {
        let count = list.len().min(k / AHEAD_ROWS);
        if count == 0 {
            return Self::NOTHING;
        }
        Self { list: list.as_ptr(), count, rs, steps: k / (AHEAD_ROWS * count) }
    }
}

/// The most rows of a tile that is not packed.
pub(super) const MAX_MR: usize = 8;

/// Where rows begin that are `rs` apart.
pub(super) fn rows_apart(rs: usize) -> [usize; MAX_MR] {
    std::array::from_fn(|i| i * rs)
}

/// Floats in a cache line.
pub(super) const LINE: usize = 16;
/// Floats fetched at each address.
pub(super) const FETCH: usize = 3 * LINE;
/// Steps of k in which a full tile fetches one address and one row of c, a line of each at a time. Fetching faster
/// than that takes the line buffers the tile itself needs.
pub(super) const FETCH_STEPS: usize = 24;

/// A tile kernel for fixed `MR` and `NV`.
pub(super) type Micro = unsafe fn(&Tile);

/// `count` vectors of length `k` to pack into panels of `W`: `dst[panel][p][lane]`, the lanes beyond `count` zero.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    /// Element p of vector w is at `src + w * s_w + p * s_k`.
    pub src: *const f32,
    pub s_w: usize,
    pub s_k: usize,
    pub count: usize,
    pub k: usize,
    pub dst: *mut f32,
}

/// Packs into panels of a fixed `W`.
pub(super) type Pack = unsafe fn(&Packing);

/// The kernels of one set of instructions.
pub(super) struct Kernels {
    /// Rows of a full tile.
    pub mr: usize,
    /// Columns of a full tile.
    pub nr: usize,
    /// Floats in a vector.
    pub lanes: usize,
    /// `packed[mr - 1][nv - 1]`: a from a packed panel. A kernel for more rows than the table has is in its last row.
    pub packed: &'static [[Micro; 3]; 8],
    /// The same, a by its strides.
    pub strided: &'static [[Micro; 3]; 8],
    /// `low[mr - 1]`: a by its strides, [`LOW`] vectors wide; none where the registers do not hold such tiles.
    pub low: &'static [Micro],
    /// `panels[mr - 1][nv - 1]`: b from panels that were packed before (`panels`).
    pub panels: &'static [[PanelKernel; 3]; 8],
    /// One row times several such panels.
    pub one_row: PanelKernel,
    /// Into panels of `mr`.
    pub pack_a: Pack,
    /// Into panels of `nr`.
    pub pack_b: Pack,
    /// Into panels of `LOW` vectors.
    pub pack_low: Pack,
    /// A panel has room for a multiple of so many steps.
    pub unit: usize,
    /// Steps of k in which a full tile fetches one address.
    pub fetch_steps: usize,
    /// `dots[rows - 1]`: nothing packed.
    pub dots: &'static [DotKernels],
    /// One query against rows of keys, and weights times rows of values.
    pub scores: ScoreKernel,
    pub weighted: WeightedKernel,
    /// What a thread does before its first packed tile and after its last.
    pub enter: Option<unsafe fn()>,
    pub leave: Option<unsafe fn()>,
}

impl Kernels {
    /// Steps that a panel of `k` has room for, a float each.
    pub fn room(&self, k: usize) -> usize {
        k.next_multiple_of(self.unit)
    }

    /// Addresses fetched in a tile of `k` steps.
    pub fn fetches(&self, k: usize) -> usize {
        k / self.fetch_steps
    }

    /// The kernel of a packed tile of this size.
    #[inline(always)]
    pub fn packed(&self, rows: usize, vectors: usize) -> Micro {
        self.packed[rows.min(self.packed.len()) - 1][vectors - 1]
    }
}

/// Vectors of a low tile.
pub(super) const LOW: usize = 4;

/// How tiles that read a by its strides cut a result: low ones where it is four vectors wide, because they load fewer elements of a
/// for a multiply-add.
#[derive(Clone, Copy)]
pub(super) struct Tiling {
    kernels: &'static Kernels,
    is_low: bool,
    /// Rows of a tile, at most.
    pub rows: usize,
    /// Columns of a tile, a whole number of vectors; the last tile may have fewer: 96 becomes 48 + 48, and 80 becomes 48 + 32.
    pub columns: usize,
    /// Into panels of `width` columns, one for each of its tiles.
    pub pack_b: Pack,
    /// Floats of a step of such a panel.
    pub width: usize,
}

impl Tiling {
    /// Of a result of `n` columns.
    pub fn new(kernels: &'static Kernels, n: usize) -> Self {
        let &Kernels { low, lanes, pack_low: pack_b, .. } = kernels;
        if low.is_empty() || n.div_ceil(lanes) != LOW {
            return Self::high(kernels, n);
        }
        let width = LOW * lanes;
        Self { kernels, is_low: true, rows: low.len(), columns: width, pack_b, width }
    }

    /// The same of tiles that are as high as a panel of a.
    pub fn high(kernels: &'static Kernels, n: usize) -> Self {
        let &Kernels { mr, nr, lanes, pack_b, .. } = kernels;
        let vectors = n.div_ceil(lanes);
        let panels = vectors.div_ceil(nr / lanes).max(1);
        let columns = vectors.div_ceil(panels).max(1) * lanes;
        Self { kernels, is_low: false, rows: mr, columns, pack_b, width: nr }
    }

    /// The kernel of a tile of this size.
    #[inline(always)]
    pub fn kernel(&self, rows: usize, vectors: usize) -> Micro {
        if self.is_low { self.kernels.low[rows - 1] } else { self.kernels.strided[rows - 1][vectors - 1] }
    }
}

/// A vector of floats. All functions need the instructions of the type that implements it.
pub(super) trait Simd: Copy {
    const LANES: usize;
    /// Lanes of a full packed A panel: the row stride of `a` in a packed tile.
    const MR: usize;
    /// Vectors of a full packed B panel.
    const NV: usize;
    /// Lanes of a full packed B panel.
    const NR: usize = Self::NV * Self::LANES;
    type Mask: Copy;
    unsafe fn mask(lanes: usize) -> Self::Mask;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    /// Lanes outside the mask are not read and give zero.
    unsafe fn load_masked(p: *const f32, mask: Self::Mask) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Lanes outside the mask are not written.
    unsafe fn store_masked(self, p: *mut f32, mask: Self::Mask);
    /// self * b + c
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn add(self, b: Self) -> Self;
    /// The lanes of each of the first `count` vectors joined by halves, as [`tree`](crate::element::tree).
    unsafe fn join(sums: [Self; JOINED], count: usize, out: &mut [f32; JOINED]);
    /// Asks for the cache line at `p`, which need not be mapped.
    unsafe fn prefetch(p: *const f32);
    /// The same, to write to it.
    unsafe fn prefetch_write(p: *const f32);
}

/// # Safety
/// The machine has the instructions of `S`; the pointers of `t` are good for `MR` rows, `NV` vectors (the last of
/// `t.last` columns) and `t.k` steps.
#[inline(always)]
pub(super) unsafe fn micro<S: Simd, const MR: usize, const NV: usize, const PACKED: bool>(t: &Tile) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if PACKED || t.last == S::LANES {
            micro_of::<S, MR, NV, PACKED, true>(t);
        } else {
            micro_of::<S, MR, NV, PACKED, false>(t);
        }
    }
}

/// With `WHOLE`, all lanes of the last vector of b can be read: a masked load takes one of the two ports that multiply-adds need.
///
/// # Safety
/// As [`micro`].
#[inline(always)]
unsafe fn micro_of<S: Simd, const MR: usize, const NV: usize, const PACKED: bool, const WHOLE: bool>(
    t: &Tile,
) {
    // SAFETY: guaranteed by the caller; the last vector is masked to `t.last` columns unless b is a full panel.
    unsafe {
        let (a_cs, b_rs) = if PACKED { (S::MR, S::NR) } else { (t.a_cs, t.b_rs) };
        let mut rows = [0; MR];
        (0..MR).for_each(|i| rows[i] = if PACKED { i } else { t.a_rows[i] });
        let mask = S::mask(t.last);
        let mut acc = [[S::splat(0.0); NV]; MR];
        let (mut a, mut b, mut k) = (t.a, t.b, t.k);
        // A macro, not a closure or a loop of eight: those cost 5 % here.
        macro_rules! step {
            () => {
                let mut row = [S::splat(0.0); NV];
                for j in 0..NV - 1 {
                    row[j] = S::load(b.add(j * S::LANES));
                }
                row[NV - 1] = if WHOLE {
                    S::load(b.add((NV - 1) * S::LANES))
                } else {
                    S::load_masked(b.add((NV - 1) * S::LANES), mask)
                };
                for i in 0..MR {
                    let x = S::splat(*a.add(rows[i]));
                    for j in 0..NV {
                        acc[i][j] = x.mul_add(row[j], acc[i][j]);
                    }
                }
                a = a.wrapping_add(a_cs);
                b = b.wrapping_add(b_rs);
            };
            (8) => {
                step!();
                step!();
                step!();
                step!();
                step!();
                step!();
                step!();
                step!();
            };
        }
        if PACKED && MR == S::MR && NV == S::NV {
            // The tile of c, and what the next tiles need, are fetched while this one is computed.
            let mut c = t.c.cast_const();
            let mut fetch = t.fetch;
            let mut left = MR;
            while k >= FETCH_STEPS && left > 0 {
                (k, left) = (k - FETCH_STEPS, left - 1);
                for line in 0..3 {
                    S::prefetch_write(c.wrapping_add(line * (NV * S::LANES / 3)));
                    S::prefetch((*fetch).wrapping_add(line * LINE));
                    step!(8);
                }
                c = c.wrapping_add(t.c_rs);
                fetch = fetch.add(1);
            }
            while k >= FETCH_STEPS {
                k -= FETCH_STEPS;
                for line in 0..3 {
                    S::prefetch((*fetch).wrapping_add(line * LINE));
                    step!(8);
                }
                fetch = fetch.add(1);
            }
        }
        if !PACKED {
            if t.fetches_c && k >= MR * NV {
                k -= MR * NV;
                // One loop over all lines: a loop over rows is unrolled into blocks of NV steps, for which there are too few registers.
                let (mut c, mut column) = (t.c.cast_const(), 0);
                for _ in 0..MR * NV {
                    S::prefetch_write(c);
                    column += 1;
                    c = c.wrapping_add(if column == NV {
                        t.c_rs.wrapping_sub((NV - 1) * S::LANES)
                    } else {
                        S::LANES
                    });
                    column %= NV;
                    step!();
                }
            }
            let Ahead { list, count, rs, steps } = t.ahead;
            for unit in 0..count {
                let mut line = *list.add(unit);
                for _ in 0..AHEAD_ROWS {
                    S::prefetch(line);
                    line = line.wrapping_add(rs);
                    for _ in 0..steps {
                        step!();
                    }
                }
            }
            k -= count * AHEAD_ROWS * steps;
        }
        while k > 0 {
            k -= 1;
            step!();
        }
        let alpha = S::splat(t.alpha);
        for (i, sums) in acc.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let c = t.c.add(i * t.c_rs + j * S::LANES);
                if j < NV - 1 {
                    let out = if t.accumulate { sum.mul_add(alpha, S::load(c)) } else { sum.mul(alpha) };
                    out.store(c);
                } else {
                    let out = if t.accumulate {
                        sum.mul_add(alpha, S::load_masked(c, mask))
                    } else {
                        sum.mul(alpha)
                    };
                    out.store_masked(c, mask);
                }
            }
        }
    }
}

/// The kernels of one set of instructions, for a vector type. The list is the rows of the entries of a table: entries beyond a
/// full tile repeat the largest. After `low` come the rows of tiles of four vectors, after `dots` the rows and columns of blocks of dot products, from one row on: columns divide
/// 8. Panels are packed by [`pack`](super::pack::pack), or by the functions named at the end.
macro_rules! kernels {
    ($(#[$feature:meta])? $name:ident: $simd:ty, [$($rows:literal)*], dots [$($r:literal x $c:literal),*]) => {
        kernels!(
            $(#[$feature])? $name: $simd, [$($rows)*], low [], dots [$($r x $c),*],
            pack_panels::<{ <$simd>::MR }>, pack_panels::<{ <$simd>::NR }>, pack_panels::<{ LOW * <$simd>::LANES }>
        );
    };
    (
        $(#[$feature:meta])? $name:ident: $simd:ty, [$($rows:literal)*], low [$($low:literal)*],
        dots [$($r:literal x $c:literal),*], $pack_a:expr, $pack_b:expr, $pack_low:expr
    ) => {
        pub(super) static $name: Kernels = {
            $(#[$feature])?
            unsafe fn tile<const M: usize, const V: usize, const PACKED: bool>(t: &Tile) {
                // SAFETY: compiled for the instructions of the vector type; the rest is guaranteed by the caller.
                unsafe { micro::<$simd, M, V, PACKED>(t) };
            }

            $(#[$feature])?
            unsafe fn panel<const M: usize, const V: usize>(t: &PanelTile) {
                // SAFETY: as in `tile`.
                unsafe { panels::rows_by_panels::<$simd, M, V>(t) };
            }

            $(#[$feature])?
            unsafe fn one_row(t: &PanelTile) {
                // SAFETY: as in `tile`.
                unsafe { panels::row_by_panels::<$simd>(t) };
            }

            $(#[$feature])?
            #[allow(dead_code)]
            unsafe fn pack_panels<const W: usize>(p: &Packing) {
                // SAFETY: guaranteed by the caller.
                unsafe { pack::<W>(p) };
            }

            $(#[$feature])?
            unsafe fn sums<const R: usize, const C: usize>(t: &DotTile) {
                // SAFETY: as in `tile`.
                unsafe { dots::<$simd, R, C, { LANES / <$simd>::LANES }>(t) };
            }

            $(#[$feature])?
            unsafe fn scores(s: &Scores) {
                // SAFETY: as in `tile`.
                unsafe { queries::score::<$simd, { LANES / <$simd>::LANES }>(s) };
            }

            $(#[$feature])?
            unsafe fn weighted(w: &Weighted) {
                // SAFETY: as in `tile`.
                unsafe { queries::weigh::<$simd>(w) };
            }

            Kernels {
                mr: <$simd>::MR,
                nr: <$simd>::NR,
                lanes: <$simd>::LANES,
                packed: &[$([tile::<$rows, 1, true>, tile::<$rows, 2, true>, tile::<$rows, 3, true>]),*],
                strided: &[$([tile::<$rows, 1, false>, tile::<$rows, 2, false>, tile::<$rows, 3, false>]),*],
                low: &[$(tile::<$low, LOW, false>),*],
                panels: &[$([panel::<$rows, 1>, panel::<$rows, 2>, panel::<$rows, 3>]),*],
                one_row,
                pack_a: $pack_a,
                pack_b: $pack_b,
                pack_low: $pack_low,
                unit: 1,
                fetch_steps: super::kernel::FETCH_STEPS,
                dots: &[$(DotKernels { columns: $c, many: sums::<$r, $c>, one: sums::<$r, 1> }),*],
                scores,
                weighted,
                enter: None,
                leave: None,
            }
        };
    };
}
pub(super) use kernels;
