//! The CPU engine of ironhorse: threads, instruction sets, elementary functions and matrix products.

pub mod gemm;
pub mod isa;
pub mod math;
pub mod mem;
pub mod team;
