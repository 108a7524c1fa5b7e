//! An op as torch calls it: its name and schema, its arguments, its results, and failures as exceptions.

use super::abi::{Kernel, Torch};
use super::handle::Handle;
use super::object::Object;
use super::tensor::{Tensor, failed};
use crate::error;
use ironhorse::ops::Result;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Results of an op, as many as its schema says.
pub type Outputs<T> = [Option<T>; 3];

/// The arguments of a call, in the order of the schema.
pub trait Args<T> {
    /// The next one, a tensor.
    fn tensor(&mut self) -> Result<T>;
    /// The next one, a `float`.
    fn float(&mut self) -> Result<f64>;
    /// The next one, an `int`.
    fn int(&mut self) -> Result<i64>;
    /// The next one, a `bool`.
    fn boolean(&mut self) -> Result<bool>;
}

/// An op.
pub trait Op {
    /// Its name; a twin for callers who do the gradients themselves is called `NAME_fwd`.
    const NAME: &'static str;
    /// Arguments and results, in torch's language.
    const SIGNATURE: &'static str;

    /// Takes all arguments, then runs the op. The handle of an argument that is not taken would leak.
    fn run<T: Tensor>(args: &mut impl Args<T>) -> Result<Outputs<T>>;
}

/// `ops! { "name", "(Tensor x) -> Tensor", (x: tensor) => expression; ... }`: a list of ops. The expression gets the arguments
/// and gives `Result<Outputs<T>>`.
macro_rules! ops {
    ($($name:literal, $signature:literal, ($($arg:ident: $kind:ident),*) => $body:expr;)*) => {
        /// The ops of this file.
        pub const OPS: &[$crate::torch::kernel::Entry] = &[$({
            struct This;

            impl $crate::torch::kernel::Op for This {
                const NAME: &'static str = $name;
                const SIGNATURE: &'static str = $signature;

                fn run<T: $crate::torch::tensor::Tensor>(
                    args: &mut impl $crate::torch::kernel::Args<T>,
                ) -> ironhorse::ops::Result<$crate::torch::kernel::Outputs<T>> {
                    // All arguments are taken before the first error is returned: their handles must not leak.
                    $(let $arg = args.$kind();)*
                    $(let $arg = $arg?;)*
                    $body
                }
            }

            $crate::torch::kernel::Entry::of::<This>()
        }),*];
    };
}
pub(super) use ops;

/// Arguments on torch's stack.
struct Stack {
    next: *mut u64,
}

impl Stack {
    fn word(&mut self) -> u64 {
        // SAFETY: torch passes as many words as the schema has arguments, and ops take no more.
        unsafe {
            let word = *self.next;
            self.next = self.next.add(1);
            word
        }
    }
}

impl Args<Handle> for Stack {
    fn tensor(&mut self) -> Result<Handle> {
        let raw = std::ptr::with_exposed_provenance_mut(self.word() as usize);
        // SAFETY: the schema says that this word is a tensor, whose handle the kernel owns.
        unsafe { Handle::own(raw) }
    }

    fn float(&mut self) -> Result<f64> {
        Ok(f64::from_bits(self.word()))
    }

    fn int(&mut self) -> Result<i64> {
        Ok(self.word() as i64)
    }

    fn boolean(&mut self) -> Result<bool> {
        Ok(self.word() & 0xff != 0)
    }
}

/// An op as torch calls it, without the interpreter's lock.
///
/// # Safety
/// Called by torch for an op of O's schema.
pub unsafe extern "C-unwind" fn kernel<O: Op>(stack: *mut u64, _inputs: u64, outputs: u64) {
    let done = catch_unwind(AssertUnwindSafe(|| O::run(&mut Stack { next: stack })));
    let text = match done {
        Ok(Ok(results)) => {
            for (i, result) in results.into_iter().flatten().take(outputs as usize).enumerate() {
                // SAFETY: the stack has room for all results of the schema; torch takes ownership of the handles.
                unsafe { *stack.add(i) = result.into_raw().expose_provenance() as u64 };
            }
            return;
        }
        Ok(Err(error)) => error.text,
        Err(panic) => error::panicked(O::NAME, &*panic),
    };
    let op = CString::new(O::NAME).unwrap_or_default();
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    if let Some(torch) = Torch::get() {
        torch.throw(&op, &text);
    }
}

/// Arguments in a Python tuple.
struct Tuple<'a, 'py> {
    tuple: &'a Bound<'py, PyTuple>,
    next: usize,
}

impl<'py> Tuple<'_, 'py> {
    fn take(&mut self) -> PyResult<Bound<'py, PyAny>> {
        self.next += 1;
        self.tuple.get_item(self.next - 1)
    }
}

fn python<T>(result: PyResult<T>) -> Result<T> {
    result.map_err(|error| failed(error.to_string()))
}

impl Args<Object> for Tuple<'_, '_> {
    fn tensor(&mut self) -> Result<Object> {
        python(self.take().and_then(|object| Object::new(&object)))
    }

    fn float(&mut self) -> Result<f64> {
        python(self.take().and_then(|x| x.extract()))
    }

    fn int(&mut self) -> Result<i64> {
        python(self.take().and_then(|x| x.extract()))
    }

    fn boolean(&mut self) -> Result<bool> {
        python(self.take().and_then(|x| x.extract()))
    }
}

fn call<O: Op>(args: &Bound<'_, PyTuple>) -> Result<Vec<Py<PyAny>>> {
    let results = O::run(&mut Tuple { tuple: args, next: 0 })?;
    Ok(results.into_iter().flatten().map(Object::into_object).collect())
}

/// An op in the list of all.
pub struct Entry {
    pub name: &'static str,
    pub signature: &'static str,
    pub kernel: Kernel,
    pub call: fn(&Bound<'_, PyTuple>) -> Result<Vec<Py<PyAny>>>,
}

impl Entry {
    /// The entry of an op.
    pub const fn of<O: Op>() -> Self {
        Self { name: O::NAME, signature: O::SIGNATURE, kernel: kernel::<O>, call: call::<O> }
    }

    /// The names it has: itself and, for an op with a gradient, its twin.
    pub fn names(&self) -> Vec<String> {
        let own = self.name.to_owned();
        let bare = own.ends_with("_bwd") || own.ends_with("_gated");
        if bare { vec![own] } else { vec![format!("{own}_fwd"), own] }
    }
}
