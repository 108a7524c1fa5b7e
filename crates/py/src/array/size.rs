//! Sizes and flags as arguments, and whether arrays fit them.

use super::{Array, Call};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

/// Rows and columns: those given, or the last dimension and all before it.
pub fn rows_of<T>(
    call: &Call<'_>,
    (name, array): (&str, &Array<'_, T>),
    (rows, cols): (Option<Size>, Option<Size>),
) -> PyResult<(i64, i64)> {
    let (rows, cols) = match (rows, cols) {
        (None, None) => {
            let Some((&cols, before)) = array.shape().split_last() else {
                return Err(call.invalid(format_args!("`{name}` has no dimensions, expected rows")));
            };
            (before.iter().product::<usize>() as i64, cols as i64)
        }
        (Some(Size(rows)), Some(Size(cols))) => (rows, cols),
        _ => return Err(call.invalid("give both sizes, or none of them")),
    };
    if rows < 0 || cols < 0 || rows.checked_mul(cols) != Some(array.count()) {
        let found = array.shape();
        return Err(call.invalid(format_args!("`{name}` is {found:?}, which is not {rows} rows of {cols}")));
    }
    Ok((rows, cols))
}

/// Refuses an array that has not as many elements as these sizes, or sizes below 0.
pub fn count_is<T>(call: &Call<'_>, (name, array): (&str, &Array<'_, T>), sizes: &[i64]) -> PyResult<()> {
    let count = sizes.iter().try_fold(1_i64, |count, &size| count.checked_mul(size).filter(|_| size >= 0));
    if count == Some(array.count()) {
        return Ok(());
    }
    let found = array.shape();
    Err(call.invalid(format_args!("`{name}` is {found:?}, expected the elements of {sizes:?}")))
}

/// An integer argument. One beyond 64 bits becomes the largest, which no array has.
#[derive(Clone, Copy)]
pub struct Size(pub i64);

impl<'a, 'py> FromPyObject<'a, 'py> for Size {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(Self(i64::MAX)),
            value => value.map(Self),
        }
    }
}

/// A flag: `True`, `False`, or a number as C programs have it.
#[derive(Clone, Copy)]
pub struct Flag(pub bool);

impl<'a, 'py> FromPyObject<'a, 'py> for Flag {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.is_truthy().map(Self)
    }
}

/// The product of sizes, if it can be one.
pub fn product(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
}
