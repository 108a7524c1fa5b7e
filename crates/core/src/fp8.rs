//! Numbers of 8 bits, and the scales that bring tensors into their range.

use std::fmt;

/// A format of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 4 bits of exponent and 3 of fraction: from 2⁻⁹ to 448. It has NaN, and no infinity.
    E4M3,
    /// 5 bits of exponent and 2 of fraction: from 2⁻¹⁶ to 57344. It has NaN and infinity.
    E5M2,
}

impl Fp8 {
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::E4M3, Self::E5M2];

    /// The name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    /// Bits of the fraction.
    const fn fraction(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    /// The exponent of the least normal number.
    const fn least(self) -> i32 {
        match self {
            Self::E4M3 => -6,
            Self::E5M2 => -14,
        }
    }

    /// The exponent of the largest number, which is 1.75 times this power of two in both formats.
    const fn most(self) -> i32 {
        match self {
            Self::E4M3 => 8,
            Self::E5M2 => 15,
        }
    }

    /// The bits of the largest number.
    const fn largest(self) -> u32 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7b,
        }
    }

    /// The largest number.
    pub fn max(self) -> f32 {
        1.75 * power_of_two(self.most())
    }

    /// The largest distance of neighbours relative to the smaller one, among normal numbers.
    pub fn spacing(self) -> f64 {
        1.0 / f64::from(1 << self.fraction())
    }

    /// The bits of the nearest number, ties to even. What is beyond the largest number becomes that number, infinity too;
    /// NaN stays NaN. The instruction of GPUs does the same.
    pub fn encode(self, value: f32) -> u8 {
        let sign = (value.to_bits() >> 24 & 0x80) as u8;
        let bits = value.to_bits() & 0x7fff_ffff;
        if bits > 0x7f80_0000 {
            return sign | 0x7f;
        }
        let dropped = 23 - self.fraction();
        let out = if bits < ((127 + self.least()) as u32) << 23 {
            // Subnormal: adding a number whose last bit counts what the format's last bit counts rounds to it.
            let one = power_of_two(self.least() + dropped as i32);
            (f32::from_bits(bits) + one).to_bits() - one.to_bits()
        } else {
            let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
            let rounded = (bits + half) >> dropped;
            (rounded - (((127 + self.least() - 1) as u32) << self.fraction())).min(self.largest())
        };
        sign | out as u8
    }

    /// The number of these bits. The conversion is exact.
    pub fn decode(self, bits: u8) -> f32 {
        let rest = u32::from(bits & 0x7f);
        let value = match self {
            Self::E4M3 if rest == 0x7f => f32::NAN,
            Self::E5M2 if rest > 0x7c => f32::NAN,
            Self::E5M2 if rest == 0x7c => f32::INFINITY,
            // As if it were an f32 with a smaller exponent; the product puts that right, of subnormal numbers too.
            _ => f32::from_bits(rest << (23 - self.fraction())) * power_of_two(126 + self.least()),
        };
        if bits & 0x80 == 0 { value } else { -value }
    }

    /// The nearest number of the format, see [`Fp8::encode`]; but infinity becomes NaN, so that it cannot pass for the
    /// largest number.
    pub fn quantize(self, value: f32) -> f32 {
        if value.is_finite() { self.decode(self.encode(value)) } else { f32::NAN }
    }

    /// The exponent of the scale of a tensor whose largest element is `amax`: of the largest power of two that keeps
    /// `amax`·2^margin within the format. Where `amax` is 0 or not finite nothing is known, and the exponent is `unknown`.
    pub fn scale_exponent(self, amax: f32, margin: i32, unknown: i32) -> i32 {
        let bits = amax.to_bits() & 0x7fff_ffff;
        let exponent = if bits == 0 || bits >= 0x7f80_0000 {
            unknown
        } else {
            let beyond = i32::from(bits & 0x007f_ffff > 0x0060_0000); // more than 1.75 times its power of two
            self.most() - margin - ((bits >> 23) as i32 - 127) - beyond
        };
        exponent.clamp(-100, 100)
    }
}

impl fmt::Display for Fp8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// 2^k of a normal f32.
pub fn power_of_two(k: i32) -> f32 {
    f32::from_bits(((127 + k.clamp(-126, 127)) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_round_trip() {
        for format in Fp8::ALL {
            for bits in 0..=u8::MAX {
                let value = format.decode(bits);
                if value.is_finite() {
                    assert_eq!(format.encode(value), bits, "{format} {bits:#x} {value}");
                }
            }
        }
        assert_eq!((Fp8::E4M3.max(), Fp8::E5M2.max()), (448.0, 57344.0));
        assert_eq!(Fp8::E4M3.decode(1), 2f32.powi(-9));
        assert_eq!(Fp8::E5M2.decode(1), 2f32.powi(-16));
        assert_eq!(Fp8::E4M3.decode(0x38), 1.0);
        assert_eq!(Fp8::E5M2.decode(0xbc), -1.0);
        assert!(Fp8::E4M3.decode(0xff).is_nan() && Fp8::E5M2.decode(0x7d).is_nan());
        assert_eq!(Fp8::E5M2.decode(0xfc), f32::NEG_INFINITY);
    }

    /// Rounding by definition: the nearest of all numbers, and of two the one with an even last bit.
    #[test]
    fn rounding_is_to_the_nearest_even() {
        for format in Fp8::ALL {
            let numbers: Vec<(u8, f64)> =
                (0..=format.largest() as u8).map(|bits| (bits, f64::from(format.decode(bits)))).collect();
            let mut values: Vec<f32> =
                numbers.windows(2).map(|pair| ((pair[0].1 + pair[1].1) / 2.0) as f32).collect();
            let near: Vec<f32> = values.iter().flat_map(|&x| [x.next_down(), x.next_up()]).collect();
            values.extend(near);
            // up to 10⁶, so that distances are exact in f64
            values.extend((0..4000u32).map(|i| f32::from_bits(0x2f00_0000 + i * 0x1_8235)));
            for value in values {
                let wide = f64::from(value);
                let far = |&&(bits, number): &&(u8, f64)| ((number - wide).abs(), bits & 1);
                let nearest = numbers.iter().min_by(|a, b| far(a).partial_cmp(&far(b)).unwrap()).unwrap().0;
                assert_eq!(format.encode(value), nearest, "{format} {value:e}");
                assert_eq!(format.encode(-value), nearest | 0x80);
            }
        }
    }

    #[test]
    fn what_is_not_finite_becomes_nan() {
        for format in Fp8::ALL {
            assert!(format.quantize(f32::INFINITY).is_nan() && format.quantize(f32::NAN).is_nan());
            assert_eq!(format.quantize(f32::MAX), format.max());
            assert_eq!(format.decode(format.encode(f32::NEG_INFINITY)), -format.max());
            assert_eq!(format.quantize(-0.0).to_bits(), (-0.0f32).to_bits());
        }
    }

    #[test]
    fn a_scale_is_the_largest_power_of_two_that_fits() {
        for format in Fp8::ALL {
            for amax in [1.0, 1.75, 1.750_000_1, 1.999, 2.0, 3.3e-7, 448.0, 449.0, 1e20] {
                let scaled = |k| f64::from(amax) * 2f64.powi(k);
                let k = format.scale_exponent(amax, 0, 5);
                assert!(
                    scaled(k) <= f64::from(format.max()) && scaled(k + 1) > f64::from(format.max()),
                    "{amax}"
                );
                assert_eq!(format.scale_exponent(amax, 3, 5), k - 3);
            }
            assert_eq!(format.scale_exponent(0.0, 2, 5), 5);
            assert_eq!(format.scale_exponent(f32::INFINITY, 2, 5), 5);
            assert_eq!(format.scale_exponent(f32::NAN, 2, 5), 5);
            assert_eq!(format.scale_exponent(1e-45, 0, 5), 100);
        }
    }
}
