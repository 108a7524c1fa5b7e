//! One Python function per op of `ironhorse::ops`. Arguments are in the order of the C functions; sizes may be left out
//! where arrays tell them, and an output that is `None` is made.

mod choose;
mod elementwise;
mod heads;
mod loss;
mod matmul;
mod optimizer;
mod rows;

use ironhorse::ops::cuda_available as available;
use pyo3::prelude::*;

/// Any Python object.
type Object<'py> = Bound<'py, PyAny>;
/// An object or None.
type Optional<'a, 'py> = Option<&'a Object<'py>>;
/// An array, or an exception.
type Result<'py> = PyResult<Object<'py>>;

/// Whether ops run on a CUDA device here.
#[pyfunction]
fn cuda_available() -> bool {
    available()
}

/// Adds all functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! functions {
        ($($path:path),* $(,)?) => { $( module.add_function(wrap_pyfunction!($path, module)?)?; )* };
    }
    functions!(
        cuda_available,
        choose::argmax,
        choose::sample,
        choose::topk_sample,
        choose::topp_sample,
        elementwise::add,
        elementwise::gelu,
        elementwise::mul,
        elementwise::scale,
        elementwise::silu,
        elementwise::swiglu,
        heads::flash_attention,
        heads::rope_forward,
        heads::rope_freqs,
        heads::rope_qk,
        loss::aux_loss_forward,
        loss::cross_entropy_backward,
        loss::cross_entropy_forward,
        loss::scatter_add,
        matmul::gemm,
        matmul::gemm_batched,
        optimizer::adamw_step,
        optimizer::grad_clip,
        optimizer::zero_grad,
        rows::layernorm,
        rows::rmsnorm,
        rows::rmsnorm_residual,
        rows::softmax,
        rows::softmax_topk,
    );
    Ok(())
}
