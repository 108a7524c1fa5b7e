//! Failures as the exceptions of `ironhorse.errors`.

use ironhorse::ops::{Code, OpError};
use ironhorse_cli::{Cause, Refusal};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use std::any::Any;
use std::fmt::Display;

/// An argument that the op refuses; the text names the op.
#[cold]
pub fn invalid(py: Python<'_>, op: &str, text: impl Display) -> PyErr {
    raise(py, Code::InvalidValue, &format!("{op}: {text}"))
}

/// What an op says.
#[cold]
pub fn of_op(py: Python<'_>, error: &OpError) -> PyErr {
    raise(py, error.code, &error.text)
}

/// Why a verification has no report.
#[cold]
pub fn of_refusal(py: Python<'_>, refusal: &Refusal) -> PyErr {
    let code = match refusal.cause {
        Cause::Input => Code::InvalidValue,
        Cause::NoDevice => Code::NotAvailable,
        Cause::Device => Code::LaunchFailed,
        Cause::Memory => Code::OutOfMemory,
    };
    raise(py, code, &refusal.text)
}

/// What a panic in an op is called, which is a bug.
#[cold]
pub fn panicked(op: &str, panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    format!("{op}: a bug in ironhorse: {words}")
}

/// What numpy said when it made an array: no memory becomes ours, anything else stays.
#[cold]
pub fn of_numpy(py: Python<'_>, op: &str, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyMemoryError>(py) {
        raise(py, Code::OutOfMemory, &format!("{op}: {}", error.value(py)))
    } else {
        error
    }
}

fn raise(py: Python<'_>, code: Code, text: &str) -> PyErr {
    let name = match code {
        Code::NotAvailable => "NotAvailableError",
        Code::LaunchFailed => "LaunchFailedError",
        Code::OutOfMemory => "OutOfMemoryError",
        Code::Success | Code::InvalidValue => "InvalidValueError",
    };
    named(py, name, text)
}

/// An exception of `ironhorse.errors`, by the name of its class.
#[cold]
pub fn named(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let made = py.import("ironhorse.errors").and_then(|module| module.getattr(class)?.call1((text,)));
    made.map_or_else(|error| error, PyErr::from_value)
}
