//! Models: their sizes and parameter tables, how they start, and the programs that train and run them.

mod config;
mod config_text;
pub mod gpt2;
pub mod init;

pub use config::{Gpt2Config, TensorSpec};
