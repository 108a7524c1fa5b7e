//! The C library: `ironhorse::ops` as C functions.
//!
//! A function turns its arguments into those of the op of the same name, catches a panic before it reaches C, and keeps
//! the text of an error for [`border::ih_last_error`]. The functions follow from the table of ops, and so does their section of
//! `include/ironhorse.h`: `cargo xtask generate`.
// The order and number of the arguments are those of the C functions.
#![allow(clippy::too_many_arguments)]

mod border;
mod ops;
