//! Dropout of a row of activations.

use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::DropRow;

/// Columns that the random words of a block decide about.
const BLOCK: usize = 16;

multiversion! {
    /// y = x·scale where the mask keeps a column, else 0
    pub fn dropout_row<const FMA: bool>(x: Span<f32>, y: Span<f32>, row: DropRow, scale: f32) {
        for first in (0..x.len()).step_by(BLOCK) {
            let mut keeps = [0.0; BLOCK];
            for i in 0..BLOCK / 2 {
                let word = row.word((first / 2 + i) as u32);
                keeps[i] = if word & 0xffff >= row.threshold { scale } else { 0.0 };
                keeps[i + BLOCK / 2] = if word >> 16 >= row.threshold { scale } else { 0.0 };
            }
            let range = first..x.len().min(first + BLOCK);
            // SAFETY: the caller alone uses `y`, which is `x` or shares no memory with it; no slice of both lives at once.
            unsafe {
                let mut block = [0.0; BLOCK];
                block[..range.len()].copy_from_slice(x.get(range.clone()));
                // A product with 0 would keep the sign of a dropped element, and NaN.
                for (x, keep) in block.iter_mut().zip(keeps) {
                    *x = if keep > 0.0 { *x * keep } else { 0.0 };
                }
                y.get_mut(range.clone()).copy_from_slice(&block[..range.len()]);
            }
        }
    }
}
