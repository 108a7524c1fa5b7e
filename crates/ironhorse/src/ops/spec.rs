//! What an op is, as data: the C functions, the Python functions, their documentation and all checks follow from it.

use super::arg::equal;
pub use super::arg::{Arg, Bound, Default, Dim, Elem, Named, Role};
pub(super) use super::arg::{linked, position};
use super::sets::{ArgSet, ArgSets};
pub use super::value::Value;
use crate::eager::Runner;
use crate::error::Result;

/// How Python calls an op.
#[derive(Clone, Copy, Debug)]
pub enum Python {
    /// Python calls it by its own name.
    Own,
    /// Python calls it by another name.
    Named(&'static str),
    /// Python calls it by its own name, with a keyword for a flag that takes another op of the same arguments.
    Switch(&'static str, &'static Op),
    /// Python does not have it: another op does the same.
    Hidden,
}

/// An op.
pub struct Op {
    /// Its name.
    pub name: &'static str,
    /// The name of the C function; of layer ops, which C does not have, that of the native Python function.
    pub symbol: &'static str,
    /// What it computes.
    pub doc: &'static str,
    /// The arguments in the order of the C function, without the stream.
    pub args: &'static [Arg],
    /// How Python calls it.
    pub python: Python,
    /// A second name in Python.
    pub also: Option<&'static str>,
    /// The arrays without which there is nothing to do: when all of them are empty, no other array is looked at.
    pub(super) idle: ArgSet,
    /// The arguments by kind.
    pub sets: ArgSets,
    pub(super) run: unsafe fn(&[Value], &Runner<'_>) -> Result,
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Op {
    pub(super) const fn python(self, python: Python) -> Self {
        Self { python, ..self }
    }

    pub(super) const fn also(self, name: &'static str) -> Self {
        Self { also: Some(name), ..self }
    }

    pub(super) const fn idle(self, names: &[&str]) -> Self {
        let mut idle = ArgSet::NONE;
        let mut n = 0;
        while n < names.len() {
            let mut i = 0;
            while !equal(self.args[i].name, names[n]) {
                i += 1;
            }
            idle = idle.with(i);
            n += 1;
        }
        Self { idle, ..self }
    }

    /// The name of the function in Python.
    pub const fn python_name(&self) -> Option<&'static str> {
        match self.python {
            Python::Own | Python::Switch(..) => Some(self.name),
            Python::Named(name) => Some(name),
            Python::Hidden => None,
        }
    }

    /// The position of an argument.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.args.iter().position(|arg| arg.name == name)
    }
}
