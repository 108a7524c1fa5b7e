//! How AdamW stores f32 numbers in 16-bit slots: master weights without loss, moments with stochastic rounding.
//! `cuda/kernels/optimizer/adamw.cu` computes the same bits.

/// Splits an f32 master weight into the bits of the nearest bf16 and a 16-bit residual. [`join_master`] restores the
/// master exactly.
///
/// The upper 16 bits of an f32 are a bf16. Adding 0x8000 and dropping the lower 16 bits rounds to the nearest, ties
/// away from 0, and leaves the master's bit pattern within ±2¹⁵ of the weight's, so the difference fits an i16. (With
/// ties to even, two masters would share a weight and a residual.) Above 3.39e38 the nearest bf16 is infinity; the
/// residual still restores the master. Every NaN becomes the NaN 0x7fc0 with residual 0.
#[inline(always)]
pub const fn split_master(master: f32) -> (u16, i16) {
    let bits = if master.is_nan() { 0x7fc0_0000 } else { master.to_bits() };
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16 as i16)
}

/// Restores the f32 master weight from the bits of the bf16 weight and the residual.
#[inline(always)]
pub const fn join_master(weight: u16, residual: i16) -> f32 {
    f32::from_bits(((weight as u32) << 16).wrapping_add(residual as i32 as u32))
}

/// Stochastic rounding to bf16 in one optimizer step. A number rounds up with a probability equal to the fraction that
/// is cut off, so the expected value is the number itself. The result depends on the seed, the step and the element's
/// index only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomRounding {
    key: [u32; 2],
}

/// Separates the random bits of moments from those of weights.
const MOMENTS: u32 = 0x51ed_270b;
/// 2³² divided by the golden ratio: separates the random bits of neighbouring elements.
const GOLDEN: u32 = 0x9e37_79b9;

/// A 32-bit hash in which every input bit affects every output bit.
pub(crate) const fn mix(x: u32) -> u32 {
    second_round(first_round(x))
}

/// The first half of [`mix`]; between both, [`DropRow`](crate::DropRow) adds a key.
#[inline(always)]
pub(crate) const fn first_round(x: u32) -> u32 {
    (x ^ (x >> 16)).wrapping_mul(0x7feb_352d)
}

/// The second half of [`mix`].
#[inline(always)]
pub(crate) const fn second_round(x: u32) -> u32 {
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// What all random bits of a step are made from.
pub(crate) const fn step_key(seed: u64, step: u32) -> [u32; 2] {
    let first = mix(seed as u32 ^ mix(step.wrapping_add(GOLDEN)));
    [first, mix((seed >> 32) as u32 ^ first)]
}

impl RandomRounding {
    /// The rounding that this seed gives in this step.
    pub const fn new(seed: u64, step: u32) -> Self {
        Self { key: step_key(seed, step) }
    }

    /// The bf16 bits of a weight, rounded from its f32 master. Two neighbouring weights share one 32-bit random number.
    pub fn weight(&self, index: u64, master: f32) -> u16 {
        let random = self.bits(index / 2, 0);
        round(master, if index.is_multiple_of(2) { random } else { random >> 16 })
    }

    /// The bf16 bits of both moments of an element, rounded.
    pub fn moments(&self, index: u64, [moment1, moment2]: [f32; 2]) -> [u16; 2] {
        let random = self.moment_bits(index);
        [round(moment1, random), round(moment2, random >> 16)]
    }

    /// The random bits for both moments of an element: the low 16 bits for the first, the high 16 for the second.
    pub fn moment_bits(&self, index: u64) -> u32 {
        mix(self.bits(index / 4, MOMENTS).wrapping_add(GOLDEN.wrapping_mul((index % 4) as u32)))
    }

    fn bits(&self, group: u64, salt: u32) -> u32 {
        let first = mix(group as u32 ^ self.key[0] ^ salt);
        mix(first.wrapping_add((group >> 32) as u32).wrapping_add(self.key[1]))
    }
}

/// Adds 16 random bits below the lowest kept bit and truncates. A finite number stays finite and a NaN stays NaN.
fn round(value: f32, random: u32) -> u16 {
    if !value.is_finite() {
        return crate::f32_to_bf16(value);
    }
    let sum = value.to_bits() + (random & 0xffff);
    let overflows = sum & 0x7f80_0000 == 0x7f80_0000;
    ((if overflows { value.to_bits() } else { sum }) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bf16_to_f32, f32_to_bf16};

    #[test]
    fn every_master_comes_back_to_the_bit() {
        // Every upper half (which covers denormals, infinities and zeros) with the lower halves at which rounding
        // changes, and every lower half with some of the upper halves.
        let edges = [0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];
        let uppers = (0..=0xffff_u32).flat_map(|hi| edges.map(|lo| hi << 16 | lo));
        let some = [0x0000, 0x0001, 0x007f, 0x0080, 0x3f80, 0x3f81, 0x7f7f, 0x8000, 0xbf7f, 0xff7f];
        let lowers = (0..=0xffff_u32).flat_map(|lo| some.map(|hi| hi << 16 | lo));
        for bits in uppers.chain(lowers) {
            let master = f32::from_bits(bits);
            let (weight, residual) = split_master(master);
            let back = join_master(weight, residual);
            if master.is_nan() {
                assert!(back.is_nan() && bf16_to_f32(weight).is_nan(), "{bits:08x}");
                continue;
            }
            assert_eq!(back.to_bits(), bits, "{bits:08x}");
            // The weight is the nearest bf16; ties round away from 0.
            let nearest = if bits & 0xffff == 0x8000 { (bits >> 16) as u16 + 1 } else { f32_to_bf16(master) };
            assert_eq!(weight, nearest, "{bits:08x}");
        }
    }

    #[test]
    fn a_weight_and_any_16_bits_are_what_their_master_splits_into() {
        for weight in [0x0001_u16, 0x3f80, 0x4049, 0xbf81, 0x0080, 0x8001, 0x7f7f] {
            for residual in i16::MIN..=i16::MAX {
                assert_eq!(split_master(join_master(weight, residual)), (weight, residual));
            }
        }
    }

    /// The mean over many elements and steps is the number itself. The tolerance is six standard deviations of a mean
    /// over 2¹⁸ terms of variance at most ¼: 3/2⁹ of a bf16 step.
    #[test]
    fn rounding_at_random_has_no_mean_error() {
        for (value, step) in [(1.001_f32, 2.0_f64.powi(-7)), (-3.3e-7, 2.0_f64.powi(-29)), (6e-41, 9.2e-41)] {
            let mut sums = [0.0_f64; 3];
            for at in 0..1_u64 << 18 {
                let rounding = RandomRounding::new(7, (at >> 10) as u32);
                let [m, v] = rounding.moments(at & 0x3ff, [value, value]);
                for (sum, bits) in sums.iter_mut().zip([m, v, rounding.weight(at & 0x3ff, value)]) {
                    let error = f64::from(bf16_to_f32(bits)) - f64::from(value);
                    assert!(error.abs() < step, "{value:e}: {error:e}");
                    *sum += error / step;
                }
            }
            for sum in sums {
                let mean = sum / f64::from(1 << 18);
                assert!(mean.abs() < 3.0 / 512.0, "{value:e}: {mean}");
            }
        }
    }

    #[test]
    fn random_bits_differ_between_seeds_steps_neighbours_and_moments() {
        let bits = |seed, step, index| RandomRounding::new(seed, step).moment_bits(index);
        let mut seen = std::collections::HashSet::new();
        for at in 0..1000 {
            seen.extend([bits(1, 1, at), bits(2, 1, at), bits(1 << 40, 1, at), bits(1, 2, at)]);
            seen.insert(bits(1, 1, at + (1 << 34)));
        }
        assert!(seen.len() > 4990, "{}", seen.len());
        let halves_alike = (0..4096).filter(|&i| bits(1, 1, i) >> 16 == bits(1, 1, i) & 0xffff).count();
        assert!(halves_alike < 4, "{halves_alike}");
    }

    /// Runs resume from checkpoints and CUDA kernels compute the same bits, so these bits must never change.
    #[test]
    fn random_bits_are_what_they_were() {
        let rounding = RandomRounding::new(7, 3);
        assert_eq!(rounding.key, [0x819a_aaff, 0xd1ac_c864]);
        let bits = [0, 5, 1 << 34].map(|index| rounding.moment_bits(index));
        assert_eq!(bits, [0x8e16_1a5d, 0x62e2_bb1b, 0xd7d5_ec8b]);
    }

    #[test]
    fn what_is_exact_or_not_finite_stays() {
        let rounding = RandomRounding::new(0, 1);
        for index in 0..100 {
            for value in [0.0, -0.0, 1.5, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(bf16_to_f32(rounding.weight(index, value)).to_bits(), value.to_bits());
            }
            assert!(bf16_to_f32(rounding.weight(index, f32::NAN)).is_nan());
            assert!(bf16_to_f32(rounding.weight(index, f32::MAX)).is_finite());
        }
    }
}
