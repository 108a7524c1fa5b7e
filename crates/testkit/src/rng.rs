//! A tiny seeded generator (splitmix64): the same inputs on every machine.

/// Seeded random numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng(u64);

/// What the state grows by with each number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Rng {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Seeds with the FNV-1a hash of a name, so that the numbers of a case do not depend on the order of cases.
    pub fn named(name: &str) -> Self {
        Self(
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)),
        )
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Leaves out the next `count` numbers.
    pub fn skip(&mut self, count: usize) {
        self.0 = self.0.wrapping_add(STEP.wrapping_mul(count as u64));
    }

    /// Uniform between `lo` and `hi`, computed in f64 and rounded to f32, so that small values use all bits of the
    /// mantissa and sums of them round.
    pub fn uniform(&mut self, lo: f32, hi: f32) -> f32 {
        let unit = (self.bits() >> 11) as f64 / (1_u64 << 53) as f64;
        (f64::from(lo) + (f64::from(hi) - f64::from(lo)) * unit) as f32
    }

    /// Uniform below `limit`, which must not be 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Many [`Rng::uniform`].
    pub fn uniforms(&mut self, count: usize, lo: f32, hi: f32) -> Vec<f32> {
        (0..count).map(|_| self.uniform(lo, hi)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_is_drawing_without_looking() {
        let [mut drawn, mut skipped] = [Rng::named("a case"), Rng::named("a case")];
        drawn.uniforms(1000, -1.0, 1.0);
        skipped.skip(1000);
        assert_eq!(drawn.bits(), skipped.bits());
    }
}
