//! The eager ops against plain f64 references, on awkward sizes and with bad arguments.
// Helpers that are not tests unwrap too.
#![allow(clippy::unwrap_used)]

mod attention;
mod bad_arguments;
mod choose;
mod common;
mod elementwise;
mod loss;
mod matmul;
mod optimizer;
mod rope;
mod rows;
