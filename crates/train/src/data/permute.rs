//! A keyed permutation of 0..n without a table: a Feistel network on the index bits, applied until the result is below
//! n.
//!
//! Each round maps (left, right) to (right, left ^ f(right, key)), which is invertible for any f; so the network is a
//! bijection on 2^(2 half) indices. Applying it again to results >= n makes it a bijection on 0..n. Because of
//! 2^(2 half) < 4 n this needs fewer than four applications on average.

use crate::rng::{Rng, mix64};

const ROUNDS: usize = 6;

/// A random order of `0..n`, in constant memory.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    n: u64,
    half: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The order that `rng` picks.
    pub(super) fn new(n: u64, rng: &mut Rng) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Self { n, half: bits.div_ceil(2).max(1), keys: [(); ROUNDS].map(|()| rng.next_u64()) }
    }

    /// The element at position `i` of the order. `i` must be below n.
    pub(super) fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n, "place {i} of {}", self.n);
        let mask = (1_u64 << self.half) - 1;
        let mut x = i;
        loop {
            let (mut left, mut right) = (x >> self.half, x & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (mix64(right ^ key) & mask));
            }
            x = left << self.half | right;
            if x < self.n {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_a_permutation() {
        for n in (1..300).chain([1023, 1024, 1025, 70_001]) {
            let order = Permutation::new(n, &mut Rng::new(n));
            let mut seen = vec![false; n as usize];
            (0..n).for_each(|i| seen[order.at(i) as usize] = true);
            assert!(seen.iter().all(|&s| s), "n {n}");
        }
    }

    #[test]
    fn every_place_is_equally_likely() {
        let (n, keys) = (24_u64, 24_000);
        let mut counts = vec![0_f64; (n * n) as usize];
        let mut rng = Rng::new(4);
        for _ in 0..keys {
            let order = Permutation::new(n, &mut rng);
            (0..n).for_each(|i| counts[(i * n + order.at(i)) as usize] += 1.0);
        }
        let want = f64::from(keys) / n as f64;
        let chi2: f64 = counts.iter().map(|c| (c - want) * (c - want) / want).sum();
        let free = ((n - 1) * (n - 1)) as f64;
        assert!(chi2 < free + 6.0 * (2.0 * free).sqrt(), "{chi2} for {free}");
    }

    #[test]
    fn neighbours_are_torn_apart() {
        let n = 100_000_000;
        let order = Permutation::new(n, &mut Rng::new(1));
        let jumps =
            (0..1000).map(|i| order.at(i + 1).abs_diff(order.at(i)) as f64 / n as f64).sum::<f64>() / 1000.0;
        assert!((jumps - 1.0 / 3.0).abs() < 0.03, "mean jump {jumps} of n, a third for a random order");
        assert!(order.at(n - 1) < n);
        assert_eq!(Permutation::new(1, &mut Rng::new(0)).at(0), 0);
    }
}
