//! `table[index[i]] += rows[i]` for many i: the launches of embedding/bwd.cu, shared by the engine and eager ops. Positions are
//! sorted by index; windows of sorted positions are summed, then what lies in more than one window.

use crate::args::{Args, Grid};

/// `WINDOW`, `SORT_BLOCK`, `DIGITS` and the bits of a digit in embedding/bwd.cu.
const WINDOW: usize = 32;
const SORT_BLOCK: usize = 1024;
const DIGITS: usize = 256;
const DIGIT_BITS: u32 = 8;

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortedScatter {
    /// Indices; at least 1.
    pub n: usize,
    /// Elements of a row.
    pub width: usize,
    /// Indices that are not below are skipped, and reported to the fault block.
    pub limit: u32,
    /// Elements that a thread takes of a row: a vector, or 1.
    pub unit: usize,
}

/// The addresses of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScatterMemory {
    pub indices: u64,
    pub rows: u64,
    pub table: u64,
    /// `struct Fault` of common/prelude.cuh.
    pub fault: u64,
    /// [`SortedScatter::scratch`] bytes, aligned to 256.
    pub scratch: u64,
}

/// A kernel of embedding/bwd.cu with its shape and arguments.
pub(crate) type ScatterStep = (&'static str, Grid, Args);

impl SortedScatter {
    /// Bytes of a list of indices or positions, of the counts, and of the sums at the edges of windows.
    fn sizes(&self) -> [usize; 3] {
        let list = self.n * size_of::<u32>();
        let counts = DIGITS * self.n.div_ceil(SORT_BLOCK) * size_of::<u32>();
        let edges = 2 * self.n.div_ceil(WINDOW) * self.width * size_of::<f32>();
        [list, counts, edges].map(|bytes| bytes.next_multiple_of(256))
    }

    /// Bytes of scratch memory.
    pub fn scratch(&self) -> usize {
        let [list, counts, edges] = self.sizes();
        4 * list + counts + edges
    }

    /// The launches, in order.
    pub fn steps(&self, at: &ScatterMemory) -> Vec<ScatterStep> {
        let [list, counts_bytes, _] = self.sizes();
        let part = |index: usize| at.scratch + (index * list) as u64;
        let (counts, edges) = (part(4), part(4) + counts_bytes as u64);
        let (n, limit) = (self.n as u32, self.limit);
        let blocks = self.n.div_ceil(SORT_BLOCK);
        let grid = Grid::linear(blocks, SORT_BLOCK as u32);
        // `limit` itself is the key of an index that is skipped.
        let passes = (u32::BITS - limit.leading_zeros()).div_ceil(DIGIT_BITS).max(1);
        let (mut keys, mut positions, mut steps) = (at.indices, 0, Vec::new());
        for pass in 0..passes {
            // A pass sorts from one pair of lists into the other, equal keys in their order.
            let (shift, to) = (pass * DIGIT_BITS, (pass % 2) as usize);
            let args = Args::new().ptr(counts).ptr(keys).u32(n).u32(limit).u32(shift).ptr(at.fault);
            steps.push(("sort_count", grid, args));
            let args = Args::new().ptr(counts).u32((DIGITS * blocks) as u32);
            steps.push(("sort_scan", Grid::linear(1, 1024), args));
            let args = Args::new().ptr(part(to)).ptr(part(2 + to)).ptr(keys).ptr(positions);
            steps.push(("sort_scatter", grid, args.ptr(counts).u32(n).u32(limit).u32(shift)));
            (keys, positions) = (part(to), part(2 + to));
        }
        let units = self.width.div_ceil(self.unit);
        let shape = |high: usize, threads: usize| Grid::plane(self.n.div_ceil(WINDOW), high, threads as u32);
        let sizes = |args: Args| args.u32(n).u32(limit).u32(self.width as u32);
        let threads = units.next_multiple_of(32).min(256);
        let args = Args::new().ptr(at.table).ptr(edges).ptr(at.rows).ptr(keys).ptr(positions);
        steps.push(("embedding_bwd_windows", shape(units.div_ceil(threads), threads), sizes(args)));
        let args = Args::new().ptr(at.table).ptr(edges).ptr(keys);
        steps.push(("embedding_bwd_joins", shape(units.div_ceil(32), 256), sizes(args)));
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_pass_sorts_the_highest_digit_of_the_limit() {
        let at = ScatterMemory { indices: 1, rows: 2, table: 3, fault: 4, scratch: 256 };
        let steps = |limit| SortedScatter { n: 5000, width: 48, limit, unit: 4 }.steps(&at);
        for (limit, passes) in [(1, 1), (255, 1), (256, 2), (50257, 2), (1 << 16, 3), (1 << 31, 4)] {
            assert_eq!(steps(limit).len(), 3 * passes + 2, "{limit}");
        }
        let (name, grid, _) = &steps(7)[3];
        assert_eq!((*name, grid.grid, grid.block), ("embedding_bwd_windows", [157, 1, 1], [32, 1, 1]));
    }
}
