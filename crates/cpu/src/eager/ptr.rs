//! Addresses that tasks share.

use super::by_type;
use super::elem::Elem;
use super::real::Real;
use ironhorse_core::eager::{Array, Targets};

/// The first element of an array: who writes which part is settled by the op.
#[derive(Debug)]
pub struct Ptr<T>(*mut T);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}

// SAFETY: an address; following it is unsafe.
unsafe impl<T> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Ptr<T> {}

impl<T> Ptr<T> {
    /// Of an array whose elements are `T`.
    pub fn of(array: Array) -> Self {
        Self(array.at.cast())
    }

    /// Of a slice that outlives all uses.
    pub fn of_slice(x: &mut [T]) -> Self {
        Self(x.as_mut_ptr())
    }

    /// Whether it is not null.
    pub fn wanted(self) -> bool {
        !self.0.is_null()
    }

    /// The address of an element; null stays null.
    pub fn at(self, index: usize) -> Self {
        if self.wanted() { Self(self.0.wrapping_add(index)) } else { self }
    }

    /// Elements to read.
    ///
    /// # Safety
    /// They exist, and while the slice lives nobody writes them.
    pub unsafe fn slice<'a>(self, len: usize) -> &'a [T] {
        if len == 0 {
            return &[];
        }
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(self.0, len) }
    }

    /// Elements to write.
    ///
    /// # Safety
    /// They exist, and while the slice lives nobody else uses them.
    pub unsafe fn slice_mut<'a>(self, len: usize) -> &'a mut [T] {
        if len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0, len) }
    }
}

impl<T: Copy> Ptr<T> {
    /// The element.
    ///
    /// # Safety
    /// It exists and nobody writes it.
    pub unsafe fn get(self) -> T {
        // SAFETY: the caller's.
        unsafe { *self.0 }
    }

    /// Writes the element, if wanted.
    ///
    /// # Safety
    /// It exists, unless null, and nobody else uses it.
    pub unsafe fn set(self, x: T) {
        if self.wanted() {
            // SAFETY: the caller's.
            unsafe { *self.0 = x }
        }
    }
}

/// Element `index` of an array of any type.
///
/// # Safety
/// It exists and nobody writes it.
pub unsafe fn read(array: Array, index: usize) -> f64 {
    // SAFETY: the caller's.
    by_type!(array.float, T => unsafe { Ptr::<T>::of(array).at(index).get() }.load().wide())
}

/// Writes element `index` of an array of any type, if wanted.
///
/// # Safety
/// It exists, unless the array is null, and nobody else uses it.
pub unsafe fn write(array: Array, index: usize, x: f64) {
    // SAFETY: the caller's.
    by_type!(array.float, T => unsafe { Ptr::of(array).at(index).set(T::store(Real::of(x))) })
}

/// NaN in every element of some arrays, where they are wanted: what is computed from nothing.
///
/// # Safety
/// Arrays that are not null have `len` elements, which nobody else uses.
pub unsafe fn fill_nan<const N: usize>(arrays: [Array; N], len: usize) {
    for array in arrays {
        // SAFETY: the caller's.
        (0..len).for_each(|i| unsafe { write(array, i, f64::NAN) });
    }
}

/// Class numbers that tasks share.
#[derive(Clone, Copy)]
pub enum Classes {
    /// `int`
    I32(Ptr<i32>),
    /// `long long`
    I64(Ptr<i64>),
}

impl Classes {
    /// The same, to be shared.
    pub fn of(targets: Targets) -> Self {
        match targets {
            Targets::I32(at) => Self::I32(Ptr(at.cast_mut())),
            Targets::I64(at) => Self::I64(Ptr(at.cast_mut())),
        }
    }

    /// The class of a row.
    ///
    /// # Safety
    /// The row exists, and nobody writes it.
    pub unsafe fn get(self, row: usize) -> i64 {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::I32(at) => at.at(row).get().into(),
                Self::I64(at) => at.at(row).get(),
            }
        }
    }
}
