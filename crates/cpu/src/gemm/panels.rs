//! Products with a matrix that was packed once and for all: weights that are read by many products and no longer change.
//!
//! A weight of n rows and k columns (b is its transpose) is kept in panels of as many rows as a vector has lanes: each is `[k][rows]`, in the
//! place of these rows. So packing needs no other memory, and a product of any number of rows reads the weights once, as they lie.
//!
//! order  as [`gemm`](super::gemm): slices of k by its length alone, a chain of multiply-adds in each. So the bits are those of the same
//! product with a weight that is not packed, and those of a row do not depend on the others.
//!
//! What is read comes from memory in eight streams at a time, whole panels for a single row, and parts of the panels of the next tiles for
//! more: one stream after the other is 10 GB/s where eight are 16 to 18.

use super::kept::{Arrangement, Weight};
use super::kernel::{Kernels, LINE, Simd};
use super::plan::{SharedPtr, slice_len};
use super::{Beta, Gemm, Workspace, kernels};
use crate::isa::Isa;
use crate::memory::STREAMS;
use crate::team::{TaskPanic, Team};
use std::ops::Range;

/// Tiles across a task, at most: regions of c that are wide enough for an epilogue.
const MOST_TILES: usize = 4;
/// Tasks for each thread, at least: they even out what the threads do besides.
const TASKS: usize = 4;
/// Steps between two fetches.
const UNROLLED: usize = 8;
/// Streams into which each panel of the next tile is cut.
const CUTS: usize = 4;

/// # Safety
/// As `Kept::bring`.
pub(super) unsafe fn bring(
    to: Arrangement,
    team: &Team,
    ws: &mut Workspace,
    isa: Isa,
    weight: Weight,
) -> Result<(), TaskPanic> {
    // SAFETY: guaranteed by the caller; a panel and its copy are rows·k floats.
    unsafe {
        each_panel(team, ws, kernels(isa).lanes, weight, &|panel: *mut f32, copy: *const f32, [rows, k]| {
            for (step, row) in (0..k).flat_map(|step| (0..rows).map(move |row| (step, row))) {
                let (packed, plain) = (step * rows + row, row * k + step);
                match to {
                    Arrangement::Packed => *panel.add(packed) = *copy.add(plain),
                    Arrangement::Rows => *panel.add(plain) = *copy.add(packed),
                }
            }
        })
    }
}

/// A row as it was.
pub(super) fn read_row(isa: Isa, (weight, [n, k]): (&[f32], [usize; 2]), row: usize, out: &mut [f32]) {
    let lanes = kernels(isa).lanes;
    let first = row / lanes * lanes;
    let steps = weight[first * k + row % lanes..].iter().step_by(lanes.min(n - first));
    out.iter_mut().zip(steps).for_each(|(to, from)| *to = *from);
}

/// Rewrites every panel of `height` rows: `rewrite(panel, copy, [rows, k])` has a copy of what the panel was.
///
/// # Safety
/// The weight is good for its floats, which nobody else uses; `rewrite` stays inside rows·k floats of both.
pub(super) unsafe fn each_panel(
    team: &Team,
    ws: &mut Workspace,
    height: usize,
    (weight, [n, k]): Weight,
    rewrite: &(impl Fn(*mut f32, *const f32, [usize; 2]) + Sync),
) -> Result<(), TaskPanic> {
    let (weight, room) = (SharedPtr(weight), SharedPtr(ws.floats(team.threads() * height * k)));
    team.run(n.div_ceil(height), &|panel, worker| {
        let rows = height.min(n - panel * height);
        // SAFETY: panels are apart, and so is the room of workers; both hold rows·k floats.
        unsafe {
            let (panel, copy) = ({ weight }.0.add(panel * height * k), { room }.0.add(worker * height * k));
            std::ptr::copy_nonoverlapping(panel, copy, rows * k);
            rewrite(panel, copy, [rows, k]);
        }
    })
}

/// The product whose b is packed.
///
/// # Safety
/// As [`gemm`](super::gemm); m, n and k are not zero; b was packed for these instructions by [`bring`], and rows of a are contiguous.
pub(super) unsafe fn run(team: &Team, isa: Isa, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    let call = Call { g, kernels: kernels(isa), kc: slice_len(g.k) };
    // A single row takes some panels at a time, more rows a tile.
    let wide = if g.m == 1 { STREAMS * call.kernels.lanes } else { call.kernels.nr };
    let tiles = g.n.div_ceil(wide);
    let block = (tiles / (TASKS * team.threads())).clamp(1, MOST_TILES) * wide;
    team.chunks(g.n, block, |columns, worker| {
        for column in columns.clone().step_by(wide) {
            let tile = column..columns.end.min(column + wide);
            let next = tile.end; // also of the next task, which this worker has, as far as one can tell
            // SAFETY: guaranteed by the caller; tasks have different columns.
            unsafe { if g.m == 1 { call.one_row(tile) } else { call.tile(tile, next) } };
        }
        g.finish(0..g.m, columns, worker);
    })
}

struct Call<'a> {
    g: &'a Gemm<'a>,
    kernels: &'static Kernels,
    kc: usize,
}

impl Call<'_> {
    /// The only row, times up to [`STREAMS`] panels.
    ///
    /// # Safety
    /// As [`run`], for these columns.
    unsafe fn one_row(&self, columns: Range<usize>) {
        let lanes = self.kernels.lanes;
        // SAFETY: guaranteed by the caller; the kernel is of an `Isa` this machine has.
        unsafe {
            if columns.len() == STREAMS * lanes {
                self.slices(columns.start).for_each(|tile| (self.kernels.one_row)(&tile));
            } else {
                for column in columns.clone().step_by(lanes) {
                    self.tile(column..columns.end.min(column + lanes), column + lanes);
                }
            }
        }
    }

    /// All rows of up to a tile's width of columns; `next` is the first column of the tile after it.
    ///
    /// # Safety
    /// As [`run`], for these columns.
    unsafe fn tile(&self, columns: Range<usize>, next: usize) {
        let (g, lanes) = (self.g, self.kernels.lanes);
        let vectors = columns.len().div_ceil(lanes);
        let groups = g.m.div_ceil(self.kernels.mr);
        for slice in self.slices(columns.start) {
            // The same panels go on, or others begin.
            let (ahead, after) = match slice.k0 + slice.k {
                after if after < g.k => (slice.b, after),
                _ => (g.b.ptr.wrapping_add(next * g.k), 0),
            };
            let cut = (slice.k * lanes / CUTS).next_multiple_of(LINE);
            let lines = cut.div_ceil(LINE * groups);
            for group in 0..groups {
                let rows = group * g.m / groups..(group + 1) * g.m / groups;
                let at = ahead.wrapping_add(after * lanes + group * lines * LINE);
                let tile = PanelTile {
                    a: slice.a.wrapping_add(rows.start * g.a.rs),
                    c: slice.c.wrapping_add(rows.start * g.c.rs),
                    last: columns.len() - (vectors - 1) * lanes,
                    ahead: Ahead { at, cut, share: groups },
                    ..slice
                };
                // SAFETY: the kernel of the size of the tile, of an `Isa` this machine has.
                unsafe { (self.kernels.panels[rows.len() - 1][vectors - 1])(&tile) };
            }
        }
    }

    /// The first row of whole panels from this column on, a slice of k at a time.
    fn slices(&self, column: usize) -> impl Iterator<Item = PanelTile> {
        let (g, kc, lanes) = (self.g, self.kc, self.kernels.lanes);
        (0..g.k).step_by(kc).map(move |k0| PanelTile {
            k: kc.min(g.k - k0),
            k0,
            a: g.a.ptr.wrapping_add(k0),
            a_rs: g.a.rs,
            b: g.b.ptr.wrapping_add(column * g.k),
            panel: lanes * g.k,
            c: g.c.ptr.wrapping_add(column),
            c_rs: g.c.rs,
            last: lanes,
            alpha: g.alpha,
            accumulate: g.beta == Beta::Accumulate || k0 > 0,
            ahead: Ahead { at: std::ptr::null(), cut: 0, share: usize::MAX },
        })
    }
}

/// Some rows times some panels.
pub(super) struct PanelTile {
    /// Steps, and the number of the first.
    k: usize,
    k0: usize,
    /// a[i, p] at `a + i * a_rs + p`.
    a: *const f32,
    a_rs: usize,
    /// Where the first panel begins, and from one to the next.
    b: *const f32,
    panel: usize,
    c: *mut f32,
    c_rs: usize,
    /// Columns of the last panel.
    last: usize,
    alpha: f32,
    /// Add to c, or overwrite it unread.
    accumulate: bool,
    ahead: Ahead,
}

/// What a tile fetches for the next ones.
struct Ahead {
    /// The first line, and from one of [`CUTS`] parts of a panel to the next.
    at: *const f32,
    cut: usize,
    /// How many tiles share the work.
    share: usize,
}

/// A kernel for some rows and panels.
pub(super) type PanelKernel = unsafe fn(&PanelTile);

/// c (+)= alpha sum, of the lanes of the mask.
///
/// # Safety
/// The machine has the instructions of `S`, and these floats are writable.
#[inline(always)]
unsafe fn put<S: Simd>(t: &PanelTile, sum: S, c: *mut f32, mask: S::Mask) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let alpha = S::splat(t.alpha);
        let new = if t.accumulate { sum.mul_add(alpha, S::load_masked(c, mask)) } else { sum.mul(alpha) };
        new.store_masked(c, mask);
    }
}

/// `MR` rows times `NV` panels, the last of which may be narrower.
///
/// # Safety
/// The machine has the instructions of `S`; the tile is good for so many rows and panels.
#[inline(always)]
pub(super) unsafe fn rows_by_panels<S: Simd, const MR: usize, const NV: usize>(t: &PanelTile) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if t.last == S::LANES {
            rows_by::<S, MR, NV, true>(t);
        } else {
            rows_by::<S, MR, NV, false>(t);
        }
    }
}

/// With `WHOLE`, the last panel is as wide as the others.
///
/// # Safety
/// As [`rows_by_panels`].
#[inline(always)]
#[allow(clippy::needless_range_loop)] // lanes are numbered
unsafe fn rows_by<S: Simd, const MR: usize, const NV: usize, const WHOLE: bool>(t: &PanelTile) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let last = if WHOLE { S::LANES } else { t.last };
        // The compiler must not compute the addresses of rows by a chain of additions.
        let mut rows = [0; MR];
        (0..MR).for_each(|i| rows[i] = i * t.a_rs);
        let rows = std::hint::black_box(rows);
        let mask = S::mask(t.last);
        let mut acc = [[S::splat(0.0); NV]; MR];
        let (mut a, mut k) = (t.a, t.k);
        let mut b = [t.b; NV];
        for j in 0..NV {
            let width = if j < NV - 1 { S::LANES } else { last };
            b[j] = t.b.wrapping_add(j * t.panel + t.k0 * width);
        }
        let (mut ahead, mut due, mut line) = (t.ahead.at, 0, 0);
        // Where the lines of a panel's parts are, from `ahead` on.
        let lines: [[usize; CUTS]; NV] =
            std::array::from_fn(|j| std::array::from_fn(|cut| j * t.panel + cut * t.ahead.cut));
        macro_rules! step {
            ($at:expr) => {
                let mut row = [S::splat(0.0); NV];
                for j in 0..NV - 1 {
                    row[j] = S::load(b[j].add($at * S::LANES));
                }
                row[NV - 1] = if WHOLE {
                    S::load(b[NV - 1].add($at * S::LANES))
                } else {
                    S::load_masked(b[NV - 1].add($at * last), mask)
                };
                for i in 0..MR {
                    let x = S::splat(*a.add(rows[i] + $at));
                    for j in 0..NV {
                        acc[i][j] = x.mul_add(row[j], acc[i][j]);
                    }
                }
            };
            (next $steps:expr) => {
                a = a.wrapping_add($steps);
                k -= $steps;
                for j in 0..NV {
                    b[j] = b[j].wrapping_add($steps * if j < NV - 1 { S::LANES } else { last });
                }
            };
        }
        while k >= UNROLLED {
            // As many lines as the tile itself reads in these steps, shared by the tiles of all rows. Not many at once: they take the
            // line buffers the tile needs.
            due += UNROLLED * NV * S::LANES / LINE;
            while due >= t.ahead.share {
                due -= t.ahead.share;
                S::prefetch(ahead.wrapping_add(lines.as_flattened()[line]));
                line += 1;
                if line == NV * CUTS {
                    (line, ahead) = (0, ahead.wrapping_add(LINE));
                }
            }
            step!(0);
            step!(1);
            step!(2);
            step!(3);
            step!(4);
            step!(5);
            step!(6);
            step!(7);
            step!(next UNROLLED);
        }
        while k > 0 {
            step!(0);
            step!(next 1);
        }
        let whole = S::mask(S::LANES);
        for i in 0..MR {
            for j in 0..NV {
                let c = t.c.wrapping_add(i * t.c_rs + j * S::LANES);
                put(t, acc[i][j], c, if j < NV - 1 { whole } else { mask });
            }
        }
    }
}

/// One row times [`STREAMS`] whole panels.
///
/// # Safety
/// As [`rows_by_panels`].
#[inline(always)]
#[allow(clippy::needless_range_loop)] // lanes are numbered
pub(super) unsafe fn row_by_panels<S: Simd>(t: &PanelTile) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut acc = [S::splat(0.0); STREAMS];
        let mut b = [t.b; STREAMS];
        (0..STREAMS).for_each(|j| b[j] = t.b.wrapping_add(j * t.panel + t.k0 * S::LANES));
        for step in 0..t.k {
            let x = S::splat(*t.a.add(step));
            for j in 0..STREAMS {
                acc[j] = x.mul_add(S::load(b[j].add(step * S::LANES)), acc[j]);
            }
        }
        for j in 0..STREAMS {
            put(t, acc[j], t.c.wrapping_add(j * S::LANES), S::mask(S::LANES));
        }
    }
}
