//! The types that elements have in memory, and those that ops compute in.

use crate::math;
use crate::memory::Word;
use ironhorse_core::{bf16_to_f32, f32_to_bf16};
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// An element: f64, f32, [`Bf16`] or [`F16`].
pub trait Elem: Word + Send + Sync + 'static {
    /// The type it is computed in.
    type Acc: Real;
    /// Whether that is the element's own type: then memory can be used in place.
    const IS_ACC: bool;

    /// The number in the type it is computed in, exactly.
    fn load(self) -> Self::Acc;

    /// The nearest element, ties to even; NaN stays NaN.
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

    /// The number as an f32, without branches, so that loops become vector code.
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
        // Below 2^-14: adding 1/2 rounds to a multiple of 2^-24, which is then in the low bits.
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

/// f64 or f32.
pub trait Real:
    Elem<Acc = Self>
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// -inf
    const NEG_INFINITY: Self;
    /// Whether this is f32.
    const IS_F32: bool;
    /// These numbers as floats, where they are.
    fn floats(x: &[Self]) -> Option<&[f32]>;
    /// The same, to write.
    fn floats_mut(x: &mut [Self]) -> Option<&mut [f32]>;

    /// The nearest.
    fn of(x: f64) -> Self;

    /// The number as an f64, exactly.
    fn wide(self) -> f64;

    /// a b + c, with one rounding where `FMA`.
    fn fma<const FMA: bool>(a: Self, b: Self, c: Self) -> Self;

    /// e^x
    fn exp<const FMA: bool>(self) -> Self;

    /// e^x, but 0 where an f32 would be below 2^-124: for sums to which such a term adds nothing. Faster than `exp` in f32.
    fn exp_flush<const FMA: bool>(self) -> Self;

    /// e^x as `exp_flush` has it, for an x from -86.6 to 88; below it falls to 0 at -87.7, above it is unspecified. Faster still.
    fn exp_low<const FMA: bool>(self) -> Self;

    /// 2^x, but 0 where an f32 would be below 2^-126: the fastest of all.
    fn exp2_flush<const FMA: bool>(self) -> Self;

    /// √x
    fn sqrt(self) -> Self;

    /// ln x
    fn ln(self) -> Self;

    /// (1 + erf(x / √2)) / 2, accurate relative to itself also far below 0, and e^(-x² / 2).
    fn normal<const FMA: bool>(self) -> [Self; 2];
}

/// What f32 and f64 have in common.
macro_rules! same_in_both {
    () => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = Self::NEG_INFINITY;

        #[inline(always)]
        fn of(x: f64) -> Self {
            x as Self
        }

        #[inline(always)]
        fn wide(self) -> f64 {
            self.into()
        }

        #[inline(always)]
        fn fma<const FMA: bool>(a: Self, b: Self, c: Self) -> Self {
            if FMA { a.mul_add(b, c) } else { a * b + c }
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            Self::sqrt(self)
        }

        #[inline(always)]
        fn ln(self) -> Self {
            Self::ln(self)
        }
    };
}

impl Real for f32 {
    same_in_both!();
    const IS_F32: bool = true;

    fn floats(x: &[Self]) -> Option<&[f32]> {
        Some(x)
    }

    fn floats_mut(x: &mut [Self]) -> Option<&mut [f32]> {
        Some(x)
    }

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> Self {
        math::exp_f32::<FMA>(self)
    }

    #[inline(always)]
    fn exp_flush<const FMA: bool>(self) -> Self {
        math::exp_flush::<FMA>(self)
    }

    #[inline(always)]
    fn exp_low<const FMA: bool>(self) -> Self {
        math::exp_low::<FMA>(self)
    }

    #[inline(always)]
    fn exp2_flush<const FMA: bool>(self) -> Self {
        math::exp2_flush::<FMA>(self)
    }

    #[inline(always)]
    fn normal<const FMA: bool>(self) -> [Self; 2] {
        // Beyond 20 it is 0 or 1; the limit keeps inf - inf out, and NaN in.
        let a = if self.abs() > 20.0 { 20.0 } else { self.abs() };
        let z = a * std::f32::consts::FRAC_1_SQRT_2;
        let t = 1.0 / math::fma::<FMA>(z, 0.5, 1.0);
        // erfc z = t e^(p(t) - z²) to 1.2e-7 (Press et al., Numerical Recipes, erfcc).
        let p = math::fma::<FMA>(t, 0.170_872_77, -0.822_152_2);
        let p = math::fma::<FMA>(t, p, 1.488_515_9);
        let p = math::fma::<FMA>(t, p, -1.135_204);
        let p = math::fma::<FMA>(t, p, 0.278_868_07);
        let p = math::fma::<FMA>(t, p, -0.186_288_06);
        let p = math::fma::<FMA>(t, p, 0.096_784_18);
        let p = math::fma::<FMA>(t, p, 0.374_091_96);
        let p = math::fma::<FMA>(t, p, 1.000_023_7);
        let p = math::fma::<FMA>(t, p, -1.265_512_2);
        // e^(-a²/2) apart, with what squaring loses: the error of an exponent is multiplied by the exponent.
        let square = a * a;
        let lost = if FMA { a.mul_add(a, -square) } else { 0.0 };
        let tail = math::exp_f32::<FMA>(-0.5 * square) * (1.0 - 0.5 * lost);
        let half = 0.5 * t * math::exp_f32::<FMA>(p) * tail;
        [if self > 0.0 { 1.0 - half } else { half }, tail]
    }
}

impl Real for f64 {
    same_in_both!();
    const IS_F32: bool = false;

    fn floats(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn floats_mut(_: &mut [Self]) -> Option<&mut [f32]> {
        None
    }

    #[inline(always)]
    fn exp<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn exp_flush<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn exp_low<const FMA: bool>(self) -> Self {
        Self::exp(self)
    }

    #[inline(always)]
    fn exp2_flush<const FMA: bool>(self) -> Self {
        Self::exp2(self)
    }

    #[inline(always)]
    fn normal<const FMA: bool>(self) -> [Self; 2] {
        [0.5 * libm::erfc(-self * std::f64::consts::FRAC_1_SQRT_2), (-0.5 * self * self).exp()]
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
