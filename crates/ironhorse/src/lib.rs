//! Transformer training in Rust, on the CPU and on CUDA GPUs, that proves it computes what PyTorch computes.
//!
//! This is the crate to depend on: it chooses the engine and re-exports the rest.
#![deny(unsafe_code)]

pub mod device;
#[allow(unsafe_code)]
pub mod eager;
mod error;
#[allow(unsafe_code)]
pub mod ops;

pub use ironhorse_core as core;
pub use ironhorse_cpu as cpu;
pub use ironhorse_cuda as cuda;
pub use ironhorse_text as text;
pub use ironhorse_train as train;

pub use device::Device;
