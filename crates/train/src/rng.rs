//! Random numbers that are the same on every platform: a 256-bit generator on integers, libm for the rest.
//!
//! The generator is xoshiro256++ (Blackman and Vigna), its state filled by a counter run through a 64-bit mixer.

/// Odd step of the seeding counter: 2^64 / golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection of 64-bit words in which each input bit reaches every output bit.
#[inline]
pub(crate) fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A small seeded generator. Equal seeds give equal sequences on every machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    s: [u64; 4],
}

impl Rng {
    /// The generator of this seed. Neighbouring seeds are as unrelated as distant ones.
    pub fn new(seed: u64) -> Self {
        let mut counter = seed;
        let s = [(); 4].map(|()| {
            counter = counter.wrapping_add(STEP);
            mix64(counter)
        });
        Self { s }
    }

    /// An independent generator for one purpose; `self` does not advance. The same state and stream give the same fork.
    pub fn fork(&self, stream: u64) -> Self {
        let key = self.s.iter().fold(mix64(stream ^ STEP), |k, &w| mix64(k.rotate_left(17) ^ w));
        Self::new(key)
    }

    /// The next 64 random bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = self.s;
        let out = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.s = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        out
    }

    /// Skips as many words as the leap covers.
    pub(crate) fn leap(&mut self, leap: &Leap) {
        self.s = leap.image(self.s);
    }

    /// A number in `0..n`, each equally likely. `below(0)` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 {
            return 0;
        }
        // The high word of x*n is the answer; low words under 2^64 mod n would favour some answers and are drawn again. That
        // remainder is below n: few low words have to be compared with it.
        let mut wide = u128::from(self.next_u64()) * u128::from(n);
        if (wide as u64) < n {
            let uneven = n.wrapping_neg() % n;
            while (wide as u64) < uneven {
                wide = u128::from(self.next_u64()) * u128::from(n);
            }
        }
        (wide >> 64) as u64
    }

    /// An index into something of length `n`: [`below`](Self::below) for `usize`.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub fn uniform_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller. Uses two words and keeps no second number, so the words of the state are the
    /// whole state.
    pub fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.uniform_f64()));
        let angle = std::f64::consts::TAU * self.uniform_f64();
        radius * libm::cos(angle)
    }

    /// Puts the items in random order, each order equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

/// A number of steps of the generator at once. A step moves and adds bits modulo 2 only, so any number of steps is one
/// matrix of 256 × 256 bits.
pub(crate) struct Leap {
    /// The state that each single bit leads to.
    of_bit: Vec<[u64; 4]>,
}

impl Leap {
    /// Over 2^log2 words.
    pub(crate) fn over_pow2(log2: u32) -> Self {
        let step = |bit: usize| {
            let mut rng = Rng { s: [0; 4] };
            rng.s[bit / 64] = 1 << (bit % 64);
            rng.next_u64();
            rng.s
        };
        let mut leap = Self { of_bit: (0..256).map(step).collect() };
        for _ in 0..log2 {
            leap = Self { of_bit: leap.of_bit.iter().map(|&s| leap.image(s)).collect() };
        }
        leap
    }

    fn image(&self, s: [u64; 4]) -> [u64; 4] {
        let mut sum = [0; 4];
        for (bit, of_bit) in self.of_bit.iter().enumerate() {
            let mask = (s[bit / 64] >> (bit % 64) & 1).wrapping_neg(); // all ones where the bit is set
            sum.iter_mut().zip(of_bit).for_each(|(sum, word)| *sum ^= word & mask);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leap_is_as_many_words() {
        for log2 in [0, 1, 7, 17] {
            let (mut leaping, leap) = (Rng::new(11), Leap::over_pow2(log2));
            let mut walking = leaping.clone();
            for _ in 0..3 {
                leaping.leap(&leap);
                (0..1_u32 << log2).for_each(|_| _ = walking.next_u64());
                assert_eq!(leaping, walking, "{log2}");
            }
        }
    }

    #[test]
    fn golden_values() {
        let mut rng = Rng::new(1);
        assert_eq!([rng.next_u64(), rng.next_u64()], [0xcfc5_d07f_6f03_c29b, 0xbf42_4132_963f_e08d]);
        assert_eq!(rng.fork(7).next_u64(), 0x57fc_ac90_fa96_f183);
        assert_eq!(rng.uniform_f64().to_bits(), 0x3fb9_a37d_5757_aaf0);
        assert_eq!(rng.normal().to_bits(), 0x3fe5_2508_bd83_02db);
        assert_eq!(rng.below(1000), 590);
    }

    #[test]
    fn xoshiro_reference() {
        // By hand from the definition: result rotl(s0 + s3, 23) + s0, then the linear step.
        let mut rng = Rng { s: [1, 2, 3, 4] };
        assert_eq!(rng.next_u64(), 41_943_041);
        assert_eq!(rng.s, [7, 0, 262_146, 6_u64.rotate_left(45)]);
    }

    #[test]
    fn moments() {
        let mut rng = Rng::new(42);
        let n = 200_000;
        let (mut u, mut m) = ([0.0; 2], [0.0; 4]);
        for _ in 0..n {
            let x = rng.uniform_f64();
            assert!((0.0..1.0).contains(&x));
            u[0] += x / n as f64;
            u[1] += x * x / n as f64;
            let z = rng.normal();
            (0..4).for_each(|k| m[k] += z.powi(k as i32 + 1) / n as f64);
        }
        assert!((u[0] - 0.5).abs() < 0.003 && (u[1] - 1.0 / 3.0).abs() < 0.003, "{u:?}");
        assert!(m[0].abs() < 0.01 && (m[1] - 1.0).abs() < 0.02, "{m:?}");
        assert!(m[2].abs() < 0.05 && (m[3] - 3.0).abs() < 0.1, "{m:?}");
    }

    #[test]
    fn below_is_uniform() {
        for n in [1_u64, 2, 3, 31, 33, 100] {
            let (mut rng, mut counts) = (Rng::new(n), vec![0_f64; n as usize]);
            let draws = 1000 * n;
            (0..draws).for_each(|_| counts[rng.below(n) as usize] += 1.0);
            let chi2: f64 = counts.iter().map(|c| (c - 1000.0) * (c - 1000.0) / 1000.0).sum();
            // Mean n - 1, deviation sqrt(2 (n - 1)): five deviations.
            let free = (n - 1) as f64;
            assert!(chi2 <= free + 5.0 * (2.0 * free).sqrt() + 1e-9, "n {n}: {chi2}");
        }
        assert_eq!(Rng::new(0).below(0), 0);
        assert!(Rng::new(0).below(u64::MAX) < u64::MAX);
    }

    #[test]
    fn forks_differ_and_repeat() {
        let rng = Rng::new(3);
        assert_eq!(rng.fork(0), rng.fork(0));
        let mut firsts: Vec<u64> = (0..1000).map(|i| rng.fork(i).next_u64()).collect();
        firsts.extend((0..1000).map(|i| Rng::new(i).next_u64()));
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), 2000);
    }

    #[test]
    fn shuffle_reaches_every_order() {
        let mut rng = Rng::new(5);
        let mut counts = std::collections::HashMap::new();
        for _ in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            rng.shuffle(&mut items);
            *counts.entry(items).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|&c| (850..1150).contains(&c)), "{counts:?}");
        rng.shuffle::<u8>(&mut []);
    }
}
