//! Models: their sizes and parameter tables, how they start, and the programs that train and run them.

mod any;
mod config;
mod config_text;
pub mod gpt2;
pub mod init;
pub mod moe;
mod program;

pub use any::ModelConfig;
pub use config::{Gpt2Config, TensorSpec};
pub use moe::MoeConfig;
pub use program::Recompute;
