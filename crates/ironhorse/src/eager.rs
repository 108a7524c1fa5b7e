//! Direct ops where the memory is: one call on the caller's memory, on the host or on a GPU. The ops, their arguments and
//! what they compute are those of the table in [`crate::core::eager`].
//!
//! Nothing is checked here: this is for callers who know types, sizes and places. [`crate::ops`] is for the others.
//!
//! # Safety
//! Shared by all functions here: arrays are memory of the place `at` names, as large as the table says; outputs share no
//! memory with anything else the call uses; on a GPU, memory stays valid until the stream has passed the call.
//!
//! # Errors
//! Shared by all functions here: the work could not be started, or did not end well.

pub use crate::core::eager::Gate;
use crate::core::eager::{Array, AttentionShape, BinaryFn, RopeShape, Rows, Targets, UnaryFn};
pub use crate::cuda::eager::gate_bytes;
use crate::ops::{Code, OpError, Result};
use crate::{cpu, cuda};
use std::ffi::c_void;

/// Where a call works.
pub enum At<'a> {
    /// On this machine's cores, before the call returns.
    Host,
    /// On a stream of a GPU, after the call has returned.
    Device(cuda::eager::At<'a>),
}

/// An eager op: a struct of [`crate::core::eager`] that both engines can run.
pub trait Op: cpu::eager::Run + cuda::eager::Launch {}

impl<T: cpu::eager::Run + cuda::eager::Launch> Op for T {}

/// Runs an op where its memory is: on the host before this returns, on a GPU after it.
///
/// # Safety
/// See [the module](self).
///
/// # Errors
/// See [the module](self).
pub unsafe fn run(at: &At<'_>, op: &impl Op) -> Result {
    match at {
        // SAFETY: guaranteed by the caller.
        At::Host => Ok(unsafe { op.run() }?),
        // SAFETY: guaranteed by the caller.
        At::Device(at) => Ok(unsafe { op.launch(at) }?),
    }
}

macro_rules! eager {
    ($($(#[$doc:meta])* $name:ident($($pattern:ident: $type:ty),* $(,)?);)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// See [the module](self).
            ///
            /// # Errors
            /// See [the module](self).
            pub unsafe fn $name(at: &At<'_>, $($pattern: $type),*) -> Result {
                match at {
                    // SAFETY: the caller's.
                    At::Host => Ok(unsafe { cpu::eager::$name($($pattern),*) }?),
                    // SAFETY: the caller's.
                    At::Device(at) => Ok(unsafe { cuda::eager::$name(at, $($pattern),*) }?),
                }
            }
        )*
    };
}

eager! {
    /// y = op(x), n elements.
    unary(op: UnaryFn, x: Array, y: Array, n: usize);
    /// Of d_y and x: d_x.
    unary_bwd(op: UnaryFn, inputs: [Array; 2], d_x: Array, n: usize);
    /// y = op(a, b), n elements.
    binary(op: BinaryFn, inputs: [Array; 2], y: Array, n: usize);
    /// Of d_y, gate and up: d_gate and d_up, either of which may be null.
    swiglu_bwd(inputs: [Array; 3], outputs: [Array; 2], n: usize);
    /// y = softmax(x) of each row.
    softmax(x: Array, y: Array, rows: Rows);
    /// Of d_y and y: d_x.
    softmax_bwd(inputs: [Array; 2], d_x: Array, rows: Rows);
    /// Of x and weight: y and rstd, which may be null.
    rmsnorm(inputs: [Array; 2], outputs: [Array; 2], rows: Rows, eps: f64);
    /// Of d_y, x, weight and rstd: d_x and d_weight, either of which may be null.
    rmsnorm_bwd(inputs: [Array; 4], outputs: [Array; 2], rows: Rows);
    /// Of x, weight and bias: y, mean and rstd, which may be null.
    layernorm(inputs: [Array; 3], outputs: [Array; 3], rows: Rows, eps: f64);
    /// Of d_y, x, weight, mean and rstd: d_x, d_weight and d_bias, any of which may be null.
    layernorm_bwd(inputs: [Array; 5], outputs: [Array; 3], rows: Rows);
    /// Of logits and targets: losses and lse, one per row.
    cross_entropy(logits: Array, targets: Targets, outputs: [Array; 2], rows: Rows, ignore: i64);
    /// Of losses: their mean or sum, and what they were multiplied with.
    cross_entropy_mean(losses: Array, targets: Targets, outputs: [Array; 2], rows: usize, ignore: i64, mean: bool);
    /// Of d_loss, logits, lse and inv_count: d_logits.
    cross_entropy_bwd(inputs: [Array; 4], targets: Targets, d_logits: Array, rows: Rows, ignore: i64, per_row: bool);
    /// Of x, cos and sin: y.
    rope(inputs: [Array; 3], y: Array, shape: &RopeShape, back: bool);
    /// Of q, k and v: out and lse, which may be null.
    attention(inputs: [Array; 3], outputs: [Array; 2], shape: &AttentionShape);
    /// Of d_out, q, k, v, out and lse: d_q, d_k and d_v, any of which may be null.
    attention_bwd(inputs: [Array; 6], outputs: [Array; 3], shape: &AttentionShape);
}

/// Of x and bias: y = relu(x scale + bias), and the gate of its gradient as bits where that is not null.
///
/// # Safety
/// See [the module](self); the gate is null or has [`gate_bytes`].
///
/// # Errors
/// See [the module](self).
pub unsafe fn scale_bias_relu(
    at: &At<'_>,
    inputs: [Array; 2],
    (y, gate): (Array, *mut c_void),
    rows: Rows,
    scale: f64,
) -> Result {
    match at {
        // SAFETY: the caller's.
        At::Host => Ok(unsafe { cpu::eager::scale_bias_relu(inputs, y, rows, scale) }?),
        // SAFETY: the caller's.
        At::Device(at) => Ok(unsafe { cuda::eager::scale_bias_relu(at, inputs, (y, gate), rows, scale) }?),
    }
}

/// Of d_y and the gate: d_x and d_bias, either of which may be null. On a GPU d_y may be one number for all elements.
///
/// # Safety
/// See [the module](self).
///
/// # Errors
/// See [the module](self); bits, or one number, on the host.
pub unsafe fn scale_bias_relu_bwd(
    at: &At<'_>,
    (d_y, same): (Array, bool),
    gate: Gate,
    outputs: [Array; 2],
    rows: Rows,
    scale: f64,
) -> Result {
    match (at, gate) {
        (At::Host, Gate::Result(y)) if !same => {
            // SAFETY: the caller's.
            Ok(unsafe { cpu::eager::scale_bias_relu_bwd([d_y, y], outputs, rows, scale) }?)
        }
        (At::Host, _) => Err(OpError {
            code: Code::InvalidValue,
            text: "fused_scale_bias_relu_bwd: on the host the gate is the result, and d_y as large as it"
                .into(),
        }),
        (At::Device(at), gate) => {
            // SAFETY: the caller's.
            Ok(unsafe { cuda::eager::scale_bias_relu_bwd(at, (d_y, same), gate, outputs, rows, scale) }?)
        }
    }
}
