//! One call of an op: its arrays, their checks, and running it.

use super::staging::{self, MOST, Placed, Range};
use super::{Indices, NumpyArray, numpy_type};
use crate::error;
use ironhorse::Device;
use ironhorse::ops::OpError;
use ironhorse::ops::spec::Elem;
use numpy::npyffi::{self, NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_ENSUREARRAY, PY_ARRAY_API};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};

/// Work, in elements touched, from which the interpreter's lock is released: below, taking it back costs more than the work.
const LONG: usize = 16 * 1024;
/// Dimensions that numpy allows.
const MOST_DIMS: usize = 64;

/// One call of an op: collects its arrays, then runs it.
pub struct NumpyCall<'py> {
    py: Python<'py>,
    op: &'static str,
    /// The GPU to compute on; `None` is the host.
    gpu: Option<usize>,
    ranges: [Range; MOST],
    used: usize,
}

impl<'py> NumpyCall<'py> {
    /// Starts a call on the device that the argument names.
    #[inline(always)] // built in its place: a copy of all ranges would cost more than the check of a device
    pub fn new(py: Python<'py>, op: &'static str, device: &str) -> PyResult<Self> {
        let gpu = match device.parse().map_err(|error| error::invalid(py, op, error))? {
            // Arrays of numpy are host memory: copying them to a GPU and back takes longer than computing here.
            Device::Auto | Device::Cpu => None,
            Device::Cuda(index) => Some(index),
        };
        Ok(Self { py, op, gpu, ranges: [Range::NONE; MOST], used: 0 })
    }

    /// The address on the host of the array in a slot, or of its private copy.
    pub fn address(&self, slot: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.ranges[slot].source)
    }

    /// Whether the op runs on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The refusal of an argument.
    #[cold]
    pub fn invalid(&self, text: impl std::fmt::Display) -> PyErr {
        error::invalid(self.py, self.op, text)
    }

    /// An array that the op reads; copied where it is not contiguous.
    pub fn input(&mut self, name: &str, elem: Elem, object: &Bound<'py, PyAny>) -> PyResult<NumpyArray<'py>> {
        let mut array = self.typed(name, elem, object)?;
        if !has(&array, NPY_ARRAY_CARRAY_RO) {
            array = self.copy(&array)?;
        }
        Ok(self.keep(array, elem, Range::NONE))
    }

    /// An f32 array that the op reads.
    pub fn read(&mut self, name: &str, object: &Bound<'py, PyAny>) -> PyResult<NumpyArray<'py>> {
        self.input(name, Elem::F32, object)
    }

    /// An array that the op writes, or reads and writes: used in place or refused.
    pub fn output(
        &mut self,
        name: &str,
        elem: Elem,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<NumpyArray<'py>> {
        let array = self.typed(name, elem, object)?;
        if !has(&array, NPY_ARRAY_CARRAY) {
            return Err(self.unfit(name, &array));
        }
        Ok(self.keep(array, elem, Range { written: true, ..Range::NONE }))
    }

    /// A new array that the op writes.
    pub fn made(&mut self, elem: Elem, shape: &[usize]) -> PyResult<NumpyArray<'py>> {
        let array = self.allocate(elem, shape)?;
        Ok(self.keep(array, elem, Range { written: true, new: true, ..Range::NONE }))
    }

    /// A new array that already holds values, for an op that reads it or may write nothing.
    pub fn filled<T: Copy>(
        &mut self,
        elem: Elem,
        shape: &[usize],
        values: impl Iterator<Item = T>,
    ) -> PyResult<NumpyArray<'py>> {
        debug_assert_eq!(elem.size(), size_of::<T>());
        let array = self.made(elem, shape)?;
        for (i, value) in values.take(array.len).enumerate() {
            // SAFETY: inside an array that was made here, of elements as large as T.
            unsafe { array.data().cast::<T>().add(i).write(value) };
        }
        self.ranges[array.slot].new = false;
        Ok(array)
    }

    /// A private copy of the elements of an i32 input, which the op reads instead of the array.
    pub fn private(&mut self, array: &NumpyArray<'_>) -> Indices {
        let copy = if array.len == 0 {
            Vec::new()
        } else {
            // SAFETY: the array is alive and has this many i32; numpy does not write it while this thread has the lock.
            unsafe { std::slice::from_raw_parts(array.data().cast::<i32>().cast_const(), array.len) }.to_vec()
        };
        self.ranges[array.slot].source = copy.as_ptr().expose_provenance();
        Indices { copy }
    }

    /// [`Self::private`] of exactly `count` indices in 0..below.
    pub fn indices(
        &mut self,
        (name, array): (&str, &NumpyArray<'_>),
        count: usize,
        below: usize,
    ) -> PyResult<Indices> {
        if array.len != count {
            let found = array.shape();
            return Err(self.invalid(format_args!("`{name}` is {found:?}, expected {count} elements")));
        }
        let indices = self.private(array);
        let outside = |&index: &i32| usize::try_from(index).is_ok_and(|index| index < below);
        match indices.copy.iter().position(|index| !outside(index)) {
            None => Ok(indices),
            Some(at) => {
                let index = indices.copy[at];
                let text = format_args!("`{name}[{at}]` is {index}, expected an index in 0..{below}");
                Err(self.invalid(text))
            }
        }
    }

    /// Refuses an array whose shape is another one, unless it is flat with as many elements.
    pub fn expect(&self, name: &str, array: &NumpyArray<'py>, shape: &[usize]) -> PyResult<()> {
        let found = array.shape();
        if found == shape || (found.len() == 1 && found[0] == shape.iter().product::<usize>()) {
            return Ok(());
        }
        Err(self.invalid(format_args!("`{name}` is {found:?}, expected {shape:?}")))
    }

    /// Runs the op, without the interpreter's lock where there is much to do. `work` is about the number of elements it
    /// touches. The arrays must live until this returns.
    pub fn run(&self, work: usize, run: impl FnOnce(&Placed) -> Result<(), OpError> + Send) -> PyResult<()> {
        let ranges = &self.ranges[..self.used];
        let done = match self.gpu {
            None if work < LONG => run(&Placed::host(ranges)),
            None => self.py.detach(|| run(&Placed::host(ranges))),
            Some(gpu) => self.py.detach(|| staging::run(self.op, gpu, ranges, run)),
        };
        done.map_err(|error| error::of_op(self.py, &error))
    }

    fn typed(
        &self,
        name: &str,
        elem: Elem,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let (expected, kind, number) = numpy_type(elem);
        let array = match object.cast_exact::<PyUntypedArray>() {
            Ok(array) => array,
            Err(_) => self.of_subclass(name, expected, object)?,
        };
        let descr = array.dtype();
        // The number of a type says all on most platforms; some have two numbers for the same integers.
        let same = || descr.kind() == kind && descr.itemsize() == elem.size();
        if (descr.num() == number as c_int || same()) && descr.byteorder() == b'=' {
            return Ok(array.clone());
        }
        let found = dtype(&descr);
        let text =
            format_args!("`{name}` is {found}, expected {expected} (x.astype(np.{expected}) converts)");
        Err(self.invalid(text))
    }

    /// An array of a subclass; masked arrays and other objects are refused.
    #[cold]
    fn of_subclass<'a>(
        &self,
        name: &str,
        expected: &str,
        object: &'a Bound<'py, PyAny>,
    ) -> PyResult<&'a Bound<'py, PyUntypedArray>> {
        let Ok(array) = object.cast::<PyUntypedArray>() else {
            let found = object.get_type();
            let found = found.name().map_or_else(|_| "?".into(), |name| name.to_string());
            let text = format_args!("`{name}` is of type {found}, expected a numpy array of {expected}");
            return Err(self.invalid(text));
        };
        let masked = self.py.import("numpy.ma").and_then(|ma| ma.getattr("MaskedArray"));
        if masked.and_then(|masked| object.is_instance(&masked)).unwrap_or(false) {
            let text = format_args!(
                "`{name}` is a masked array, and the ops ignore masks; x.filled(value) gives a plain one"
            );
            return Err(self.invalid(text));
        }
        Ok(array)
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

    fn allocate(&self, elem: Elem, shape: &[usize]) -> PyResult<Bound<'py, PyUntypedArray>> {
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
                numpy_type(elem).2 as c_int,
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

    fn keep(&mut self, array: Bound<'py, PyUntypedArray>, elem: Elem, kind: Range) -> NumpyArray<'py> {
        debug_assert!(self.used < MOST);
        let array = NumpyArray { len: array.len(), array, slot: self.used };
        let (start, bytes) = (array.data().expose_provenance(), array.len * elem.size());
        if let Some(free) = self.ranges.get_mut(self.used) {
            *free = Range { start, source: start, bytes, ..kind };
            self.used += 1;
        }
        array
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
        self.invalid(format_args!("`{name}` {why}, and an output is used in place"))
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
