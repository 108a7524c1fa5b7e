//! The CPU engine: every op of a program on all cores, the same bits for any number of threads, instruction sets
//! chosen at run time.
//!
//! From the bottom up: `isa`, `math` and `buffer`; `memory` and `team`; `element`, types of elements and vector loops; `gemm`,
//! matrix products; `kernel`, the arithmetic of ops; `settled`, weights that are packed; `op`, the ops of programs, and `eager`,
//! single calls; the engine.

pub mod buffer;
pub mod eager;
mod element;
mod engine;
pub mod gemm;
pub mod isa;
mod kernel;
mod limits;
pub mod math;
mod memory;
mod op;
mod settled;
pub mod team;

pub use engine::{CpuEngine, CpuSettings};
pub use gemm::multiplies_bf16;
pub use limits::Limits;
