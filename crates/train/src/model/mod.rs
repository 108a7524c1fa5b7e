//! Models: their sizes and parameter tables, how they start, and the programs that train and run them.

mod blocks;
mod config;
mod decoder;
pub(crate) mod describe;
mod gpt2;
pub mod init;
mod lora;
mod moe;
mod named;
pub(crate) mod notation;
mod recompute;
mod serving;
mod tensor_spec;

pub use config::ModelConfig;
pub use gpt2::Gpt2Config;
pub(crate) use gpt2::LAYERNORM_EPS;
pub use lora::{Adapted, AdapterPart, BaseDigest, Lora, Target, Targets, add_product};
pub use moe::{Family, MoeConfig, RopeType};
pub use notation::Notation;
pub use recompute::{After, Recompute, StepOptions, Sums};
pub use serving::ServingStep;
pub use tensor_spec::TensorSpec;
