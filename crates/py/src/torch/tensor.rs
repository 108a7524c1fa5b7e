//! The interface of a tensor that ops use, held by libtorch's C interface ([`super::handle`]) or by Python ([`super::object`]).

use ironhorse::core::eager::{Array, Float};
use ironhorse::ops::{Code, OpError, Result};
use std::ffi::c_void;
use std::fmt::{self, Display};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// A type that ops compute on.
    Float(Float),
    /// `torch.int64`
    I64,
    /// `torch.int32`
    I32,
    /// `torch.uint8`
    U8,
    /// Any other type.
    Other,
}

/// All types that are known, in the order of `Torch::dtypes`.
pub const DTYPES: [Dtype; 7] = [
    Dtype::Float(Float::F64),
    Dtype::Float(Float::F32),
    Dtype::Float(Float::BF16),
    Dtype::Float(Float::F16),
    Dtype::I64,
    Dtype::I32,
    Dtype::U8,
];

impl Dtype {
    /// Its name in torch.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(Float::F64) => "float64",
            Self::Float(Float::F32) => "float32",
            Self::Float(Float::BF16) => "bfloat16",
            Self::Float(Float::F16) => "float16",
            Self::I64 => "int64",
            Self::I32 => "int32",
            Self::U8 => "uint8",
            Self::Other => "another type",
        }
    }
}

impl Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The device that a tensor is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Memory of the host.
    Cpu,
    /// Memory of the GPU of this index.
    Cuda(i32),
    /// Any other device.
    Other,
}

impl Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Other => f.write_str("another device"),
        }
    }
}

/// A tensor, kept alive by the value that implements this.
pub trait Tensor: Sized {
    /// The first element.
    fn data(&self) -> *mut c_void;
    /// The type.
    fn dtype(&self) -> Dtype;
    /// The device.
    fn device(&self) -> Device;
    /// The sizes.
    fn sizes(&self) -> &[i64];
    /// Strides in elements.
    fn strides(&self) -> &[i64];

    /// A new tensor with memory of torch's allocator.
    fn empty(sizes: &[i64], strides: &[i64], dtype: Dtype, device: Device) -> Result<Self>;
    /// Copies (and converts) another tensor of the same sizes into this one.
    fn copy_from(&self, other: &Self) -> Result;
    /// torch's current stream of a GPU.
    fn stream(index: i32) -> Result<*mut c_void>;
    /// Runs long work, without the interpreter's lock where this thread has it.
    fn detached<R>(work: impl FnOnce() -> R) -> R;

    /// The number of elements.
    fn elements(&self) -> usize {
        self.sizes().iter().product::<i64>() as usize
    }

    /// The array that an op gets.
    fn array(&self, float: Float) -> Array {
        Array { at: self.data(), float }
    }
}

/// The error of an invalid argument, in a sentence.
pub fn refuse<T>(op: &str, name: &str, found: impl Display, expected: impl Display) -> Result<T> {
    invalid(format!("{op}: `{name}` is {found}, expected {expected}"))
}

/// An invalid argument.
#[cold]
pub fn invalid<T>(text: String) -> Result<T> {
    Err(OpError { code: Code::InvalidValue, text })
}

/// A failure that torch reports.
#[cold]
pub fn failed(text: String) -> OpError {
    let code = if text.contains("out of memory") { Code::OutOfMemory } else { Code::LaunchFailed };
    OpError { code, text }
}

/// The strides of a contiguous tensor, as torch computes them: a size of 0 counts as 1.
pub fn contiguous(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for i in (1..sizes.len()).rev() {
        strides[i - 1] = strides[i] * sizes[i].max(1);
    }
    strides
}

/// Whether the strides are those that `expected` gives. The stride of a dimension of size 1 does not matter, nor does any
/// stride of a tensor without elements.
pub fn has_strides(sizes: &[i64], strides: &[i64], expected: impl Fn(usize) -> i64) -> bool {
    sizes.contains(&0) || (0..sizes.len()).all(|i| sizes[i] == 1 || strides[i] == expected(i))
}

/// Whether the tensor is contiguous: elements in the order of their indices, without gaps.
pub fn is_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    if sizes.contains(&0) {
        return true;
    }
    let mut expected = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let good = size == 1 || stride == expected;
        expected *= size;
        good
    })
}
