//! Products with a weight that is kept in bf16, on the tile unit: serving reads the weights once for all rows, and so half the bytes.
//!
//! A weight of n rows and k columns stays in its place, in panels of 16 rows. The first half of a panel is bf16, `[k / 2][rows][2]`: a
//! tile has 32 steps and follows the one before it, as the unit reads them. The second half has what rounding took away, in the same
//! order (`split_master`), so that the floats can be had again; every NaN becomes one NaN. Weights are rounded to the nearest, ties away
//! from 0, because of which nothing is lost.
//!
//! order  the unit adds two neighbouring products at a time to each element of c, over all of k. So the bits depend neither on the
//! threads nor on the other rows.

use super::Workspace;
use super::kept::{Arrangement, Weight};
use super::panels::each_panel;
#[cfg(target_arch = "x86_64")]
use super::{Beta, Gemm, halves_x86, kernel::LINE, plan::SharedPtr, tiles};
use crate::team::{TaskPanic, Team};
use ironhorse_core::{join_master, split_master};
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

/// Rows of a panel, and of a tile.
const ROWS: usize = 16;
/// Steps of a tile.
const STEPS: usize = 32;
/// Floats that a tile takes the place of.
#[cfg(target_arch = "x86_64")]
const TILE: usize = ROWS * LINE;

/// Whether a weight of n rows and k columns can be kept so: tiles are whole, but for the rows of the last panel.
pub(super) fn fits([n, k]: [usize; 2]) -> bool {
    n >= ROWS && k > 0 && k.is_multiple_of(STEPS)
}

/// Where an element of a panel is, in each of its halves.
fn place(row: usize, step: usize, rows: usize) -> usize {
    (step / 2 * rows + row) * 2 + step % 2
}

/// # Safety
/// As `Kept::bring`, of a weight that [`fits`].
pub(super) unsafe fn bring(
    to: Arrangement,
    team: &Team,
    ws: &mut Workspace,
    weight: Weight,
) -> Result<(), TaskPanic> {
    // SAFETY: guaranteed by the caller; a panel and its copy are rows·k floats, two numbers of 16 bits each.
    unsafe {
        each_panel(team, ws, ROWS, weight, &|panel: *mut f32, copy: *const f32, [rows, k]| {
            for (row, step) in (0..rows).flat_map(|row| (0..k).map(move |step| (row, step))) {
                let (high, plain) = (place(row, step, rows), row * k + step);
                let low = rows * k + high;
                match to {
                    Arrangement::Packed => {
                        let panel = panel.cast::<u16>();
                        (*panel.add(high), *panel.cast::<i16>().add(low)) = split_master(*copy.add(plain));
                    }
                    Arrangement::Rows => {
                        let copy = copy.cast::<u16>();
                        *panel.add(plain) = join_master(*copy.add(high), *copy.cast::<i16>().add(low));
                    }
                }
            }
        })
    }
}

/// A row as it was.
pub(super) fn read_row((weight, [n, k]): (&[f32], [usize; 2]), row: usize, out: &mut [f32]) {
    let first = row / ROWS * ROWS;
    let rows = ROWS.min(n - first);
    let panel = &weight[first * k..][..rows * k];
    // A float has two of the numbers, the first of them in its lower half.
    let half = |at: usize| (panel[at / 2].to_bits() >> (at % 2 * 16)) as u16;
    for (step, out) in out.iter_mut().enumerate().take(k) {
        let at = place(row - first, step, rows);
        *out = join_master(half(at), half(rows * k + at) as i16);
    }
}

/// Tiles of results that a block has: a row of them, or two by two.
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 4;
/// Rows beyond which blocks are two by two: then the unit waits for its operands from the caches rather than for memory.
#[cfg(target_arch = "x86_64")]
const FEW: usize = 64;
/// Tasks for each thread, at least, and columns of one, at most.
#[cfg(target_arch = "x86_64")]
const TASKS: usize = 4;
#[cfg(target_arch = "x86_64")]
const MOST_COLUMNS: usize = 256;

/// The product whose b is kept so.
///
/// # Safety
/// As [`gemm`](super::gemm); m, n and k are not zero, and `alpha` is 1; b was packed by [`bring`], rows of a are contiguous, and the machine
/// has tiles.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn run(team: &Team, ws: &mut Workspace, g: &Gemm<'_>) -> Result<(), TaskPanic> {
    assert!(
        g.alpha == 1.0 && g.a.cs == 1,
        "a product of tiles has no factor, and rows of a that are contiguous"
    );
    let groups = g.m.div_ceil(ROWS);
    let a = SharedPtr(ws.floats(groups * ROWS * g.k / 2));
    let round = |group: usize| {
        let rows = group * ROWS..g.m.min((group + 1) * ROWS);
        // SAFETY: a is readable, and each group has its own part of the workspace.
        unsafe {
            let (from, to) = (g.a.ptr.add(rows.start * g.a.rs), { a }.0.add(rows.start * g.k / 2));
            halves_x86::round_rows((from, g.a.rs), [rows.len(), g.k], to);
        }
    };
    // The rows of a few tokens are rounded sooner than others are woken.
    if groups <= 2 {
        (0..groups).for_each(round);
    } else {
        team.run(groups, &|group, _| round(group))?;
    }
    let call = Call { g, a: { a }.0, down: if g.m > FEW { 2 } else { 1 } };
    let wide = BLOCK / call.down * ROWS;
    let most = MOST_COLUMNS / wide;
    let columns = (g.n.div_ceil(wide) / (TASKS * team.threads())).clamp(1, most) * wide;
    let call = SharedPtr(&call);
    team.chunks(g.n, columns, |mine, worker| {
        // SAFETY: guaranteed by the caller; tasks have different columns.
        unsafe {
            tiles::enter();
            for column in mine.clone().step_by(wide) {
                let block = column..mine.end.min(column + wide);
                let next = block.end; // also of the next task, which this worker has, as far as one can tell
                { call }.0.columns(block, next);
            }
            tiles::leave();
        }
        g.finish(0..g.m, mine, worker);
    })
}

#[cfg(target_arch = "x86_64")]
struct Call<'a> {
    g: &'a Gemm<'a>,
    /// Rows of a in bf16, a tile after the other for every 16 rows.
    a: *const f32,
    /// Tiles of a block, one below the other.
    down: usize,
}

/// A block of results that does not lie in c as it is.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Aside([f32; BLOCK * TILE]);

#[cfg(target_arch = "x86_64")]
impl Call<'_> {
    /// All rows of these columns, at most as many as a block has; `next` is the first column after them.
    ///
    /// # Safety
    /// As [`run`], for these columns; the thread has tiles.
    unsafe fn columns(&self, columns: Range<usize>, next: usize) {
        let &Self { g, a, down } = self;
        let (across, tall) = (BLOCK / down, down * ROWS);
        let panel = |j: usize| {
            // Panels beyond the last are computed as the first once more, and not stored.
            let first = columns.start + j * ROWS;
            let first = if first < columns.end { first } else { columns.start };
            (g.b.ptr.wrapping_add(first * g.k), ROWS.min(g.n - first))
        };
        let panels = [panel(0), panel(1), panel(2 % across), panel(3 % across)];
        let blocks = g.m.div_ceil(tall);
        for block in 0..blocks {
            let rows = block * tall..g.m.min((block + 1) * tall);
            let c = g.c.ptr.wrapping_add(rows.start * g.c.rs + columns.start);
            let whole = rows.len() == tall && columns.len() == across * ROWS && g.beta == Beta::Overwrite;
            let mut aside = Aside([0.0; BLOCK * TILE]);
            let to = if whole { (c, g.c.rs) } else { (aside.0.as_mut_ptr(), across * ROWS) };
            let lower = if rows.len() > ROWS { rows.start + ROWS } else { rows.start };
            let tile = halves_x86::Block {
                steps: g.k / STEPS,
                a: [rows.start, lower].map(|row| a.wrapping_add(row * g.k / 2)),
                b: panels,
                c: to.0,
                c_rs: to.1,
                ahead: g.b.ptr.wrapping_add(next * g.k),
                panel: ROWS * g.k,
                share: [block, blocks],
            };
            // SAFETY: guaranteed by the caller; a block is inside c, or aside.
            unsafe {
                if down == 2 {
                    halves_x86::two_by_two(&tile)
                } else {
                    halves_x86::one_by_four(&tile)
                };
                if !whole {
                    for row in 0..rows.len() {
                        let sums = &aside.0[row * across * ROWS..][..columns.len()];
                        let c = std::slice::from_raw_parts_mut(c.add(row * g.c.rs), columns.len());
                        match g.beta {
                            Beta::Overwrite => c.copy_from_slice(sums),
                            Beta::Accumulate => c.iter_mut().zip(sums).for_each(|(c, sum)| *c += sum),
                        }
                    }
                }
            }
        }
    }
}
