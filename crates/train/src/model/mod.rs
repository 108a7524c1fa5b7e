//! Models: what their parameters are called, in which order, and of which shape.

mod config;
mod config_text;

pub use config::{Gpt2Config, TensorSpec};
