//! Tensor maps: matrices as the TMA of Hopper copies them.

use super::Device;
use crate::Result;
use crate::ffi::driver::call;
use cudarc::driver::sys::{
    CUtensorMapDataType_enum::{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8},
    CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
};
use std::ffi::c_void;

/// Bytes of a row of the box that one TMA copy moves.
const BOX_BYTES: usize = 128;

/// `CUtensorMap`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Raw([u64; 16]);

/// A row-major matrix of bf16 or of 8-bit numbers on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    /// A multiple of 16.
    pub at: u64,
    pub rows: usize,
    /// A multiple of 16 bytes.
    pub cols: usize,
    /// Bytes of an element, 2 or 1.
    pub bytes: usize,
}

impl Matrix {
    /// The tensor map for copies of `box_rows` rows by 128 bytes into swizzled rows of 128 bytes, as the words of a kernel
    /// argument.
    pub fn tensor_map(&self, device: &Device, box_rows: u32) -> Result<[u32; 32]> {
        let mut raw = Raw([0; 16]);
        let (sizes, strides) = ([self.cols as u64, self.rows as u64], [(self.bytes * self.cols) as u64]);
        let (boxes, steps) = ([(BOX_BYTES / self.bytes) as u32, box_rows], [1_u32; 2]);
        let elements =
            if self.bytes == 1 { CU_TENSOR_MAP_DATA_TYPE_UINT8 } else { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
        call!(
            device,
            cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut raw).cast::<c_void>(),
                elements as u32,
                2,
                std::ptr::without_provenance_mut::<c_void>(self.at as usize),
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                0,
                CU_TENSOR_MAP_SWIZZLE_128B as u32,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B as u32,
                0,
            )
        )?;
        let mut words = [0; 32];
        for (two, word) in words.chunks_exact_mut(2).zip(raw.0) {
            two.copy_from_slice(&[word as u32, (word >> 32) as u32]);
        }
        Ok(words)
    }
}
