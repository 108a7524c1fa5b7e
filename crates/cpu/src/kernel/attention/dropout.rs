//! Dropout of probabilities: a row of the mask for each query, its columns are keys.

use super::TILE;
use crate::element::Real;
use crate::isa::Isa;
use crate::multiversion;
use ironhorse_core::{DropMask, DropRow};
use std::ops::Range;

/// Which probabilities an attention drops, and what the others are multiplied with.
#[derive(Clone, Copy)]
pub struct Drops {
    pub mask: DropMask,
    /// See [`DropRate::threshold`](ironhorse_core::DropRate::threshold).
    pub threshold: u32,
    pub scale: f32,
}

impl Drops {
    /// Drops and scales elements of scores, which have a row of `stride` elements for each key and a column for each
    /// query; `first` is the row of the first query in the mask.
    pub(super) fn apply<A: Real>(
        &self,
        isa: Isa,
        (scores, stride): (&mut [A], usize),
        first: usize,
        [queries, keys]: [&Range<usize>; 2],
    ) {
        let mut rows = [[0; TILE]; 2];
        let [ones, twos] = &mut rows;
        for (row, (one, two)) in (first..first + queries.len()).zip(ones.iter_mut().zip(twos)) {
            [*one, *two] = self.mask.row(row as u64).key;
        }
        drop_columns(isa, scores, stride, &rows, keys.start, self.threshold, A::of(self.scale.into()));
    }
}

multiversion! {
    /// s = s·scale where the mask of a column keeps the row's key, else 0
    fn drop_columns<const FMA: bool, A: Real>(
        s: &mut [A],
        stride: usize,
        queries: &[[u32; TILE]; 2],
        first: usize,
        threshold: u32,
        scale: A,
    ) {
        for (i, row) in s.chunks_exact_mut(stride).enumerate() {
            let (index, shift) = DropRow::place(first + i);
            for ((s, &one), &two) in row.iter_mut().zip(&queries[0]).zip(&queries[1]) {
                let bits = DropRow::word_of([one, two], index) >> shift & 0xffff;
                *s = if bits >= threshold { *s * scale } else { A::ZERO };
            }
        }
    }
}
