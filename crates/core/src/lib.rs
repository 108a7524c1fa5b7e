//! The language both engines speak: a training step is a [`Program`], a flat list of ops over memory planned once.
#![forbid(unsafe_code)]

mod dtype;
mod error;
mod shape;

pub use dtype::{DType, bf16_to_f32, f32_to_bf16};
pub use error::{Error, Result};
pub use shape::Shape;
