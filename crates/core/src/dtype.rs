//! Element types and the bf16 conversion.

use crate::Fp8;
use std::fmt;

/// The element type of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    BF16,
    /// Signed 32-bit integer: tokens, targets.
    I32,
    /// Signed 16-bit integer: the residual of a bf16 weight, see [`split_master`](crate::split_master).
    I16,
    /// Numbers of 8 bits: operands of products.
    F8(Fp8),
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::I16 => 2,
            Self::F8(_) => 1,
        }
    }

    /// The name used in files, flags and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::F8(format) => format.name(),
        }
    }
}

/// What updates the matrices of a model's blocks; AdamW updates all other parameters in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Optimizer {
    /// AdamW: two moments for each weight.
    #[default]
    AdamW,
    /// Muon: one moment for each weight; steps are orthogonalised ([`MuonMomentum`](crate::op::MuonMomentum)).
    Muon,
}

impl Optimizer {
    /// Every optimizer.
    pub const ALL: [Self; 2] = [Self::AdamW, Self::Muon];

    /// The name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon => "muon",
        }
    }

    /// The optimizer of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|optimizer| optimizer.name() == name)
    }
}

/// How the state of training is kept: the element types of weights, gradients, master weights and moments, and which
/// optimizer needs them. Activations have the type of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// Weights and activations. With bf16 the update works on f32 master weights.
    pub weights: DType,
    /// Gradients of the weights.
    pub grads: DType,
    /// Master weights of bf16 weights: f32, or i16 for the residual of [`split_master`](crate::split_master).
    pub master: DType,
    /// The moments: f32, or bf16 with stochastic rounding (with bf16 weights only).
    pub moments: DType,
    /// The optimizer: with Muon, the matrices of the blocks have no second moments.
    pub optimizer: Optimizer,
    /// The linear layers that training multiplies in 8 bits; `None`: in the type of the weights.
    pub fp8: Option<Fp8Products>,
}

/// Which products of training are of 8-bit numbers. Weights and activations are e4m3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Products {
    /// Whether the products of the output head are of 8-bit numbers too, not only those of the blocks.
    pub head: bool,
    /// Whether the products of experts are of 8-bit numbers too, not only those of dense layers.
    pub experts: bool,
    /// The format of gradients.
    pub gradients: Fp8,
    /// Where the scales of activations and gradients come from.
    pub scales: Fp8Scales,
}

/// Where the scales of activations and gradients in 8 bits come from. Those of weights are always current.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// The largest elements of earlier steps ([`ScaleUpdate`](crate::op::ScaleUpdate)). A step of several micro-steps, or of several
    /// ranks, has current scales all the same.
    #[default]
    Delayed,
    /// The largest element of the tensor itself, which costs another pass over it.
    Current,
}

impl Precision {
    /// Everything in f32.
    pub const F32: Self = Self {
        weights: DType::F32,
        grads: DType::F32,
        master: DType::F32,
        moments: DType::F32,
        optimizer: Optimizer::AdamW,
        fp8: None,
    };
    /// bf16 except for sums, statistics, moments and master weights.
    pub const BF16: Self = Self { weights: DType::BF16, grads: DType::BF16, ..Self::F32 };
    /// bf16 with f32 gradients, for steps of several micro-steps: bf16 sums would lose small contributions.
    pub const BF16_F32_GRADS: Self = Self { weights: DType::BF16, ..Self::F32 };

    /// This precision with a 16-bit residual for each bf16 weight instead of an f32 master.
    #[must_use]
    pub const fn with_residual(self) -> Self {
        Self { master: DType::I16, ..self }
    }

    /// This precision with bf16 moments.
    #[must_use]
    pub const fn with_bf16_moments(self) -> Self {
        Self { moments: DType::BF16, ..self }
    }

    /// This precision with another optimizer.
    #[must_use]
    pub const fn with_optimizer(self, optimizer: Optimizer) -> Self {
        Self { optimizer, ..self }
    }

    /// This precision with these products of 8-bit numbers.
    #[must_use]
    pub const fn with_fp8(self, products: Fp8Products) -> Self {
        Self { fp8: Some(products), ..self }
    }

    /// Whether the update needs master weights.
    pub fn has_master(self) -> bool {
        self.weights != DType::F32
    }

    /// Whether the master weights are stored as bf16 weights and 16-bit residuals.
    pub fn has_residual(self) -> bool {
        self.has_master() && self.master == DType::I16
    }

    /// The element type in a pool laid out like the parameters.
    pub fn of(self, pool: crate::Pool) -> DType {
        match pool {
            crate::Pool::Params | crate::Pool::Frozen => self.weights,
            crate::Pool::Grads => self.grads,
            crate::Pool::Master => self.master,
            crate::Pool::Moment1 | crate::Pool::Moment2 => self.moments,
            _ => DType::F32,
        }
    }
}

impl Default for Precision {
    fn default() -> Self {
        Self::F32
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Converts a bf16, given by its bits, to f32. The conversion is exact.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds to the nearest bf16 and returns its bits; ties to even, NaN stays NaN.
#[inline(always)]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // Without branches, so that loops become vector code.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let kept = if value.is_nan() { bits | 0x0040_0000 } else { rounded };
    (kept >> 16) as u16
}

/// Converts an f16, given by its bits, to f32. The conversion is exact.
pub fn f16_to_f32(bits: u16) -> f32 {
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
pub fn f32_to_f16(value: f32) -> u16 {
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

/// What the operands of products of f32 are rounded to before they are multiplied. Sums are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operands {
    /// Operands stay f32.
    #[default]
    F32,
    /// 10 bits after the point, by tensor cores.
    Tf32,
    /// The nearest bf16, by the CPU engine.
    Bf16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80); // a tie goes to the even mantissa
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(f32_to_bf16(f32::INFINITY), 0x7f80);
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80); // beyond the largest bf16
    }

    #[test]
    fn every_bf16_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let wide = bf16_to_f32(bits);
            if !wide.is_nan() {
                assert_eq!(f32_to_bf16(wide), bits);
            }
        }
    }

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
