//! What `ironhorse.nn` needs beyond the table of layer ops: products with transposed matrices and those of experts, and
//! routing. Not for users: arguments are positional, and the layers of `ironhorse.nn` have the documentation.
//!
//! Routing decides and moves rows, on the host whatever the device: arrays are there before and after. Products run on the
//! device that is named.

pub mod products;
pub mod routing;

use pyo3::prelude::*;

/// Any Python object.
type Object<'py> = Bound<'py, PyAny>;
/// An array, or an exception.
type Result<'py> = PyResult<Object<'py>>;
