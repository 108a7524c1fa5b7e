//! numpy arrays as pointers that an op may use: checked, made contiguous, kept alive, and known not to overlap.

use crate::error;
use ironhorse::ops::OpError;
use numpy::npyffi::{self, NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_ENSUREARRAY, PY_ARRAY_API};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::PyTypeInfo;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::marker::PhantomData;

/// Work, in elements touched, from which the interpreter is let go: below, taking it back costs more than the work.
const LONG: usize = 16 * 1024;
/// Dimensions that numpy allows.
const MOST_DIMS: usize = 64;
/// More arrays than any op has.
const MOST: usize = 8;

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
        Pointer(self.ptr())
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

/// The memory of an [`Array`], which must outlive it.
pub struct Pointer<T>(*mut T);

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

impl<T> Pointer<T> {
    /// To read.
    pub fn read(self) -> *const T {
        self.0
    }

    /// To write; only of arrays got as outputs.
    pub fn write(self) -> *mut T {
        self.0
    }
}

/// Memory of an array in a call.
#[derive(Clone, Copy)]
struct Range {
    name: &'static str,
    start: usize,
    bytes: usize,
    written: bool,
}

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
    ranges: [Range; MOST],
    used: usize,
}

impl<'py> Call<'py> {
    /// Starts a call on the device that the argument names.
    pub fn new(py: Python<'py>, op: &'static str, device: &str) -> PyResult<Self> {
        match device {
            "auto" | "cpu" => {}
            "cuda" => {
                let text =
                    "device=\"cuda\" does not take numpy arrays in this version; use \"auto\" or \"cpu\"";
                return Err(error::not_available(py, op, text));
            }
            _ => {
                let text = format_args!("device is {device:?}; there are \"auto\", \"cpu\" and \"cuda\"");
                return Err(error::invalid(py, op, text));
            }
        }
        let none = Range { name: "", start: 0, bytes: 0, written: false };
        Ok(Self { py, op, ranges: [none; MOST], used: 0 })
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
        Ok(self.keep(name, array, false))
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
        Ok(self.keep(name, array, true))
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
                Ok(self.keep(name, array, true))
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

    /// Refuses arrays that overlap in a way that the op does not stand; then runs it, without the interpreter where
    /// there is much to do. `work` is the number of elements it touches, about.
    ///
    /// `run` uses pointers of arrays, which live until this returns because the caller holds them.
    pub fn run(
        &self,
        sharing: Sharing,
        work: usize,
        run: impl FnOnce() -> Result<(), OpError> + Send,
    ) -> PyResult<()> {
        self.apart(sharing)?;
        let done = if work < LONG { run() } else { self.py.detach(run) };
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
        let descr = array.dtype();
        let fits = descr.kind() == T::KIND && descr.itemsize() == size_of::<T>() && descr.byteorder() == b'=';
        if fits {
            return Ok(array.clone());
        }
        let text =
            format_args!("`{name}` is {}, expected {} (x.astype(np.{1}) converts)", dtype(&descr), T::NAME);
        Err(self.invalid(text))
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
        written: bool,
    ) -> Array<'py, T> {
        let array = Array { len: array.len(), array, element: PhantomData };
        let range = Range { name, start: array.ptr() as usize, bytes: array.len * size_of::<T>(), written };
        debug_assert!(self.used < MOST);
        if let Some(free) = self.ranges.get_mut(self.used) {
            *free = range;
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

/// Rows and columns: those given, or the last dimension and all before it.
pub fn rows_of<T>(
    call: &Call<'_>,
    (name, array): (&str, &Array<'_, T>),
    (rows, cols): (Option<Size>, Option<Size>),
) -> PyResult<(i64, i64)> {
    let (rows, cols) = match (rows, cols) {
        (None, None) => {
            let Some((&cols, before)) = array.shape().split_last() else {
                return Err(call.invalid(format_args!("`{name}` has no dimensions, expected rows")));
            };
            (before.iter().product::<usize>() as i64, cols as i64)
        }
        (Some(Size(rows)), Some(Size(cols))) => (rows, cols),
        _ => return Err(call.invalid("give both sizes, or none of them")),
    };
    if rows < 0 || cols < 0 || rows.checked_mul(cols) != Some(array.count()) {
        let found = array.shape();
        return Err(call.invalid(format_args!("`{name}` is {found:?}, which is not {rows} rows of {cols}")));
    }
    Ok((rows, cols))
}

/// Refuses an array that has not as many elements as these sizes, or sizes below 0.
pub fn count_is<T>(call: &Call<'_>, (name, array): (&str, &Array<'_, T>), sizes: &[i64]) -> PyResult<()> {
    let count = sizes.iter().try_fold(1_i64, |count, &size| count.checked_mul(size).filter(|_| size >= 0));
    if count == Some(array.count()) {
        return Ok(());
    }
    let found = array.shape();
    Err(call.invalid(format_args!("`{name}` is {found:?}, expected the elements of {sizes:?}")))
}

/// An integer argument. One beyond 64 bits becomes the largest, which no array has.
#[derive(Clone, Copy)]
pub struct Size(pub i64);

impl<'a, 'py> FromPyObject<'a, 'py> for Size {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(Self(i64::MAX)),
            value => value.map(Self),
        }
    }
}

/// A flag: `True`, `False`, or a number as C programs have it.
#[derive(Clone, Copy)]
pub struct Flag(pub bool);

impl<'a, 'py> FromPyObject<'a, 'py> for Flag {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.is_truthy().map(Self)
    }
}

/// The product of sizes, if it can be one.
pub fn product(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
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
