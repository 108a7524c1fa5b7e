//! The arguments of a Python call, by position and keyword, as the table names them.

use ironhorse::ops::spec::{Op, Python as Face, Role};
use ironhorse::ops::text::{in_python, required};
use numpy::PyUntypedArray;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

/// The arguments as the interpreter hands them over.
pub struct Arguments<'a, 'py> {
    pub py: Python<'py>,
    /// The arguments by position, then those by name.
    values: &'a [*mut ffi::PyObject],
    /// The names of the arguments by name.
    names: Option<Borrowed<'a, 'py, PyTuple>>,
    positional: usize,
}

impl<'a, 'py> Arguments<'a, 'py> {
    /// # Safety
    /// `values` are `positional` objects and one for each name of the tuple `names`, which may be null; all live for 'a.
    pub unsafe fn new(
        py: Python<'py>,
        values: *const *mut ffi::PyObject,
        positional: ffi::Py_ssize_t,
        names: *mut ffi::PyObject,
    ) -> Self {
        let positional = positional as usize;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let names = (!names.is_null()).then(|| Borrowed::from_ptr(py, names).cast_unchecked::<PyTuple>());
            let all = positional + names.map_or(0, |names| names.len());
            let values = if all == 0 { &[] } else { std::slice::from_raw_parts(values, all) };
            Self { py, values, names, positional }
        }
    }

    fn value(&self, i: usize) -> Borrowed<'a, 'py, PyAny> {
        // SAFETY: an object that lives for 'a, as `new` was promised.
        unsafe { Borrowed::from_ptr(self.py, self.values[i]) }
    }
}

/// What a keyword stands for.
#[derive(Clone, Copy)]
enum Keyword {
    /// The argument at this position of the op's.
    Argument(usize),
    Device,
    /// A flag that takes this op instead.
    Switch(&'static Op),
}

/// An argument that Python has.
#[derive(Clone, Copy)]
struct Param {
    /// The position in the op's arguments.
    at: usize,
    required: bool,
    /// An optional array before one that must be given: a number in its place means that it is left out.
    skipped: bool,
}

/// What a Python function takes.
pub struct Signature {
    op: &'static Op,
    name: &'static str,
    /// The arguments that Python has.
    params: Vec<Param>,
    /// The arguments that must be given: bit i for argument i of the op.
    required: u32,
    /// The keywords, interned as those of almost every call are.
    keywords: Vec<(Py<PyString>, Keyword)>,
}

/// The arguments of a call.
pub struct Given<'a, 'py, const N: usize> {
    /// The op, which a flag may have chosen.
    pub op: &'static Op,
    /// The values by position in the op's arguments; `None` was not given.
    pub values: [Option<Borrowed<'a, 'py, PyAny>>; N],
    /// The device, if given.
    pub device: Option<Borrowed<'a, 'py, PyString>>,
}

impl Signature {
    /// The signature of an op under a name.
    pub fn new(py: Python<'_>, op: &'static Op, name: &'static str) -> Self {
        let visible = || op.args.iter().enumerate().filter(|(_, arg)| in_python(arg));
        let named = |name: &str, keyword| (PyString::intern(py, name).unbind(), keyword);
        let mut keywords = vec![named("device", Keyword::Device)];
        for (i, arg) in visible() {
            keywords.push(named(arg.name, Keyword::Argument(i)));
            keywords.extend(arg.alias.map(|alias| named(alias, Keyword::Argument(i))));
        }
        if let Face::Switch(flag, other) = op.python {
            keywords.push(named(flag, Keyword::Switch(other)));
        }
        let mut params = Vec::new();
        for (at, arg) in visible() {
            let later = || visible().any(|(i, arg)| i > at && required(arg));
            let skipped = !required(arg) && matches!(arg.role, Role::Write(_)) && later();
            params.push(Param { at, required: required(arg), skipped });
        }
        let required =
            params.iter().filter(|param| param.required).fold(0, |bits, param| bits | 1 << param.at);
        Self { op, name, params, required, keywords }
    }

    #[cold]
    fn wrong(&self, text: impl std::fmt::Display) -> PyErr {
        PyTypeError::new_err(format!("{}() {text}", self.name))
    }

    /// Sorts the arguments of a call.
    pub fn parse<'a, 'py, const N: usize>(
        &self,
        arguments: &Arguments<'a, 'py>,
    ) -> PyResult<Given<'a, 'py, N>> {
        let mut given = Given { op: self.op, values: [const { None }; N], device: None };
        // From a number in the place of an optional array on, positions are those of what must be given: `scale(x, 2.0)`.
        let mut short = false;
        let mut params = self.params.iter();
        let mut missing = self.required;
        for i in 0..arguments.positional {
            let value = arguments.value(i);
            let mut param = params.next();
            if let Some(&Param { skipped: true, .. }) = param {
                short = short || is_number(&value);
            }
            while let Some(Param { required: false, .. }) = param
                && short
            {
                param = params.next();
            }
            let Some(&Param { at, .. }) = param else {
                let (most, found) = (self.params.len(), arguments.positional);
                return Err(
                    self.wrong(format_args!("takes at most {most} positional arguments ({found} given)"))
                );
            };
            given.values[at] = Some(value);
            missing &= !(1 << at);
        }
        if let Some(names) = arguments.names {
            self.keywords(arguments, names, &mut given)?;
        }
        while missing != 0 {
            let position = missing.trailing_zeros() as usize;
            if given.values[position].is_none() {
                let name = self.op.args[position].name;
                return Err(self.wrong(format_args!("missing required argument: '{name}'")));
            }
            missing &= missing - 1;
        }
        Ok(given)
    }

    fn keywords<'a, 'py, const N: usize>(
        &self,
        arguments: &Arguments<'a, 'py>,
        names: Borrowed<'a, 'py, PyTuple>,
        given: &mut Given<'a, 'py, N>,
    ) -> PyResult<()> {
        for i in 0..names.len() {
            let (key, value) = (names.get_borrowed_item(i)?, arguments.value(arguments.positional + i));
            match self.keyword(&key)? {
                Keyword::Argument(position) => {
                    if given.values[position].replace(value).is_some() {
                        return Err(self.twice(arguments.py, position));
                    }
                }
                Keyword::Device => given.device = Some(value.cast::<PyString>()?),
                Keyword::Switch(other) if value.is_truthy()? => given.op = other,
                Keyword::Switch(_) => {}
            }
        }
        Ok(())
    }

    fn keyword(&self, key: &Bound<'_, PyAny>) -> PyResult<Keyword> {
        let same = |(name, _): &&(Py<PyString>, Keyword)| name.as_ptr() == key.as_ptr();
        if let Some(&(_, keyword)) = self.keywords.iter().find(same) {
            return Ok(keyword);
        }
        // A name that was made at run time.
        for (name, keyword) in &self.keywords {
            if name.bind(key.py()).as_any().eq(key)? {
                return Ok(*keyword);
            }
        }
        Err(self.wrong(format_args!("got an unexpected keyword argument '{key}'")))
    }

    #[cold]
    fn twice(&self, py: Python<'_>, position: usize) -> PyErr {
        let arg = &self.op.args[position];
        let name = arg.name;
        match arg.alias {
            None => self.wrong(format_args!("got multiple values for argument '{name}'")),
            Some(alias) => crate::error::invalid(
                py,
                self.op.name,
                format_args!("both `{name}` and `{alias}` are given, expected only one: they are the same"),
            ),
        }
    }
}

/// Whether an object is a number, and not an array.
fn is_number(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object is alive, and the interpreter's lock is held.
    let number = unsafe { ffi::PyNumber_Check(object.as_ptr()) } == 1;
    number && !object.is_instance_of::<PyUntypedArray>()
}
