//! The Python module `ironhorse._native`: numpy arrays in, `ironhorse::ops` on their memory, numpy arrays out.
//!
//! `array` checks and allocates arrays, `ops` has one function per op. Nothing else of Python is needed: the package's
//! Python files add names, types and documentation.

mod array;
mod error;
mod files;
mod jit;
mod language_model;
mod model;
mod nn;
mod open_model;
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
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::{command, verify};
    #[pymodule_export]
    use crate::files::{
        file_checkpoint, file_hf, file_kind, file_model, file_safetensors, file_state, file_tokenizer,
    };
    #[pymodule_export]
    use crate::jit::{JitCode, JitKernel, JitSource};
    #[pymodule_export]
    use crate::language_model::LanguageModel;
    #[pymodule_export]
    use crate::model::{
        model_keys, model_names, model_params, model_read, model_read_hf, model_tensors, model_write_hf,
    };
    #[pymodule_export]
    use crate::nn::products::{nn_grouped, nn_grouped_input, nn_grouped_weight, nn_matmul};
    #[pymodule_export]
    use crate::nn::routing::{
        nn_combine, nn_combine_bwd, nn_permute, nn_permute_bwd, nn_route, nn_route_bwd,
    };
    #[pymodule_export]
    use crate::open_model::OpenModel;
    #[pymodule_export]
    use crate::ops::cuda_available;
    #[pymodule_export]
    use crate::torch::{torch_call, torch_ops, torch_register};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::ops::register(module)
    }
}
