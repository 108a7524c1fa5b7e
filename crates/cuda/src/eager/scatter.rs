//! The gradient of an embedding table, f32.

use super::layout::{THREADS, whole_vectors};
use super::{At, Launch};
use crate::args::{Args, Grid};
use crate::kernels::{Kernel, Spec};
use crate::op::{DIGIT_BITS, DIGITS, SORT_BLOCK, WINDOW};
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Float, ScatterAdd};

const FEW: &str = "embedding/scatter_few.cu";
const MANY: &str = "embedding/bwd.cu";
/// Indices up to which comparing each with each beats sorting.
const FEW_INDICES: usize = 512;

/// One call that sorts its indices.
struct Sorted<'a> {
    at: &'a At<'a>,
    /// Indices.
    n: u32,
    width: usize,
    /// Indices that are not below are skipped.
    limit: u32,
    vectors: bool,
}

/// The scratch memory of such a call.
struct Space {
    counts: u64,
    /// Where the engine's kernels report indices that are out of range; nobody reads it.
    fault: u64,
    /// Two lists of each: a pass sorts from one into the other.
    keys: [u64; 2],
    positions: [u64; 2],
    edges: u64,
}

/// Repeatable: up to 512 indices are added in their order, more of them in windows of 32 of each index. Indices that are not
/// in 0..table_rows are skipped; without `table_rows` only negative ones are.
impl Launch for ScatterAdd {
    unsafe fn launch(&self, at: &At<'_>) -> Result<()> {
        let Self { rows, indices, table, n, width, table_rows } = *self;
        if n == 0 || width == 0 {
            return Ok(());
        }
        let too_large =
            |what: &str, size: usize| Error::Input(format!("scatter_add: {what} is {size}: too large"));
        // No index reaches 2³¹; a negative one does when it is read as unsigned.
        let limit = table_rows.map_or(1 << 31, |limit| limit.min(1 << 31) as u32);
        let vectors = whole_vectors(&[Array::f32(rows), Array::f32_mut(table)], width, Float::F32);
        let count = u32::try_from(n).ok().filter(|&n| n < 1 << 31).ok_or_else(|| too_large("n_idx", n))?;
        if n <= FEW_INDICES {
            let args = Args::new().at(table).at(rows).at(indices).u32(count).u64(width as u64).u32(limit);
            let line = Grid::linear(width.div_ceil(THREADS), THREADS as u32);
            let grid = Grid { grid: [line.grid[0], count, 1], ..line };
            return at.launch(&Spec::new(FEW).kernel("scatter_few"), grid, args);
        }
        // blockIdx.y is below 65,536.
        if width.div_ceil(if vectors { 4 } else { 1 }).div_ceil(32) > 65_535 {
            return Err(too_large("dim", width));
        }
        let sorted = Sorted { at, n: count, width, limit, vectors };
        let space = sorted.space()?;
        let lists = sorted.sort(indices.addr() as u64, &space)?;
        sorted.windows(&space, lists, rows.addr() as u64, table.addr() as u64)
    }
}

impl Sorted<'_> {
    fn kernel(&self, name: &'static str) -> Kernel {
        many(self.vectors).kernel(name)
    }

    fn space(&self) -> Result<Space> {
        let n = self.n as usize;
        let list = (n * size_of::<u32>()).next_multiple_of(256);
        let counts = (DIGITS * n.div_ceil(SORT_BLOCK) * size_of::<u32>()).next_multiple_of(256);
        let edges = 2 * n.div_ceil(WINDOW) * self.width * size_of::<f32>();
        let start = self.at.scratch(4 * list + counts + 256 + edges)?;
        let part = |index: usize| start + (index * list) as u64;
        let counts_at = part(4);
        let fault = counts_at + counts as u64;
        self.at.stream.zero(fault, 16)?;
        Ok(Space {
            counts: counts_at,
            fault,
            keys: [part(0), part(1)],
            positions: [part(2), part(3)],
            edges: fault + 256,
        })
    }

    /// Sorts positions by index, stable; returns the addresses of indices and positions.
    fn sort(&self, idx: u64, space: &Space) -> Result<[u64; 2]> {
        let blocks = (self.n as usize).div_ceil(SORT_BLOCK);
        let grid = Grid::linear(blocks, SORT_BLOCK as u32);
        // `limit` itself is the key of an index that is skipped.
        let passes = (u32::BITS - self.limit.leading_zeros()).div_ceil(DIGIT_BITS).max(1);
        let (mut keys, mut from) = (idx, 0);
        for pass in 0..passes {
            let (shift, to) = (pass * DIGIT_BITS, (pass % 2) as usize);
            let args = Args::new().ptr(space.counts).ptr(keys).u32(self.n).u32(self.limit).u32(shift);
            self.at.launch(&self.kernel("sort_count"), grid, args.ptr(space.fault))?;
            let args = Args::new().ptr(space.counts).u32((DIGITS * blocks) as u32);
            self.at.launch(&self.kernel("sort_scan"), Grid::linear(1, 1024), args)?;
            let args = Args::new().ptr(space.keys[to]).ptr(space.positions[to]).ptr(keys).ptr(from);
            let args = args.ptr(space.counts).u32(self.n).u32(self.limit).u32(shift);
            self.at.launch(&self.kernel("sort_scatter"), grid, args)?;
            (keys, from) = (space.keys[to], space.positions[to]);
        }
        Ok([keys, from])
    }

    /// Adds up window by window, then the sums of indices that lie in more than one window.
    fn windows(&self, space: &Space, [keys, sorted]: [u64; 2], rows: u64, table: u64) -> Result<()> {
        let units = self.width.div_ceil(if self.vectors { 4 } else { 1 });
        let windows = (self.n as usize).div_ceil(WINDOW) as u32;
        let threads = units.next_multiple_of(32).min(256);
        let shape = |high: usize, threads: usize| Grid {
            grid: [windows, high as u32, 1],
            block: [threads as u32, 1, 1],
            shared: 0,
        };
        let sizes = |args: Args| args.u32(self.n).u32(self.limit).u32(self.width as u32);
        let args = sizes(Args::new().ptr(table).ptr(space.edges).ptr(rows).ptr(keys).ptr(sorted));
        let kernel = self.kernel("embedding_bwd_windows");
        self.at.launch(&kernel, shape(units.div_ceil(threads), threads), args)?;
        let args = sizes(Args::new().ptr(table).ptr(space.edges).ptr(keys));
        self.at.launch(&self.kernel("embedding_bwd_joins"), shape(units.div_ceil(32), 256), args)
    }
}

/// The module of the engine's embedding gradient, for f32.
fn many(vectors: bool) -> Spec {
    let spec = Spec::new(MANY).define("ACT", "float").define("GRAD", "float");
    if vectors { spec.define("VECTORS", 1) } else { spec }
}

/// The specialisation that the engine does not compile already.
pub(super) fn specs() -> Vec<Spec> {
    vec![Spec::new(FEW)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_compiles_the_sorting_kernels_too() {
        let engine = crate::op::specs();
        for vectors in [false, true] {
            assert!(engine.contains(&many(vectors)));
        }
    }
}
