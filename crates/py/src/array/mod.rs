//! numpy arrays as memory that an op may use: checked, made contiguous, and kept alive.
//!
//! `call` collects the arrays of a call and runs it, `staging` does so on a GPU.

mod call;
mod staging;

pub use call::NumpyCall;
pub use staging::Placed;

use ironhorse::ops::spec::Elem;
use numpy::npyffi::NPY_TYPES;
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use std::ffi::c_void;

/// An element type as numpy has it: its name, its letter for the family, and its number for new arrays.
fn numpy_type(elem: Elem) -> (&'static str, u8, NPY_TYPES) {
    match elem {
        Elem::F32 => ("float32", b'f', NPY_TYPES::NPY_FLOAT),
        Elem::I32 => ("int32", b'i', NPY_TYPES::NPY_INT),
        Elem::U64 => ("uint64", b'u', NPY_TYPES::NPY_ULONGLONG),
    }
}

/// A C-contiguous, aligned array in native byte order, alive as long as this is.
pub struct NumpyArray<'py> {
    array: Bound<'py, PyUntypedArray>,
    len: usize,
    slot: Slot,
}

/// The place of the elements of an array of a call.
#[derive(Clone, Copy)]
pub struct Slot {
    /// The address on the host, of the array or of its private copy.
    host: usize,
    /// The number of the array in its call, where that is on a GPU.
    number: usize,
}

impl Slot {
    /// The address on the host.
    pub fn host(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.host)
    }
}

impl<'py> NumpyArray<'py> {
    /// The address of the first element.
    pub fn data(&self) -> *mut c_void {
        // SAFETY: the object is an array (it was cast) and alive.
        unsafe { (*self.array.as_array_ptr()).fields.data.cast() }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The sizes.
    pub fn shape(&self) -> &[usize] {
        self.array.shape()
    }

    /// The number of rows and their length: the product of all dimensions but the last, and the last.
    pub fn rows(&self) -> (usize, usize) {
        let (&cols, before) = self.shape().split_last().unwrap_or((&1, &[]));
        (before.iter().product(), cols)
    }

    /// The place of the elements.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// The array as a Python object.
    pub fn object(self) -> Bound<'py, PyAny> {
        self.array.into_any()
    }
}

/// A private copy of indices that were checked: another thread may write the array while the op runs, and an index that
/// changed after it was checked would reach other memory.
pub struct Indices {
    /// The indices if they are few: an allocation takes as long as a small op.
    few: [i32; 16],
    /// The indices if they are many.
    many: Vec<i32>,
    len: usize,
}

impl Indices {
    fn of(values: &[i32]) -> Self {
        let mut few = [0; 16];
        let many = match few.get_mut(..values.len()) {
            Some(few) => {
                few.copy_from_slice(values);
                Vec::new()
            }
            None => values.to_vec(),
        };
        Self { few, many, len: values.len() }
    }

    /// The indices, which move with this.
    pub fn values(&self) -> &[i32] {
        self.few.get(..self.len).unwrap_or(&self.many)
    }
}

/// An integer argument. One beyond 64 bits becomes the largest, which is not the size of any array.
pub fn integer(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    match object.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(i64::MAX),
        value => value,
    }
}
