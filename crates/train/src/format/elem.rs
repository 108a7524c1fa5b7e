//! Element types inside files, and their conversion to and from f32.

use ironhorse_core::{bf16_to_f32, f32_to_bf16};

/// The encoding of a number in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    BF16,
    /// IEEE half precision: read only.
    F16,
}

impl Elem {
    /// Bytes of one number.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }
}

/// Converts the little-endian words in `bytes`; `out` must have as many elements.
pub(super) fn decode<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, &word)| *out = convert(word));
}

/// Converts the numbers in `bytes` to f32; `out` must have as many elements.
pub(super) fn widen(elem: Elem, bytes: &[u8], out: &mut [f32]) {
    match elem {
        Elem::F32 => decode(bytes, out, f32::from_le_bytes),
        Elem::BF16 => decode(bytes, out, |word| bf16_to_f32(u16::from_le_bytes(word))),
        Elem::F16 => decode(bytes, out, |word| f16_to_f32(u16::from_le_bytes(word))),
    }
}

/// Appends `values` to `bytes`, little-endian; f16 is rounded to nearest even.
pub(super) fn narrow(elem: Elem, values: &[f32], bytes: &mut Vec<u8>) {
    fn encode<const N: usize>(values: &[f32], bytes: &mut Vec<u8>, convert: impl Fn(f32) -> [u8; N]) {
        values.iter().for_each(|&value| bytes.extend_from_slice(&convert(value)));
    }
    match elem {
        Elem::F32 => encode(values, bytes, f32::to_le_bytes),
        Elem::BF16 => encode(values, bytes, |value| f32_to_bf16(value).to_le_bytes()),
        Elem::F16 => encode(values, bytes, |value| f32_to_f16(value).to_le_bytes()),
    }
}

/// Converts an f16, given by its bits, to f32. The conversion is exact.
fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let mantissa = u32::from(bits) & 0x3ff;
    match exponent {
        // subnormal: mantissa * 2^-24, exact in f32
        0 => f32::from_bits(sign | (mantissa as f32 * 2f32.powi(-24)).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | mantissa << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

/// Rounds to the nearest f16 and returns its bits; ties to even.
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00; // NaN
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and beyond
    }
    if magnitude < 0x3880_0000 {
        // subnormal: in units of 2^-24. Adding 2^-1 (whose ulp is 2^-24) rounds to nearest even.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let round = 0xfff + ((magnitude >> 13) & 1);
    sign | ((magnitude - (112 << 23) + round) >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let wide = f16_to_f32(bits);
            if !wide.is_nan() {
                assert_eq!(f32_to_f16(wide), bits, "{bits:#x} {wide}");
            }
        }
        assert_eq!(f16_to_f32(0x3c00), 1.0);
        assert_eq!(f16_to_f32(0xc000), -2.0);
        assert_eq!(f16_to_f32(0x7bff), 65504.0);
        assert_eq!(f16_to_f32(1), 2f32.powi(-24));
        assert!(f16_to_f32(0x7c01).is_nan());
    }

    #[test]
    fn halves_round_to_nearest_even() {
        assert_eq!(f32_to_f16(65519.0), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00); // a tie with the first beyond goes to infinity
        assert_eq!(f32_to_f16(1.0 + 2f32.powi(-11)), 0x3c00); // a tie goes to the even mantissa
        assert_eq!(f32_to_f16(1.0 + 3.0 * 2f32.powi(-11)), 0x3c02);
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0);
        assert_eq!(f32_to_f16(1.5 * 2f32.powi(-25)), 1);
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert_eq!(f32_to_f16(f32::NAN) & 0x7fff, 0x7e00);
    }
}
