//! The types of numbers that we write.

use std::fmt;

use ironhorse_core::f32_to_f16;

use crate::format::Elem;

/// Numbers that share a scale in q8_0.
pub const BLOCK: usize = 32;
/// A block of q8_0: the scale in f16, and a byte for each number.
const BLOCK_BYTES: usize = 2 + BLOCK;
/// Numbers from here on are rounded to infinity in f16.
const F16_LIMIT: f32 = 65520.0;

/// A type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of 32 numbers: bytes, and one scale in f16.
    Q8_0,
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        })
    }
}

impl GgufType {
    /// The format's number of the type.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// llama.cpp's number of a file whose matrices are of this type.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }

    /// Numbers and bytes of the smallest part.
    const fn unit(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (BLOCK, BLOCK_BYTES),
        }
    }

    /// Rows must be multiples of this many numbers.
    pub(super) fn multiple(self) -> usize {
        self.unit().0
    }

    /// Bytes of so many numbers, a multiple of the unit.
    pub(super) fn bytes(self, count: u64) -> u64 {
        let (numbers, bytes) = self.unit();
        count / numbers as u64 * bytes as u64
    }

    /// The type of plain numbers; `None` for blocks.
    pub(super) fn elem(self) -> Option<Elem> {
        match self {
            Self::F32 => Some(Elem::F32),
            Self::F16 => Some(Elem::F16),
            Self::Bf16 => Some(Elem::BF16),
            Self::Q8_0 => None,
        }
    }

    /// Numbers of this magnitude and beyond become infinite.
    pub(super) fn limit(self) -> f32 {
        match self {
            Self::F32 => f32::INFINITY,
            Self::Bf16 => f32::from_bits(0x7f7f_8000), // halfway between the largest and infinity
            Self::F16 => F16_LIMIT,
            Self::Q8_0 => F16_LIMIT * 127.0,
        }
    }
}

/// Appends blocks of q8_0, bit for bit those of ggml's reference: the scale is the largest magnitude over 127, and every number
/// times the reciprocal of the scale is rounded to the nearest integer, half away from zero.
pub fn quantize(values: &[f32], out: &mut Vec<u8>) {
    for block in values.chunks_exact(BLOCK) {
        let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        out.extend(f32_to_f16(scale).to_le_bytes());
        out.extend(block.iter().map(|value| (value * inverse).round() as i8 as u8));
    }
}
