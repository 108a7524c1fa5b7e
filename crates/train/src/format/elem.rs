//! Element types inside files, and their conversion to and from f32.

use ironhorse_core::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

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
