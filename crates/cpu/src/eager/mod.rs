//! Direct ops on memory of the host: f64, f32, bf16 and f16, forward and backward. Their plain data and the table of ops are
//! in [`ironhorse_core::eager`]; `ironhorse_cuda::direct` has the same ops.
//!
//! Everything is written once for all types: elements are widened to [`Float::acc`](ironhorse_core::eager::Float::acc) in
//! blocks that fit the first-level cache, computed, and rounded once to nearest even. Sums run in 32 lanes that a fixed tree
//! joins, block totals are added in f64. Work is cut into pieces that do not depend on the number of threads, so neither do
//! the bits.
//!
//! # Safety
//! Shared by all functions here: arrays have the lengths and types the function's doc says, and are aligned to their elements;
//! what is written shares no memory with anything else the call uses, unless the doc says that two arrays may be the same;
//! nobody else writes the arrays, or reads what is written, during the call. An output that is null is not written.
//!
//! # Errors
//! Shared by all functions here: a task panicked, which is a bug in this crate.

mod attention;
mod attention_bwd;
mod bias;
mod columns;
mod elem;
mod elementwise;
mod loss;
mod map;
mod norm;
mod ptr;
mod real;
mod rope;
mod run;
mod softmax;
mod tiles;

pub use attention::attention;
pub use attention_bwd::attention_bwd;
pub use bias::{scale_bias_relu, scale_bias_relu_bwd};
pub use elementwise::{binary, swiglu_bwd, unary, unary_bwd};
pub use loss::{cross_entropy, cross_entropy_bwd, cross_entropy_mean};
pub use norm::{layernorm, layernorm_bwd, rmsnorm, rmsnorm_bwd};
pub use rope::rope;
pub use run::{Failed, Run};
pub use softmax::{softmax, softmax_bwd};

pub use crate::flat::{routing, set_threads, threads};
pub use crate::memory::Span;

/// As [`multiversion!`](crate::multiversion), for functions with one type parameter. `SET` gives each set of instructions its
/// own closures: one that is called from a single place is inlined, however large, and only then becomes vector code.
macro_rules! versions {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<$g:ident: $bound:ident, const $fma:ident: bool>(
        $($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$g: $bound>(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
            fn body<$g: $bound, const $fma: bool, const SET: u8>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512<$g: $bound>($($arg: $ty),*) $(-> $ret)? {
                body::<$g, true, 2>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2<$g: $bound>($($arg: $ty),*) $(-> $ret)? {
                body::<$g, true, 1>($($arg),*)
            }

            match isa.kind() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
                $crate::isa::IsaKind::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
                $crate::isa::IsaKind::Avx2Fma => unsafe { avx2($($arg),*) },
                _ => body::<$g, { $crate::isa::PORTABLE_FMA }, 0>($($arg),*),
            }
        }
    )*};
}
pub(crate) use versions;

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
                type $t = crate::eager::elem::Bf16;
                $body
            }
            ironhorse_core::eager::Float::F16 => {
                type $t = crate::eager::elem::F16;
                $body
            }
        }
    };
}
pub(crate) use by_type;

#[cfg(test)]
mod tests;
