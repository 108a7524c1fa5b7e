//! One call of an op: its arrays, their checks, and running it.

use super::staging::{self, Range, Where};
use super::{Array, Element, Indices, product};
use crate::error;
use ironhorse::ops::OpError;
use numpy::npyffi::{self, NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_ENSUREARRAY, PY_ARRAY_API};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::marker::PhantomData;

/// Work, in elements touched, from which the interpreter is let go: below, taking it back costs more than the work.
const LONG: usize = 16 * 1024;
/// Dimensions that numpy allows.
const MOST_DIMS: usize = 64;
/// More arrays than any op has.
pub(super) const MOST: usize = 10;

/// What arrays of a call may share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// An output may be the very memory of an input: each element is read before it is written.
    Same,
    /// Nothing that is written may be anything else.
    Nothing,
}

/// One call of an op: collects its arrays, then runs it.
pub struct Call<'py> {
    py: Python<'py>,
    op: &'static str,
    /// The GPU to compute on; `None` is the host.
    gpu: Option<usize>,
    ranges: [Range; MOST],
    used: usize,
}

impl<'py> Call<'py> {
    /// Starts a call on the device that the argument names.
    pub fn new(py: Python<'py>, op: &'static str, device: &str) -> PyResult<Self> {
        let gpu = match device {
            // Arrays of numpy are memory of the host: to copy them to a GPU and back takes longer than to compute here.
            "auto" | "cpu" => None,
            _ => Some(gpu_of(device).ok_or_else(|| {
                let text = format_args!(
                    "device is {device:?}; there are \"auto\", \"cpu\", \"cuda\" and \"cuda:N\""
                );
                error::invalid(py, op, text)
            })?),
        };
        Ok(Self { py, op, gpu, ranges: [Range::NONE; MOST], used: 0 })
    }

    /// The refusal of an argument.
    #[cold]
    pub fn invalid(&self, text: impl std::fmt::Display) -> PyErr {
        error::invalid(self.py, self.op, text)
    }

    /// An array that the op reads; copied where it is not contiguous.
    pub fn input<T: Element>(
        &mut self,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Array<'py, T>> {
        let mut array = self.typed::<T>(name, object)?;
        if !has(&array, NPY_ARRAY_CARRAY_RO) {
            array = self.copy(&array)?;
        }
        Ok(self.keep(name, array, Range::READ))
    }

    /// An array that the op writes, or reads and writes: used as it is or refused.
    pub fn output<T: Element>(
        &mut self,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Array<'py, T>> {
        let array = self.typed::<T>(name, object)?;
        if !has(&array, NPY_ARRAY_CARRAY) {
            return Err(self.unfit(name, &array));
        }
        Ok(self.keep(name, array, Range::WRITTEN))
    }

    /// The array given for an output, which must have this shape or be flat with as many elements; else a new one.
    pub fn output_or_new<T: Element>(
        &mut self,
        name: &'static str,
        given: Option<&Bound<'py, PyAny>>,
        shape: &[usize],
    ) -> PyResult<Array<'py, T>> {
        match given {
            None => {
                let array = self.allocate::<T>(shape)?;
                Ok(self.keep(name, array, Range::NEW))
            }
            Some(object) => {
                let array = self.output(name, object)?;
                self.expect(name, &array, shape)?;
                Ok(array)
            }
        }
    }

    /// As [`Self::output_or_new`]; a new one is filled, for an op that may write nothing.
    pub fn output_or_filled(
        &mut self,
        name: &'static str,
        given: Option<&Bound<'py, PyAny>>,
        shape: &[usize],
        fill: f32,
    ) -> PyResult<Array<'py, f32>> {
        let array = self.output_or_new::<f32>(name, given, shape)?;
        if given.is_none() {
            for i in 0..array.len() {
                // SAFETY: inside an array that was made here.
                unsafe { array.ptr().add(i).write(fill) };
            }
            self.ranges[array.slot].new = false;
        }
        Ok(array)
    }

    /// Refuses an array whose shape is another one, unless it is flat with as many elements.
    pub fn expect<T>(&self, name: &str, array: &Array<'py, T>, shape: &[usize]) -> PyResult<()> {
        let found = array.shape();
        if found == shape || (found.len() == 1 && Some(found[0]) == product(shape)) {
            return Ok(());
        }
        Err(self.invalid(format_args!("`{name}` is {found:?}, expected {shape:?}")))
    }

    /// A private copy of the elements of an array that was got as an input, which must be `count` indices in 0..below.
    pub fn indices(
        &mut self,
        (name, array): (&str, &Array<'_, i32>),
        count: i64,
        below: i64,
    ) -> PyResult<Indices> {
        if array.count() != count {
            let found = array.shape();
            return Err(self.invalid(format_args!("`{name}` is {found:?}, expected {count} elements")));
        }
        let copy = if count == 0 {
            Vec::new()
        } else {
            // SAFETY: the array is alive and has this many elements; numpy writes none of it while this thread has the lock.
            unsafe { std::slice::from_raw_parts(array.ptr().cast_const(), array.len()) }.to_vec()
        };
        match copy.iter().position(|&index| i64::from(index) < 0 || i64::from(index) >= below) {
            None => {
                self.ranges[array.slot].source = copy.as_ptr() as usize;
                Ok(Indices { copy, slot: array.slot })
            }
            Some(at) => Err(self.invalid(format_args!(
                "`{name}` has {} at position {at}, expected 0 to {}",
                copy[at],
                below - 1
            ))),
        }
    }

    /// Refuses arrays that overlap in a way that the op does not stand; then runs it, without the interpreter where
    /// there is much to do. `work` is the number of elements it touches, about.
    ///
    /// `run` uses pointers of arrays, which live until this returns because the caller holds them, as [`Where`] gives them.
    pub fn run(
        &self,
        sharing: Sharing,
        work: usize,
        run: impl FnOnce(&Where) -> Result<(), OpError> + Send,
    ) -> PyResult<()> {
        self.apart(sharing)?;
        let done = match self.gpu {
            None if work < LONG => run(&Where::HOST),
            None => self.py.detach(|| run(&Where::HOST)),
            Some(gpu) => {
                let (op, ranges) = (self.op, &self.ranges[..self.used]);
                self.py.detach(|| staging::run(op, gpu, ranges, run))
            }
        };
        done.map_err(|error| error::of_op(self.py, &error))
    }

    fn typed<T: Element>(
        &self,
        name: &str,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let Ok(array) = object.cast::<PyUntypedArray>() else {
            let kind = object.get_type();
            let kind = kind.name().map_or_else(|_| "?".into(), |name| name.to_string());
            let text = format_args!("`{name}` is of type {kind}, expected a numpy array of {}", T::NAME);
            return Err(self.invalid(text));
        };
        if !array.is_exact_instance_of::<PyUntypedArray>() && self.is_masked(object) {
            let text = format_args!(
                "`{name}` is a masked array, and the ops know no masks; x.filled(value) gives a plain one"
            );
            return Err(self.invalid(text));
        }
        let descr = array.dtype();
        let fits = descr.kind() == T::KIND && descr.itemsize() == size_of::<T>() && descr.byteorder() == b'=';
        if fits {
            return Ok(array.clone());
        }
        let text =
            format_args!("`{name}` is {}, expected {} (x.astype(np.{1}) converts)", dtype(&descr), T::NAME);
        Err(self.invalid(text))
    }

    #[cold]
    fn is_masked(&self, object: &Bound<'py, PyAny>) -> bool {
        let masked = self.py.import("numpy.ma").and_then(|ma| ma.getattr("MaskedArray"));
        masked.and_then(|masked| object.is_instance(&masked)).unwrap_or(false)
    }

    fn copy(&self, array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyUntypedArray>> {
        let flags = NPY_ARRAY_CARRAY_RO | NPY_ARRAY_ENSUREARRAY;
        // SAFETY: `array` is an array; the result is a new reference or null with an exception set.
        let made = unsafe {
            let made =
                PY_ARRAY_API.PyArray_FromArray(self.py, array.as_array_ptr(), std::ptr::null_mut(), flags);
            Bound::from_owned_ptr_or_err(self.py, made)
        };
        let made = made.map_err(|error| error::of_numpy(self.py, self.op, error))?;
        Ok(made.cast_into::<PyUntypedArray>()?)
    }

    fn allocate<T: Element>(&self, shape: &[usize]) -> PyResult<Bound<'py, PyUntypedArray>> {
        let mut sizes = [0; MOST_DIMS];
        let Some(sizes) = sizes.get_mut(..shape.len()) else {
            return Err(self.invalid(format_args!("arrays have up to {} dimensions", MOST_DIMS)));
        };
        for (to, from) in sizes.iter_mut().zip(shape) {
            *to = npyffi::npy_intp::try_from(*from).map_err(|_| self.invalid("the result is too large"))?;
        }
        // SAFETY: `sizes` has as many entries as said; no data is given, so numpy allocates; the result is a new
        // reference or null with an exception set.
        let made = unsafe {
            let made = PY_ARRAY_API.PyArray_New(
                self.py,
                PyUntypedArray::type_object_raw(self.py),
                sizes.len() as c_int,
                sizes.as_mut_ptr(),
                T::NUMBER as c_int,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
                0,
                std::ptr::null_mut(),
            );
            Bound::from_owned_ptr_or_err(self.py, made)
        };
        let made = made.map_err(|error| error::of_numpy(self.py, self.op, error))?;
        // SAFETY: PyArray_New makes arrays.
        Ok(unsafe { made.cast_into_unchecked::<PyUntypedArray>() })
    }

    fn keep<T>(
        &mut self,
        name: &'static str,
        array: Bound<'py, PyUntypedArray>,
        kind: Range,
    ) -> Array<'py, T> {
        debug_assert!(self.used < MOST);
        let array = Array { len: array.len(), array, slot: self.used, element: PhantomData };
        let (start, bytes) = (array.ptr() as usize, array.len * size_of::<T>());
        if let Some(free) = self.ranges.get_mut(self.used) {
            *free = Range { name, start, source: start, bytes, ..kind };
            self.used += 1;
        }
        array
    }

    fn apart(&self, sharing: Sharing) -> PyResult<()> {
        let ranges = &self.ranges[..self.used];
        for (i, a) in ranges.iter().enumerate() {
            for b in &ranges[i + 1..] {
                let apart = a.bytes == 0
                    || b.bytes == 0
                    || a.start + a.bytes <= b.start
                    || b.start + b.bytes <= a.start
                    || !(a.written || b.written);
                let same = sharing == Sharing::Same
                    && (a.start, a.bytes) == (b.start, b.bytes)
                    && !(a.written && b.written);
                if !(apart || same) {
                    let how = if sharing == Sharing::Same { "overlap in part" } else { "share memory" };
                    return Err(self.invalid(format_args!("`{}` and `{}` {how}", a.name, b.name)));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn unfit(&self, name: &str, array: &Bound<'py, PyUntypedArray>) -> PyErr {
        let why = if !has(array, npyffi::NPY_ARRAY_WRITEABLE) {
            "is read-only"
        } else if !has(array, npyffi::NPY_ARRAY_C_CONTIGUOUS) {
            "is not C-contiguous"
        } else {
            "is not aligned"
        };
        self.invalid(format_args!("`{name}` {why}, and what is written cannot be a copy"))
    }
}

fn has(array: &Bound<'_, PyUntypedArray>, flags: c_int) -> bool {
    // SAFETY: the object is an array and alive.
    unsafe { (*array.as_array_ptr()).fields.flags & flags == flags }
}

/// The element type in words: `float32` in the other byte order prints as `>f4`, which needs saying.
fn dtype(descr: &Bound<'_, numpy::PyArrayDescr>) -> String {
    let swapped = if cfg!(target_endian = "little") { b'>' } else { b'<' };
    let order = if descr.byteorder() == swapped { " (byte-swapped)" } else { "" };
    format!("{descr}{order}")
}

/// The number of the GPU that `"cuda"` or `"cuda:N"` names.
fn gpu_of(device: &str) -> Option<usize> {
    match device.strip_prefix("cuda")? {
        "" => Some(0),
        rest => {
            let digits = rest.strip_prefix(':')?;
            if digits.bytes().all(|digit| digit.is_ascii_digit()) { digits.parse().ok() } else { None }
        }
    }
}
