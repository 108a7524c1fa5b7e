//! Built-in Python functions of ops. The interpreter hands their arguments over in an array: no tuple, no dictionary.

use super::arguments::Arguments;
use super::call::Function;
use crate::error;
use ironhorse::ops::spec::Op;
use ironhorse::ops::text;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// How the interpreter calls a function: the module, the arguments, how many are positional, and the names of the others.
type Entry = unsafe extern "C" fn(
    *mut ffi::PyObject,
    *const *mut ffi::PyObject,
    ffi::Py_ssize_t,
    *mut ffi::PyObject,
) -> *mut ffi::PyObject;

/// A C function is all that the interpreter calls: each Python function has one of its own, which knows its number.
const ENTRIES: [Entry; 64] = {
    macro_rules! entries {
        ($($eight:literal)*) => { [$(
            entry::<{ $eight * 8 }>, entry::<{ $eight * 8 + 1 }>, entry::<{ $eight * 8 + 2 }>, entry::<{ $eight * 8 + 3 }>,
            entry::<{ $eight * 8 + 4 }>, entry::<{ $eight * 8 + 5 }>, entry::<{ $eight * 8 + 6 }>, entry::<{ $eight * 8 + 7 }>,
        )*] };
    }
    entries!(0 1 2 3 4 5 6 7)
};

/// The functions by number.
static FUNCTIONS: [OnceLock<Function>; ENTRIES.len()] = [const { OnceLock::new() }; ENTRIES.len()];

unsafe extern "C" fn entry<const NUMBER: usize>(
    _module: *mut ffi::PyObject,
    values: *const *mut ffi::PyObject,
    positional: ffi::Py_ssize_t,
    names: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: the interpreter holds its lock and keeps the arguments alive until this returns.
    unsafe { enter(&FUNCTIONS[NUMBER], values, positional, names) }
}

/// Calls a function. An error, or a panic, becomes the exception of this thread.
///
/// # Safety
/// The interpreter's lock is held. `values` are `positional` objects and one for each name of the tuple `names`, which may be
/// null; all are alive until this returns.
unsafe fn enter(
    function: &OnceLock<Function>,
    values: *const *mut ffi::PyObject,
    positional: ffi::Py_ssize_t,
    names: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: guaranteed by the caller.
    let py = unsafe { Python::assume_attached() };
    let done = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: guaranteed by the caller.
        let arguments = unsafe { Arguments::new(py, values, positional, names) };
        function.get().map_or_else(|| Ok(py.None()), |function| function.call(&arguments))
    }));
    let result = done.unwrap_or_else(|panic| {
        Err(error::named(py, "LaunchFailedError", &error::panicked("ironhorse.ops", &*panic)))
    });
    result.map_or_else(
        |error| {
            error.restore(py);
            std::ptr::null_mut()
        },
        Py::into_ptr,
    )
}

/// Makes the function of an op under a name, as a member of `module` that says it is one of `home`.
pub fn make<'py>(
    module: &Bound<'py, PyModule>,
    home: &str,
    number: usize,
    (op, name): (&'static Op, &'static str),
) -> PyResult<Bound<'py, PyAny>> {
    let py = module.py();
    let doc = format!("{name}{}\n--\n\n{}", text::python_signature(op), text::python_doc(op));
    FUNCTIONS[number].get_or_init(|| Function::new(py, op, name));
    // A function lives as long as the process.
    let def = Box::leak(Box::new(ffi::PyMethodDef {
        ml_name: CString::new(name)?.into_raw(),
        ml_meth: ffi::PyMethodDefPointer { PyCFunctionFastWithKeywords: ENTRIES[number] },
        ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
        ml_doc: CString::new(doc)?.into_raw(),
    }));
    let home = pyo3::types::PyString::new(py, home);
    // SAFETY: `def` is never freed, and its flags are those of its function; the result is a new reference, or null with an
    // exception set.
    unsafe {
        let made = ffi::PyCFunction_NewEx(def, module.as_ptr(), home.as_ptr());
        Bound::from_owned_ptr_or_err(py, made)
    }
}
