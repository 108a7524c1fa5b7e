//! The CPU engine: every op of a program on all cores, the same bits for any number of threads, instruction sets
//! chosen at run time.

pub mod buffer;
pub mod eager;
mod engine;
pub mod gemm;
pub mod isa;
mod kernel;
mod limits;
pub mod math;
mod memory;
mod op;
pub mod team;

pub use engine::CpuEngine;
pub use limits::Limits;
