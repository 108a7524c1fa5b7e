//! Addresses of arrays as kernels take them, and how threads are laid over memory.

use crate::args::{Args, Grid};
use ironhorse_core::eager::{Array, Float};

/// Bytes of a vector: one load or store of a thread.
pub(super) const VECTOR: usize = 16;
/// Threads of a block, at most.
pub(super) const THREADS: usize = 256;

/// The address of an array as a kernel's argument.
pub(super) fn address(array: Array) -> u64 {
    array.at.addr() as u64
}

/// The first arguments of a kernel: addresses of arrays.
pub(super) fn pointers<const N: usize>(arrays: [Array; N]) -> Args {
    Args::new().arrays(arrays)
}

/// Whether all arrays start at multiples of 16 bytes; null does.
pub(super) fn aligned(arrays: &[Array]) -> bool {
    arrays.iter().all(|array| array.at.addr().is_multiple_of(VECTOR))
}

/// Elements of a vector.
pub(super) fn lane_width(float: Float) -> usize {
    VECTOR / float.size()
}

/// Whether every row of all these arrays consists of whole vectors and starts at a multiple of 16 bytes.
pub(super) fn whole_vectors(arrays: &[Array], cols: usize, float: Float) -> bool {
    cols.is_multiple_of(lane_width(float)) && aligned(arrays)
}

/// Threads that each own a unit (an element or a vector) of the columns of a matrix and walk down rows. Neighbouring
/// threads touch neighbouring memory, also across the end of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// Threads side by side; a block has as many rows of them as fit.
    pub x: usize,
    /// Rows of threads.
    pub y: usize,
    /// Blocks that a row of the matrix needs.
    pub tiles: usize,
}

impl Columns {
    /// The layout for rows of `units`, at least one.
    pub fn of(units: usize) -> Self {
        if units <= THREADS {
            return Self { x: units, y: THREADS / units, tiles: 1 };
        }
        let tiles = units.div_ceil(THREADS);
        let x = units.div_ceil(tiles).next_multiple_of(32);
        Self { x, y: 1, tiles: units.div_ceil(x) }
    }

    /// The layout for rows of `units`, at least one: up to a warp side by side, and as many rows of them as make up to `threads` threads.
    pub fn narrow(units: usize, threads: usize) -> Self {
        let x = units.div_ceil(units.div_ceil(32));
        Self { x, y: threads / x, tiles: units.div_ceil(x) }
    }

    /// The grid: `groups` groups of rows, the tiles of a group one after the other.
    pub fn grid(self, groups: usize) -> Grid {
        let line = Grid::linear(groups.saturating_mul(self.tiles), 1);
        Grid { block: [self.x as u32, self.y as u32, 1], ..line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_cover_every_unit_once() {
        for units in (1..1200).chain([2048, 8191, 8192, 50257, 1 << 24]) {
            let c = Columns::of(units);
            assert!(c.x * c.y <= THREADS && c.y >= 1, "{c:?}");
            assert!(c.x * c.tiles >= units && c.x * (c.tiles - 1) < units, "{units}: {c:?}");
            let c = Columns::narrow(units, 512);
            assert!(c.x * c.y <= 512 && c.y >= 16, "{c:?}");
            assert!(c.x * c.tiles >= units && c.x * (c.tiles - 1) < units, "{units}: {c:?}");
        }
    }
}
