//! Eager ops on host memory: f64, f32, bf16 and f16, forward and backward. The ops are the structs of
//! [`ironhorse_core::eager`]; [`Run`] runs them, with the arithmetic of `kernel`. `ironhorse_cuda::eager` launches the same
//! structs on a GPU.
//!
//! Work that is large enough to gain from it runs on a team of threads that the whole process shares; it is cut into pieces that
//! do not depend on the number of threads, so neither do the bits.

mod attention;
mod columns;
mod elementwise;
mod gemm;
mod loss;
mod norm;
mod process_team;
mod rope;
pub mod routing;
mod run;
mod sampling;
mod softmax;
mod update;

pub use crate::memory::Span;
pub use crate::team::TaskPanic;
pub use process_team::{set_threads, threads};
pub use run::{Failed, Run};

use crate::element::{Elem, Real};
use ironhorse_core::eager::Array;

/// `by_type!(array.float, T => f::<T>(..))`: the expression with T the type of the elements.
macro_rules! by_type {
    ($float:expr, $t:ident => $body:expr) => {
        match $float {
            ironhorse_core::eager::Float::F64 => {
                type $t = f64;
                $body
            }
            ironhorse_core::eager::Float::F32 => {
                type $t = f32;
                $body
            }
            ironhorse_core::eager::Float::BF16 => {
                type $t = crate::element::Bf16;
                $body
            }
            ironhorse_core::eager::Float::F16 => {
                type $t = crate::element::F16;
                $body
            }
        }
    };
}
pub(crate) use by_type;

/// Element `index` of an array of any type.
///
/// # Safety
/// It exists and nobody writes it.
unsafe fn read(array: Array, index: usize) -> f64 {
    // SAFETY: guaranteed by the caller.
    by_type!(array.float, T => unsafe { Span::<T>::of(array, index + 1).value(index) }.load().wide())
}

/// Writes element `index` of an array of any type, if it is given.
///
/// # Safety
/// It exists, unless the array is not given, and nobody else uses it.
unsafe fn write(array: Array, index: usize, x: f64) {
    // SAFETY: guaranteed by the caller.
    by_type!(array.float, T => unsafe { Span::<T>::of(array, index + 1).set(index, T::store(Real::of(x))) })
}

/// Calls `work` with zeros, which are on the stack if they are few: an allocation takes as long as a small op.
fn with_zeros<R>(len: usize, work: impl FnOnce(&mut [f64]) -> R) -> R {
    let mut few = [0.0; 32];
    match few.get_mut(..len) {
        Some(zeros) => work(zeros),
        None => work(&mut vec![0.0; len]),
    }
}

/// Writes NaN to every element of the arrays that are given: statistics of rows without elements.
///
/// # Safety
/// Arrays that are given have `len` elements, which nobody else uses.
unsafe fn fill_nan<const N: usize>(arrays: [Array; N], len: usize) {
    for array in arrays {
        // SAFETY: guaranteed by the caller.
        (0..len).for_each(|i| unsafe { write(array, i, f64::NAN) });
    }
}

#[cfg(test)]
mod tests;
