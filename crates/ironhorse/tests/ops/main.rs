//! The one-call ops against plain f64 references, on awkward sizes and with bad arguments.
// Helpers that are no tests themselves unwrap too.
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
