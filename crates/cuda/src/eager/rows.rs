//! How rows are split among threads: the host side of `common/rows.cuh`.

use super::layout::{VECTOR, lane_width};
use crate::args::Grid;
use ironhorse_core::eager::{Array, Float, Rows};

const WARP: usize = 32;
/// Threads of a block whose rows need a warp or less each.
const SMALL_BLOCK: usize = 128;

/// Whether rows of all these arrays start at the same offset from a multiple of 16 bytes, so that one split into vectors
/// fits all of them. Null is ignored.
pub(super) fn congruent(arrays: &[Array]) -> bool {
    let mut offsets = arrays.iter().filter(|array| array.is_some()).map(|array| array.at.addr() % VECTOR);
    let first = offsets.next().unwrap_or(0);
    offsets.all(|offset| offset == first)
}

/// Threads to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Team {
    /// Vectors that a thread holds in registers; 0 if the row is streamed.
    pub vecs: u32,
    /// A power of two up to a warp, or a whole block.
    pub lanes: u32,
    /// Threads of a block.
    pub threads: u32,
}

impl Team {
    /// The team for rows held in registers, up to `most` vectors in each of up to `threads(vecs)` threads; `None` if they do
    /// not fit.
    pub fn held(
        cols: usize,
        float: Float,
        edges: bool,
        most: u32,
        threads: impl Fn(u32) -> usize,
    ) -> Option<Self> {
        let n = lane_width(float);
        // Up to 2·N - 2 elements are before and after the vectors, each held by a thread of its own.
        let least = if edges { (2 * n - 2).next_power_of_two() } else { 1 };
        let slots = cols.div_ceil(n);
        for vecs in [1, 2, 4] {
            let lanes = slots.div_ceil(vecs).next_power_of_two().max(least);
            // A warp of few vectors to a lane, if the row is as short as that.
            if vecs as u32 <= most && lanes <= WARP {
                return Some(Self { vecs: vecs as u32, lanes: lanes as u32, threads: SMALL_BLOCK as u32 });
            }
        }
        [most.min(4), most].into_iter().find_map(|vecs| {
            let lanes = slots.div_ceil(vecs as usize).next_multiple_of(WARP);
            (lanes <= threads(vecs)).then_some(Self { vecs, lanes: lanes as u32, threads: lanes as u32 })
        })
    }

    /// The team for rows that are streamed: about `each` elements at a time to a thread, at most `most` threads.
    pub fn streamed(cols: usize, each: usize, most: usize) -> Self {
        let wanted = cols.div_ceil(each).max(1);
        if wanted <= WARP {
            return Self { vecs: 0, lanes: wanted.next_power_of_two() as u32, threads: SMALL_BLOCK as u32 };
        }
        let lanes = wanted.next_multiple_of(WARP).min(most) as u32;
        Self { vecs: 0, lanes, threads: lanes }
    }

    /// Whether a row of vectors gives each thread as many as it can hold.
    pub fn is_full(self, cols: usize, float: Float) -> bool {
        cols == (self.vecs * self.lanes) as usize * lane_width(float)
    }

    /// Rows of a block.
    pub fn rows(self) -> usize {
        if self.lanes as usize <= WARP { (self.threads / self.lanes) as usize } else { 1 }
    }

    /// Blocks for all rows.
    pub fn grid(self, rows: usize) -> Grid {
        Grid::linear(rows.div_ceil(self.rows()), self.threads)
    }
}

/// Whether there is nothing to do.
pub(super) fn empty(rows: Rows) -> bool {
    rows.rows == 0 || rows.cols == 0
}

#[cfg(test)]
mod tests {
    use super::super::layout::whole_vectors;
    use super::*;

    #[test]
    fn teams_hold_every_row_they_are_chosen_for() {
        for float in Float::ALL {
            for edges in [false, true] {
                for cols in (1..3000).chain([4096, 8191, 8192, 16384, 32768, 50257, 65536]) {
                    let most = |vecs| if vecs == 8 { 1024 } else { 512 };
                    let Some(team) = Team::held(cols, float, edges, 8, most) else {
                        assert!(cols * float.size() > 1024 * 8 * VECTOR - VECTOR, "{float:?} {cols}");
                        continue;
                    };
                    let n = lane_width(float);
                    assert!(team.vecs as usize * team.lanes as usize * n >= cols);
                    assert!(!edges || team.lanes as usize >= 2 * n - 2);
                    let warp = team.lanes as usize <= WARP;
                    assert!(warp && team.lanes.is_power_of_two() || team.lanes == team.threads);
                    assert!(team.threads.is_multiple_of(WARP as u32));
                }
            }
        }
    }

    #[test]
    fn arrays_split_alike_only_if_equally_far_from_a_vector() {
        let at = |address: usize| Array { at: std::ptr::without_provenance_mut(address), float: Float::F32 };
        assert!(congruent(&[at(0x1004), at(0x2014), Array::none(Float::F32)]));
        assert!(!congruent(&[at(0x1004), at(0x2010)]));
        assert!(whole_vectors(&[at(0x1000)], 8, Float::F32) && !whole_vectors(&[at(0x1000)], 6, Float::F32));
    }
}
