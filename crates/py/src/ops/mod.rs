//! The Python functions of the table of ops: one binding for all. Arguments are in the order of the C functions, or keywords;
//! sizes may be left out where arrays tell them, and an output that is `None` is made.

mod arguments;
mod call;
mod function;
mod shapes;
mod sides;

use ironhorse::ops::{self, layers};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Whether ops can run on a CUDA device here.
#[pyfunction]
pub fn cuda_available() -> bool {
    ops::cuda_available()
}

/// Adds the functions of ops to the module: those of layers by name, and those for users as the dictionary `OPS`.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let all = PyDict::new(module.py());
    let mut numbers = 0..;
    let mut made = |home, op, name| function::make(module, home, numbers.next().unwrap_or(0), (op, name));
    for &op in ops::table::ALL {
        for name in op.python_name().into_iter().chain(op.also) {
            all.set_item(name, made("ironhorse.ops", op, name)?)?;
        }
    }
    for &op in layers::table::ALL.iter().filter(|op| op.python_name().is_some()) {
        module.add(op.symbol, made("ironhorse._native", op, op.symbol)?)?;
    }
    module.add("OPS", all)
}
