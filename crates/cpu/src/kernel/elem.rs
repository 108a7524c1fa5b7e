//! The types elements have in memory.

use super::real::Real;
use crate::memory::Word;
use ironhorse_core::{bf16_to_f32, f32_to_bf16};

/// An element: f64, f32, [`Bf16`] or [`F16`].
pub trait Elem: Word + Send + Sync + 'static {
    /// The type it is computed in.
    type Acc: Real;
    /// Whether that is the element's own type: then memory can be used in place.
    const IS_ACC: bool;

    /// Exact.
    fn load(self) -> Self::Acc;

    /// Rounded to nearest, ties to even; NaN stays NaN.
    fn store(x: Self::Acc) -> Self;
}

macro_rules! own_acc {
    ($t:ty) => {
        impl Elem for $t {
            type Acc = Self;
            const IS_ACC: bool = true;

            #[inline(always)]
            fn load(self) -> Self {
                self
            }

            #[inline(always)]
            fn store(x: Self) -> Self {
                x
            }
        }
    };
}
own_acc!(f64);
own_acc!(f32);

/// The upper half of a float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);
impl Word for Bf16 {}

impl Elem for Bf16 {
    type Acc = f32;
    const IS_ACC: bool = false;

    #[inline(always)]
    fn load(self) -> f32 {
        bf16_to_f32(self.0)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        Self(f32_to_bf16(x))
    }
}

/// IEEE half precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);
impl Word for F16 {}

impl Elem for F16 {
    type Acc = f32;
    const IS_ACC: bool = false;

    /// Without branches, so that loops become vector code.
    #[inline(always)]
    fn load(self) -> f32 {
        const SUBNORMAL: f32 = f32::from_bits(113 << 23);
        let bits = u32::from(self.0);
        let shifted = (bits & 0x7fff) << 13;
        let exponent = shifted & (0x1f << 23);
        // The exponent's bias grows by 112, that of inf and NaN by as much again.
        let normal = shifted + (112 << 23);
        let normal = if exponent == 0x1f << 23 { normal + (112 << 23) } else { normal };
        // A subnormal is its mantissa on top of 2^-14, less 2^-14.
        let subnormal = f32::from_bits(normal + (1 << 23)) - SUBNORMAL;
        let magnitude = if exponent == 0 { subnormal.to_bits() } else { normal };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn store(x: f32) -> Self {
        let bits = x.to_bits();
        let (sign, magnitude) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        // Below 2^-14: adding 1/2 rounds to a multiple of 2^-24, which then stands in the low bits.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let kept = if magnitude < 113 << 23 { subnormal } else { normal };
        // From 65520 on, halfway between the largest and what would be the next.
        let kept = if magnitude >= 0x477f_f000 { 0x7c00 } else { kept };
        let kept = if magnitude > 0x7f80_0000 { 0x7e00 } else { kept };
        Self((kept | sign) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a half by its definition.
    fn half(bits: u16) -> f64 {
        let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let magnitude = match exponent {
            0 => mantissa * 2f64.powi(-24),
            31 if mantissa == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_half_is_read_and_written() {
        for bits in 0..=u16::MAX {
            let (got, want) = (F16(bits).load(), half(bits));
            assert!(
                f64::from(got).to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                "{bits:#x}"
            );
            let back = F16::store(got);
            assert!(back.0 == bits || (got.is_nan() && half(back.0).is_nan()), "{bits:#x}");
            let bf = Bf16(bits).load();
            let back = Bf16::store(bf);
            assert!(back.0 == bits || (bf.is_nan() && back.load().is_nan()), "{bits:#x}");
        }
    }

    #[test]
    fn rounds_to_nearest_even() {
        // Between two neighbours: below, at and above the middle.
        for bits in 0..0x7bff_u16 {
            let (low, high) = (half(bits), half(bits + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = if bits.is_multiple_of(2) { bits } else { bits + 1 };
            assert_eq!(F16::store(middle).0, even, "{bits:#x}");
            assert_eq!(F16::store(middle.next_down()).0, bits);
            assert_eq!(F16::store(middle.next_up()).0, bits + 1);
            assert_eq!(F16::store(-middle).0, even | 0x8000);
        }
        assert_eq!(F16::store(65519.99).0, 0x7bff);
        assert_eq!(F16::store(65520.0).0, 0x7c00);
        assert_eq!(F16::store(f32::INFINITY).0, 0x7c00);
        assert_eq!(F16::store(1e-30).0, 0);
        for bits in (0..0x7f7f_u16).step_by(3) {
            let (low, high) = (Bf16(bits).load(), Bf16(bits + 1).load());
            let middle = f32::from_bits((low.to_bits() + high.to_bits()) / 2);
            let even = if bits.is_multiple_of(2) { bits } else { bits + 1 };
            assert_eq!(Bf16::store(middle).0, even, "{bits:#x}");
            assert_eq!(Bf16::store(middle.next_down()).0, bits);
            assert_eq!(Bf16::store(middle.next_up()).0, bits + 1);
        }
        assert_eq!(Bf16::store(f32::MAX).0, 0x7f80);
        assert!(Bf16::store(f32::from_bits(0x7f80_0001)).load().is_nan());
    }
}
