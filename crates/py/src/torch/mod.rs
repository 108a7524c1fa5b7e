//! Operators for PyTorch: the eager ops on torch's tensors, registered with libtorch's stable C interface, so that
//! neither torch's headers nor a C++ compiler are needed.
//!
//! `abi` finds that interface, `handle` is a tensor of it, `kernel` an op as torch calls it. Where the interface is too old
//! (torch before 2.10) Python registers the same ops and calls them with `object`s. The ops: `elementwise`, `rows`,
//! `norms`, `loss`, `heads`, on what `call` and `tensor` have in common. Gradients, shapes for `torch.compile` and names for people
//! are in python/ironhorse/torch.

mod abi;
mod call;
mod elementwise;
mod handle;
mod heads;
mod kernel;
mod loss;
mod norms;
mod object;
mod rows;
mod tensor;

use crate::error;
use kernel::Entry;
use pyo3::exceptions::{PyImportError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::CString;

fn entries() -> impl Iterator<Item = &'static Entry> {
    [elementwise::OPS, rows::OPS, norms::OPS, loss::OPS, heads::OPS].into_iter().flatten()
}

/// (name, schema) of every op, as torch.library wants them.
#[pyfunction]
pub fn torch_ops() -> Vec<(String, String)> {
    let schema = |entry: &'static Entry| {
        entry.names().into_iter().map(|name| {
            let schema = format!("{name}{}", entry.signature);
            (name, schema)
        })
    };
    entries().flat_map(schema).collect()
}

/// Registers every op with the libtorch of this process, for CPU and CUDA. Must be called once, after `import torch`.
#[pyfunction]
pub fn torch_register() -> PyResult<()> {
    let torch = abi::Torch::open().map_err(PyImportError::new_err)?;
    let mut ops = Vec::new();
    for entry in entries() {
        for name in entry.names() {
            let schema = CString::new(format!("{name}{}", entry.signature))?;
            ops.push((schema, CString::new(name)?, entry.kernel));
        }
    }
    torch.define(c"ironhorse", &ops).map_err(PyImportError::new_err)
}

/// Runs an op of the list on Python's tensors.
#[pyfunction]
#[pyo3(signature = (name, args, /))]
pub fn torch_call(py: Python<'_>, name: &str, args: &Bound<'_, PyTuple>) -> PyResult<Vec<Py<PyAny>>> {
    let Some(entry) = entries().find(|entry| entry.names().iter().any(|known| known == name)) else {
        return Err(PyKeyError::new_err(name.to_owned()));
    };
    (entry.call)(args).map_err(|error| error::of_op(py, &error))
}
