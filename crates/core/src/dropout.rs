//! Which elements dropout drops. A mask is a function of the run's seed, the step, the micro-step, the place in the
//! model and the element's row and column, so it is the same for any number of threads and on every engine, and the
//! backward computes it again instead of keeping it. `cuda/kernels/common/dropout.cuh` and
//! `python/ironhorse/reference/dropout.py` compute the same bits.

use crate::Scalars;
use crate::rounding::{first_round, mix, second_round, step_key};

/// How often dropout drops an element: a multiple of 2⁻¹⁶ below 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropRate(u16);

impl DropRate {
    /// The rate nearest to this one; `None` outside of [0, 1).
    pub fn new(rate: f64) -> Option<Self> {
        (0.0..1.0).contains(&rate).then(|| Self((rate * 65536.0).round().min(65535.0) as u16))
    }

    /// Whether anything is dropped.
    pub const fn drops(self) -> bool {
        self.0 > 0
    }

    /// An element is dropped if its 16 random bits are below this.
    pub const fn threshold(self) -> u32 {
        self.0 as u32
    }

    /// The rate.
    pub fn rate(self) -> f64 {
        f64::from(self.0) / 65536.0
    }

    /// What kept elements are multiplied with, so that the expected value stays: 1 / (1 - rate).
    pub fn scale(self) -> f32 {
        65536.0 / (65536 - self.threshold()) as f32
    }
}

/// The dropout of one place in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropSite {
    /// How often it drops.
    pub rate: DropRate,
    /// The number of the place; each place of a model has its own masks.
    pub site: u32,
}

/// The mask of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropMask {
    key: [u32; 2],
    threshold: u32,
    /// Random words of a row.
    words: u64,
}

/// Separates the bits of dropout from those of stochastic rounding.
const DROPOUT: u32 = 0x2545_f491;

impl DropMask {
    /// The mask of a place in this step and micro-step, for rows of `cols` elements.
    pub fn new(drop: DropSite, scalars: &Scalars, cols: usize) -> Self {
        let [first, second] = step_key(scalars.seed, scalars.step);
        let first = mix(first ^ mix(drop.site.wrapping_add(DROPOUT)));
        let second = mix(second ^ mix(scalars.micro_step.wrapping_add(first)));
        let words = cols.div_ceil(16) as u64 * 8;
        Self { key: [first, second], threshold: drop.rate.threshold(), words }
    }

    /// The mask of a row.
    pub const fn row(&self, row: u64) -> DropRow {
        let before = row.wrapping_mul(self.words);
        let [first, second] = self.key;
        DropRow {
            key: [first.wrapping_add(before as u32), second.wrapping_add((before >> 32) as u32)],
            threshold: self.threshold,
        }
    }
}

/// The mask of one row. A random word of 32 bits decides about two columns that are 8 apart: its lower half about the
/// first, its upper half about the second. In this pattern the threads of a tensor-core tile find both columns of a
/// word among their own, whether rows or columns of the tile are queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropRow {
    /// What its words are made from.
    pub key: [u32; 2],
    /// See [`DropRate::threshold`].
    pub threshold: u32,
}

impl DropRow {
    /// The random word `index`, for columns `index / 8 * 16 + index % 8` and 8 more.
    #[inline(always)]
    pub const fn word(&self, index: u32) -> u32 {
        Self::word_of(self.key, index)
    }

    /// The random word `index` of the row with this key.
    #[inline(always)]
    pub const fn word_of(key: [u32; 2], index: u32) -> u32 {
        second_round(first_round(key[0].wrapping_add(index)) ^ key[1])
    }

    /// The word that decides about a column, and the lowest of the 16 bits of it that do.
    #[inline(always)]
    pub const fn place(col: usize) -> (u32, u32) {
        ((col / 16 * 8 + col % 8) as u32, (col / 8 % 2 * 16) as u32)
    }

    /// The 16 random bits of a column.
    #[inline(always)]
    pub const fn bits(&self, col: usize) -> u32 {
        let (index, shift) = Self::place(col);
        self.word(index) >> shift & 0xffff
    }

    /// Whether the element of a column is kept.
    #[inline(always)]
    pub const fn keeps(&self, col: usize) -> bool {
        self.bits(col) >= self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(rate: f64) -> DropRate {
        DropRate::new(rate).unwrap()
    }

    fn mask(seed: u64, step: u32, micro_step: u32, site: u32) -> DropMask {
        let scalars = Scalars { seed, step, micro_step, ..Scalars::default() };
        DropMask::new(DropSite { rate: rate(0.1), site }, &scalars, 1000)
    }

    #[test]
    fn a_rate_is_below_1_and_its_scale_keeps_the_expected_value() {
        for (given, threshold) in [(0.0, 0), (0.25, 16384), (0.1, 6554), (0.999_999_9, 65535), (1e-9, 0)] {
            let rate = rate(given);
            assert_eq!(rate.threshold(), threshold);
            assert_eq!(rate.drops(), threshold > 0);
            assert!((f64::from(rate.scale()) * (1.0 - rate.rate()) - 1.0).abs() < 1e-7);
        }
        for wrong in [1.0, -0.1, 2.0, f64::NAN, f64::INFINITY] {
            assert_eq!(DropRate::new(wrong), None);
        }
    }

    /// The tolerance is six standard deviations: 0.0009 of the 4·10⁶ elements.
    #[test]
    fn as_many_are_dropped_as_asked_in_every_row_and_column() {
        let mask = mask(7, 3, 1, 5);
        let (rows, cols) = (4000, 1000);
        let mut by_col = vec![0_u32; cols];
        let mut total = 0;
        for row in 0..rows {
            let row = mask.row(row);
            let mut dropped = 0;
            for (col, count) in by_col.iter_mut().enumerate() {
                let drops = !row.keeps(col);
                *count += u32::from(drops);
                dropped += u32::from(drops);
            }
            // six standard deviations of a thousand draws
            assert!((dropped as f64 - 100.0).abs() < 6.0 * 90_f64.sqrt(), "{dropped}");
            total += dropped;
        }
        assert!((f64::from(total) / 4e6 - 0.1).abs() < 0.0009, "{total}");
        let off = by_col.iter().map(|&count| (f64::from(count) - 400.0).abs()).fold(0.0, f64::max);
        assert!(off < 6.0 * 360_f64.sqrt(), "{off}");
    }

    /// Two masks that have nothing to do with each other drop the same element in one of a hundred cases.
    #[test]
    fn masks_of_other_seeds_steps_micro_steps_sites_and_rows_are_unrelated() {
        let base = mask(7, 3, 1, 5);
        let others = [
            mask(8, 3, 1, 5),
            mask(7 + (1 << 40), 3, 1, 5),
            mask(7, 4, 1, 5),
            mask(7, 3, 2, 5),
            mask(7, 3, 1, 6),
        ];
        let pairs = others.map(|other| (other, 0, 0)).into_iter().chain([
            (base, 1, 0),
            (base, 0, 1),
            (base, 0, 8),
            (base, 3, 16),
        ]);
        for (other, rows, cols) in pairs {
            let mut both = 0;
            for row in 0..1000 {
                let (one, two) = (base.row(row), other.row(row + rows));
                both += (0..900).filter(|&col| !one.keeps(col) && !two.keeps(col + cols)).count();
            }
            // six standard deviations of 900,000 draws
            assert!((both as f64 - 9000.0).abs() < 6.0 * 9000_f64.sqrt(), "{rows} {cols}: {both}");
        }
    }

    #[test]
    fn a_word_decides_about_two_columns_8_apart() {
        let row = mask(1, 1, 0, 0).row(77);
        for (col, index) in [(0, 0), (7, 7), (16, 8), (23, 15), (992, 496)] {
            let word = row.word(index);
            assert_eq!([row.bits(col), row.bits(col + 8)], [word & 0xffff, word >> 16], "{col}");
        }
    }

    /// Runs resume from checkpoints, and CUDA kernels and Python compute the same bits: they must never change.
    #[test]
    fn masks_are_what_they_were() {
        let row = mask(7, 3, 1, 5).row((1 << 33) + 5);
        assert_eq!([0, 1, 8, 31].map(|col| row.bits(col)), [0x3419, 0x8ae1, 0x29ea, 0xb859]);
        assert_eq!(mask(1 << 40, 1, 0, 36).row(2).word(3), 0x2218_4974);
    }
}
