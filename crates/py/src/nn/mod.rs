//! What `ironhorse.nn` needs beyond `ironhorse.ops`: the backward of layers, products with transposed matrices and those of
//! experts, routing. Not for users: arguments are positional, and the layers of `ironhorse.nn` have the documentation.
//!
//! Routing decides and moves rows, on the host whatever the device: arrays are there before and after. All else runs on the
//! device that is named.

mod heads;
mod products;
mod routing;
mod rows;

use pyo3::prelude::*;

/// Any Python object.
type Object<'py> = Bound<'py, PyAny>;
/// An object or None.
type Optional<'a, 'py> = Option<&'a Object<'py>>;
/// An array, or an exception.
type Result<'py> = PyResult<Object<'py>>;
/// Two arrays.
type Two<'py> = PyResult<(Object<'py>, Object<'py>)>;

/// Adds all functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! functions {
        ($($path:path),* $(,)?) => { $( module.add_function(wrap_pyfunction!($path, module)?)?; )* };
    }
    functions!(
        heads::nn_attention,
        heads::nn_attention_bwd,
        heads::nn_rope,
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
        rows::nn_rmsnorm,
        rows::nn_rmsnorm_bwd,
        rows::nn_swiglu_bwd,
    );
    Ok(())
}
