//! The C library: `ironhorse::ops` as C functions.
//!
//! A function turns its arguments into those of the op of the same name, catches a panic before it reaches C, and keeps
//! the text of an error for [`border::ih_last_error`]. `include/ironhorse.h` is generated from these files.
// The order and number of the arguments are those of the C functions.
#![allow(clippy::too_many_arguments)]

mod border;
mod elementwise;
mod model;
mod rows;
mod sampling;
mod training;
