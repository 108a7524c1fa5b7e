//! The arguments of a Python call, by position and keyword, as the table names them.

use ironhorse::ops::spec::{Op, Python as Face, Role};
use ironhorse::ops::text::{in_python, required};
use numpy::PyUntypedArray;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

/// What a Python function takes.
pub struct Spec {
    op: &'static Op,
    /// Positions in the op's arguments of those that Python has, and whether they must be given.
    params: Vec<(usize, bool)>,
}

/// The arguments of a call.
pub struct Given<'a, 'py, const N: usize> {
    /// The op, which a flag may have chosen.
    pub op: &'static Op,
    /// By position in the op's arguments; `None` was not given.
    pub values: [Option<Borrowed<'a, 'py, PyAny>>; N],
    /// The device, if given.
    pub device: Option<Borrowed<'a, 'py, PyString>>,
}

impl Spec {
    /// Of an op.
    pub fn new(op: &'static Op) -> Self {
        let visible = op.args.iter().enumerate().filter(|(_, arg)| in_python(arg));
        Self { op, params: visible.map(|(i, arg)| (i, required(arg))).collect() }
    }

    #[cold]
    fn wrong(&self, text: impl std::fmt::Display) -> PyErr {
        PyTypeError::new_err(format!("{}() {text}", self.op.python_name().unwrap_or(self.op.symbol)))
    }

    /// Sorts the arguments of a call.
    pub fn parse<'a, 'py, const N: usize>(
        &self,
        args: &'a Bound<'py, PyTuple>,
        keywords: Option<&'a Bound<'py, PyDict>>,
    ) -> PyResult<Given<'a, 'py, N>> {
        let mut given = Given { op: self.op, values: [const { None }; N], device: None };
        let mut next = 0;
        // From a number in the place of an optional array on, positions are those of what must be given: `scale(x, 2.0)`.
        let mut short = false;
        for i in 0..args.len() {
            let value = args.get_borrowed_item(i)?;
            short = short || self.skips_arrays(next, &value);
            while short && self.params.get(next).is_some_and(|&(_, required)| !required) {
                next += 1;
            }
            let Some(&(position, _)) = self.params.get(next) else {
                let most = self.params.len();
                return Err(self.wrong(format_args!(
                    "takes at most {most} positional arguments ({} given)",
                    args.len()
                )));
            };
            given.values[position] = Some(value);
            next += 1;
        }
        if let Some(keywords) = keywords {
            self.keywords(&mut given, keywords)?;
        }
        for &(position, required) in &self.params {
            if required && given.values[position].is_none() {
                let name = self.op.args[position].name;
                return Err(self.wrong(format_args!("missing required argument: '{name}'")));
            }
        }
        Ok(given)
    }

    /// Whether a positional argument is a number where an optional array could be, and a later one must be given.
    fn skips_arrays(&self, next: usize, value: &Bound<'_, PyAny>) -> bool {
        let Some(&(position, false)) = self.params.get(next) else { return false };
        let array = matches!(self.op.args[position].role, Role::Write(_));
        array && self.params[next..].iter().any(|&(_, required)| required) && is_number(value)
    }

    fn keywords<'a, 'py, const N: usize>(
        &self,
        given: &mut Given<'a, 'py, N>,
        keywords: &'a Bound<'py, PyDict>,
    ) -> PyResult<()> {
        let mut flag = None;
        for (key, value) in keywords.iter() {
            // SAFETY: `keywords` holds a reference to the value, and is not changed during the call.
            let value: Borrowed<'a, 'py, PyAny> =
                unsafe { Borrowed::from_ptr(keywords.py(), value.as_ptr()) };
            let key = key.cast::<PyString>()?.to_str()?;
            let named = |position: &(usize, bool)| {
                let arg = &self.op.args[position.0];
                arg.name == key || arg.alias == Some(key)
            };
            if let Some(&(position, _)) = self.params.iter().find(|position| named(position)) {
                let arg = &self.op.args[position];
                if given.values[position].is_some() {
                    return Err(self.twice(arg.name, arg.alias));
                }
                given.values[position] = Some(value);
            } else if key == "device" {
                given.device = Some(value.cast::<PyString>()?);
            } else if let Face::Switch(name, other) = self.op.python
                && name == key
            {
                flag = value.is_truthy()?.then_some(other);
            } else {
                return Err(self.wrong(format_args!("got an unexpected keyword argument '{key}'")));
            }
        }
        if let Some(other) = flag {
            given.op = other;
        }
        Ok(())
    }

    fn twice(&self, name: &str, alias: Option<&str>) -> PyErr {
        match alias {
            None => self.wrong(format_args!("got multiple values for argument '{name}'")),
            Some(alias) => Python::attach(|py| {
                let text = format_args!(
                    "both `{name}` and `{alias}` are given, expected only one: they are the same"
                );
                crate::error::invalid(py, self.op.name, text)
            }),
        }
    }
}

/// Whether an object is a number, and not an array.
fn is_number(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object is alive, and the interpreter's lock is held.
    let number = unsafe { pyo3::ffi::PyNumber_Check(object.as_ptr()) } == 1;
    number && !object.is_instance_of::<PyUntypedArray>()
}
