//! Element by element: an output may be an input.

use super::{Object, Optional, Result};
use crate::array::{Call, Sharing};
use ironhorse::ops;
use pyo3::prelude::*;

macro_rules! unary {
    ($(#[doc = $doc:literal] $name:ident)*) => { $(
        #[doc = $doc]
        #[pyfunction]
        #[pyo3(signature = (x, out=None, device="auto"))]
        pub fn $name<'py>(x: &Object<'py>, out: Optional<'_, 'py>, device: &str) -> Result<'py> {
            let mut call = Call::new(x.py(), stringify!($name), device)?;
            let x = call.input::<f32>("x", x)?;
            let out = call.output_or_new::<f32>("out", out, x.shape())?;
            let (from, to, n) = (x.at(), out.at(), x.count());
            // SAFETY: both arrays have n elements; `run` refuses those that overlap in part.
            call.run(Sharing::Same, x.len(), |on| unsafe { ops::$name(on.read(from), on.write(to), n, on.stream()) })?;
            Ok(out.object())
        }
    )* };
}

macro_rules! binary {
    ($(#[doc = $doc:literal] $name:ident($a:ident, $b:ident))*) => { $(
        #[doc = $doc]
        #[pyfunction]
        #[pyo3(signature = ($a, $b, out=None, device="auto"))]
        pub fn $name<'py>($a: &Object<'py>, $b: &Object<'py>, out: Optional<'_, 'py>, device: &str) -> Result<'py> {
            let mut call = Call::new($a.py(), stringify!($name), device)?;
            let a = call.input::<f32>(stringify!($a), $a)?;
            let b = call.input::<f32>(stringify!($b), $b)?;
            call.expect(stringify!($b), &b, a.shape())?;
            let out = call.output_or_new::<f32>("out", out, a.shape())?;
            let (left, right, to, n) = (a.at(), b.at(), out.at(), a.count());
            // SAFETY: all arrays have n elements; `run` refuses those that overlap in part.
            call.run(Sharing::Same, a.len(), |on| unsafe {
                ops::$name(on.read(left), on.read(right), on.write(to), n, on.stream())
            })?;
            Ok(out.object())
        }
    )* };
}

unary! {
    /// x / (1 + e^-x)
    silu
    /// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    gelu
}

binary! {
    /// a + b
    add(a, b)
    /// a b
    mul(a, b)
    /// silu(gate) up
    swiglu(gate, up)
}

/// x scale
#[pyfunction]
#[pyo3(signature = (x, out, scale, device="auto"))]
pub fn scale<'py>(x: &Object<'py>, out: Optional<'_, 'py>, scale: f32, device: &str) -> Result<'py> {
    let mut call = Call::new(x.py(), "scale", device)?;
    let x = call.input::<f32>("x", x)?;
    let out = call.output_or_new::<f32>("out", out, x.shape())?;
    let (from, to, n) = (x.at(), out.at(), x.count());
    // SAFETY: both arrays have n elements; `run` refuses those that overlap in part.
    call.run(Sharing::Same, x.len(), |on| unsafe {
        ops::scale(on.read(from), on.write(to), scale, n, on.stream())
    })?;
    Ok(out.object())
}
