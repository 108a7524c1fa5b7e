//! What `ironhorse.nn` needs beyond the table of layer ops: products with transposed matrices and those of experts, and
//! routing. Not for users: arguments are positional, and the layers of `ironhorse.nn` have the documentation.
//!
//! Routing decides and moves rows, on the host whatever the device: arrays are there before and after. Products run on the
//! device that is named.

mod products;
mod routing;

use pyo3::prelude::*;

/// Any Python object.
type Object<'py> = Bound<'py, PyAny>;
/// An array, or an exception.
type Result<'py> = PyResult<Object<'py>>;

/// Adds all functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! functions {
        ($($path:path),* $(,)?) => { $( module.add_function(wrap_pyfunction!($path, module)?)?; )* };
    }
    functions!(
        products::nn_grouped,
        products::nn_grouped_input,
        products::nn_grouped_weight,
        products::nn_matmul,
        routing::nn_combine,
        routing::nn_combine_bwd,
        routing::nn_permute,
        routing::nn_permute_bwd,
        routing::nn_route,
        routing::nn_route_bwd,
    );
    Ok(())
}
