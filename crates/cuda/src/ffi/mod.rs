//! The driver and the libraries: found and loaded at run time, every call checked.

pub mod cublaslt;
pub mod cudnn;
pub mod cupti;
pub mod driver;
pub mod library;
pub mod nccl;
pub mod nvrtc;
mod search;
