//! The CUDA engine: programs on an NVIDIA GPU, with nothing of CUDA needed to build it.
//!
//! ```text
//! Program ──lower──▶ Vec<Launch> ──run──▶ stream ──capture──▶ CUDA graph, replayed every step
//!            op/*.rs: which kernel or library call, with which addresses and sizes
//!            kernels/FAMILY/*.cu: compiled by NVRTC at first use, kept on disk
//!            ffi/*.rs: the driver and the libraries, found at run time
//! ```

mod args;
mod cache;
mod cublaslt;
mod cudnn;
mod device;
pub mod eager;
mod engine;
mod error;
pub mod ffi;
mod flash;
mod gemm;
mod kernels;
mod launch;
mod measure;
mod memory;
mod nccl;
mod op;
pub mod report;
mod scalars;
mod scatter;
mod settings;
mod specs;
mod squares;
mod staging;
pub mod user;

pub use cache::Cache;
pub use device::DeviceInfo;
pub use engine::CudaEngine;
pub use error::{Error, ErrorKind, Result};
pub use kernels::{KERNEL_FILES, Spec, Value};
pub use settings::{Attention, Settings};
pub use specs::{check_specs, covering};

/// Whether the engine can run on this GPU: the driver, a GPU new enough, the compiler and the matrix products.
pub fn usable(index: usize) -> Result<()> {
    device::Device::check(index)?;
    for kind in [ffi::library::NVRTC, ffi::library::CUBLASLT] {
        ffi::library::Open::find(kind)?;
    }
    Ok(())
}

/// All GPUs the driver sees.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    device::Device::list()
}
