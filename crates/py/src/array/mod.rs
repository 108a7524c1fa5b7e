//! numpy arrays as pointers that an op may use: checked, made contiguous, kept alive, and known not to overlap.
//!
//! `call` collects the arrays of a call and runs it, `staging` does so on a GPU, `size` has the arguments that are sizes.

mod call;
mod size;
mod staging;

pub use call::{Call, Sharing};
pub use size::{Flag, Size, count_is, product, rows_of};
pub use staging::Where;

use numpy::npyffi;
use numpy::{PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::marker::PhantomData;

/// An element type of numpy: its name, its kind and its number for new arrays.
pub trait Element {
    /// As numpy prints it.
    const NAME: &'static str;
    /// numpy's letter for the family.
    const KIND: u8;
    /// Of new arrays.
    const NUMBER: npyffi::NPY_TYPES;
}

impl Element for f32 {
    const NAME: &'static str = "float32";
    const KIND: u8 = b'f';
    const NUMBER: npyffi::NPY_TYPES = npyffi::NPY_TYPES::NPY_FLOAT;
}

impl Element for i32 {
    const NAME: &'static str = "int32";
    const KIND: u8 = b'i';
    const NUMBER: npyffi::NPY_TYPES = npyffi::NPY_TYPES::NPY_INT;
}

impl Element for u64 {
    const NAME: &'static str = "uint64";
    const KIND: u8 = b'u';
    const NUMBER: npyffi::NPY_TYPES = npyffi::NPY_TYPES::NPY_ULONGLONG;
}

/// A C-contiguous, aligned array of `T` in native byte order, alive as long as this is.
pub struct Array<'py, T> {
    array: Bound<'py, PyUntypedArray>,
    len: usize,
    /// Its number in the call.
    slot: usize,
    element: PhantomData<T>,
}

impl<'py, T> Array<'py, T> {
    /// Its first element.
    pub fn ptr(&self) -> *mut T {
        // SAFETY: the object is an array (it was cast) and alive.
        unsafe { (*self.array.as_array_ptr()).fields.data.cast() }
    }

    /// Its first element, to take along into work without the interpreter.
    pub fn at(&self) -> Pointer<T> {
        Pointer { host: self.ptr(), slot: self.slot }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many elements, as C has it.
    pub fn count(&self) -> i64 {
        self.len as i64
    }

    /// Its sizes.
    pub fn shape(&self) -> &[usize] {
        self.array.shape()
    }

    /// To hand back to Python.
    pub fn object(self) -> Bound<'py, PyAny> {
        self.array.into_any()
    }
}

/// The memory of an [`Array`], which must outlive it; [`Where`] says what an op gets for it.
pub struct Pointer<T> {
    host: *mut T,
    /// The number of the array in its call.
    slot: usize,
}

impl<T> Clone for Pointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pointer<T> {}

// SAFETY: it is used by the one call that holds the array; the thread that runs it is the caller's.
unsafe impl<T> Send for Pointer<T> {}
// SAFETY: as for Send; closures hold it by reference.
unsafe impl<T> Sync for Pointer<T> {}

/// A private copy of indices that were checked: another thread may write the array while the op runs, and an index that
/// changed after it was checked would reach other memory.
pub struct Indices {
    copy: Vec<i32>,
    slot: usize,
}

impl Indices {
    /// What they are.
    pub fn values(&self) -> &[i32] {
        &self.copy
    }

    /// Its first element, to read.
    pub fn at(&self) -> Pointer<i32> {
        Pointer { host: self.copy.as_ptr().cast_mut(), slot: self.slot }
    }
}
