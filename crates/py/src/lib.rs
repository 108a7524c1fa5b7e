//! The Python module `ironhorse._native`: numpy arrays in, `ironhorse::ops` on their memory, numpy arrays out.
//!
//! `array` checks and allocates arrays, `ops` has one function per op. Nothing else of Python is needed: the package's
//! Python files add names, types and documentation.

mod array;
mod error;
mod files;
mod jit;
mod model;
mod nn;
mod ops;
mod torch;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the `ironhorse` command; `args` starts with the name of the program. Returns the exit code.
#[pyfunction]
#[pyo3(signature = (args, /))]
fn command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| ironhorse_cli::main_with(args))
}

/// `ironhorse verify` without printing: `args` are its flags. Returns the report as JSON; a comparison that fails is one.
#[pyfunction]
#[pyo3(signature = (args, /))]
fn verify(py: Python<'_>, args: Vec<OsString>) -> PyResult<String> {
    let done = py.detach(|| ironhorse_cli::verify_with(args));
    done.map_err(|refusal| error::of_refusal(py, &refusal))
}

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(command, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    torch::register(module)?;
    files::register(module)?;
    jit::register(module)?;
    model::register(module)?;
    nn::register(module)?;
    ops::register(module)
}
