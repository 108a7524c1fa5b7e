//! Memory as eager ops see it: addresses, element types, and the sizes that several ops share.

use std::ffi::c_void;

/// The floating-point types that eager ops compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Float {
    /// `double`
    F64,
    /// `float`
    F32,
    /// The upper half of a float.
    BF16,
    /// IEEE half precision.
    F16,
}

impl Float {
    /// All floating-point types.
    pub const ALL: [Self; 4] = [Self::F64, Self::F32, Self::BF16, Self::F16];

    /// The size of an element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }

    /// The type of sums, statistics and kept values: f64 for f64, f32 for all others.
    pub const fn acc(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// The name of the type in CUDA kernels.
    pub const fn ctype(self) -> &'static str {
        match self {
            Self::F64 => "double",
            Self::F32 => "float",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// The address of an array and the type of its elements. An output whose field is documented as optional is not
/// written when its address is null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Address of the first element.
    pub at: *mut c_void,
    /// The type of the elements.
    pub float: Float,
}

impl Array {
    /// An f32 array that the op only reads.
    pub fn f32(at: *const f32) -> Self {
        Self { at: at.cast_mut().cast(), float: Float::F32 }
    }

    /// An f32 array that the op writes.
    pub fn f32_mut(at: *mut f32) -> Self {
        Self { at: at.cast(), float: Float::F32 }
    }

    /// An optional array that is not given.
    pub fn none(float: Float) -> Self {
        Self { at: std::ptr::null_mut(), float }
    }

    /// Whether the array is given.
    pub fn is_some(self) -> bool {
        !self.at.is_null()
    }
}

/// A matrix as rows of equal length, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements in a row.
    pub cols: usize,
}

impl Rows {
    /// The number of elements.
    pub fn elements(self) -> usize {
        self.rows * self.cols
    }
}

/// The address of the class indices of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets {
    /// 32-bit indices, as C programs have.
    I32(*const i32),
    /// 64-bit indices, as PyTorch has.
    I64(*const i64),
}

/// Distances in elements between sequences, heads and positions; the elements of one head are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// The distance from one sequence to the next.
    pub batch: usize,
    /// The distance from one head to the next.
    pub head: usize,
    /// The distance from one position to the next.
    pub position: usize,
}

impl Strides {
    /// The strides of a contiguous (batch, heads, len, head_dim).
    pub fn head_major(heads: usize, len: usize, head_dim: usize) -> Self {
        Self { batch: heads * len * head_dim, head: len * head_dim, position: head_dim }
    }

    /// The strides of a contiguous (batch, len, heads, head_dim).
    pub fn position_major(heads: usize, len: usize, head_dim: usize) -> Self {
        Self { batch: heads * len * head_dim, head: head_dim, position: heads * head_dim }
    }
}
