//! Descriptions of matrices for the bulk tensor copy engine of Hopper.

use super::call;
use crate::Result;
use crate::device::Device;
use std::ffi::c_void;
use std::rc::Rc;

/// `CU_TENSOR_MAP_DATA_TYPE_BFLOAT16`
const BFLOAT16: u32 = 9;
/// `CU_TENSOR_MAP_SWIZZLE_128B`
const SWIZZLE_128: u32 = 3;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`
const PROMOTE_256: u32 = 3;

/// Elements of bf16 in a row of a box: 128 bytes.
const BOX_COLUMNS: u32 = 64;

/// `CUtensorMap`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Raw([u64; 16]);

/// A row-major matrix of bf16 on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    /// A multiple of 16.
    pub at: u64,
    pub rows: usize,
    /// A multiple of 8.
    pub cols: usize,
}

impl Matrix {
    /// The map that copies boxes of `box_rows` rows of 64 elements into swizzled rows of 128 bytes, as the words of a kernel
    /// argument.
    pub fn tensor_map(&self, device: &Rc<Device>, box_rows: u32) -> Result<[u32; 32]> {
        let mut raw = Raw([0; 16]);
        let (sizes, strides) = ([self.cols as u64, self.rows as u64], [2 * self.cols as u64]);
        let (boxes, steps) = ([BOX_COLUMNS, box_rows], [1_u32; 2]);
        call!(
            device,
            cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut raw).cast::<c_void>(),
                BFLOAT16,
                2,
                std::ptr::without_provenance_mut::<c_void>(self.at as usize),
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128,
                PROMOTE_256,
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
