//! One call of an op: its arrays, their checks, and running it.

use super::staging::{self, Placed, Range};
use super::{Indices, NumpyArray, Slot, numpy_type};
use crate::error;
use ironhorse::Device;
use ironhorse::ops::OpError;
use ironhorse::ops::spec::Elem;
use numpy::npyffi::{self, NPY_ARRAY_CARRAY, NPY_ARRAY_CARRAY_RO, NPY_ARRAY_ENSUREARRAY, PY_ARRAY_API};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use std::ffi::c_int;

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
    /// What is copied to a GPU and back, by the number of the array; empty on the host.
    ranges: Vec<Range>,
}

impl<'py> NumpyCall<'py> {
    /// Starts a call on the device that the argument names.
    pub fn new(py: Python<'py>, op: &'static str, device: &str) -> PyResult<Self> {
        let gpu = match device.parse().map_err(|error| error::invalid(py, op, error))? {
            // Arrays of numpy are host memory: copying them to a GPU and back takes longer than computing here.
            Device::Auto | Device::Cpu => None,
            Device::Cuda(index) => Some(index),
        };
        Ok(Self { gpu, ..Self::on_host(py, op) })
    }

    /// Starts a call on the host.
    pub fn on_host(py: Python<'py>, op: &'static str) -> Self {
        Self { py, op, gpu: None, ranges: Vec::new() }
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

    /// What the op said.
    #[cold]
    pub fn failed(&self, error: &OpError) -> PyErr {
        error::of_op(self.py, error)
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
        if let Some(range) = self.ranges.get_mut(array.slot.number) {
            range.new = false;
        }
        Ok(array)
    }

    /// Makes a private copy of the elements of an i32 input, which the op reads instead of the array: `to` must stay where it
    /// is until the op has run.
    pub fn private(&mut self, array: &mut NumpyArray<'_>, to: &mut Option<Indices>) {
        array.slot.host = to.insert(Self::copied(array)).values().as_ptr().expose_provenance();
        if let Some(range) = self.ranges.get_mut(array.slot.number) {
            range.source = array.slot.host;
        }
    }

    fn copied(array: &NumpyArray<'_>) -> Indices {
        if array.len == 0 {
            return Indices::of(&[]);
        }
        // SAFETY: the array is alive and has this many i32; numpy does not write it while this thread has the lock.
        Indices::of(unsafe { std::slice::from_raw_parts(array.data().cast::<i32>().cast_const(), array.len) })
    }

    /// A private copy of the elements of an i32 input, exactly `count` indices in 0..below.
    pub fn indices(
        &self,
        (name, array): (&str, &NumpyArray<'_>),
        count: usize,
        below: usize,
    ) -> PyResult<Indices> {
        if array.len != count {
            let found = array.shape();
            return Err(self.invalid(format_args!("`{name}` is {found:?}, expected {count} elements")));
        }
        let indices = Self::copied(array);
        let inside = |&index: &i32| usize::try_from(index).is_ok_and(|index| index < below);
        match indices.values().iter().position(|index| !inside(index)) {
            None => Ok(indices),
            Some(at) => {
                let index = indices.values()[at];
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
        let (op, ranges) = (self.op, &self.ranges);
        let done = match self.gpu {
            None if work < LONG => run(&Placed::HOST),
            None => self.py.detach(|| run(&Placed::HOST)),
            Some(gpu) => self.py.detach(|| staging::run(op, gpu, ranges, run)),
        };
        done.map_err(|error| self.failed(&error))
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
        let descr = descr(array);
        // The number of a type says all on most platforms; some have two numbers for the same integers.
        let same = || descr.kind() == kind && descr.itemsize() == elem.size();
        if (descr.num() == number as c_int || same()) && descr.byteorder() == b'=' {
            return Ok(array.clone());
        }
        Err(self.wrong_type(name, expected, array))
    }

    #[cold]
    fn wrong_type(&self, name: &str, expected: &str, array: &Bound<'py, PyUntypedArray>) -> PyErr {
        let found = dtype(&array.dtype());
        let text =
            format_args!("`{name}` is {found}, expected {expected} (x.astype(np.{expected}) converts)");
        self.invalid(text)
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
        if shape.len() > MOST_DIMS {
            return Err(self.invalid(format_args!("arrays have up to {} dimensions", MOST_DIMS)));
        }
        if shape.iter().any(|&side| npyffi::npy_intp::try_from(side).is_err()) {
            return Err(self.invalid("the result is too large"));
        }
        // SAFETY: `shape` has as many entries as said, all of which fit numpy's signed type of the same size, and numpy only
        // reads them; no data is given, so numpy allocates; the result is a new reference or null with an exception set.
        let made = unsafe {
            let made = PY_ARRAY_API.PyArray_New(
                self.py,
                PyUntypedArray::type_object_raw(self.py),
                shape.len() as c_int,
                shape.as_ptr().cast_mut().cast(),
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
        // SAFETY: the object is an array and alive.
        let start = unsafe { (*array.as_array_ptr()).fields.data }.expose_provenance();
        let (len, slot) = (array.len(), Slot { host: start, number: self.ranges.len() });
        if self.gpu.is_some() {
            self.ranges.push(Range { start, source: start, bytes: len * elem.size(), ..kind });
        }
        NumpyArray { array, len, slot }
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

/// The type of the elements, without counting a reference to it.
fn descr<'a, 'py>(array: &'a Bound<'py, PyUntypedArray>) -> Borrowed<'a, 'py, PyArrayDescr> {
    // SAFETY: an array that is alive holds its descriptor, and numpy exchanges it only where someone sets `dtype`.
    unsafe {
        let descr = (*array.as_array_ptr()).fields.descr;
        Borrowed::from_ptr(array.py(), descr.cast()).cast_unchecked()
    }
}

fn has(array: &Bound<'_, PyUntypedArray>, flags: c_int) -> bool {
    // SAFETY: the object is an array and alive.
    unsafe { (*array.as_array_ptr()).fields.flags & flags == flags }
}

/// The element type in words: `float32` in the other byte order prints as `>f4`, which needs saying.
fn dtype(descr: &Bound<'_, PyArrayDescr>) -> String {
    let swapped = if cfg!(target_endian = "little") { b'>' } else { b'<' };
    let order = if descr.byteorder() == swapped { " (byte-swapped)" } else { "" };
    format!("{descr}{order}")
}
