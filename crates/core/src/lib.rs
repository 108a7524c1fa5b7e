//! The interface between models and engines: a training step is a [`Program`], a flat list of ops over memory that is
//! planned once.
//!
//! ```
//! use ironhorse_core::{Builder, DType, Pool, op::{Act, ActFwd, Fill}};
//!
//! let mut b = Builder::new();
//! let out = b.io("out", [2, 3], DType::F32);
//! let x = b.activation([2, 3], DType::F32);
//! b.push(Fill { out: x, value: 1.0 })?;
//! b.at("h.0.mlp.gelu");
//! b.push(ActFwd { out, inp: x, act: Act::Gelu })?;
//! let program = b.finish()?;
//! assert_eq!(program.nodes().len(), 2);
//! assert_eq!(program.layout().bytes(Pool::Activations), 24);
//! # Ok::<(), ironhorse_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod builder;
mod device;
mod dropout;
mod dtype;
pub mod eager;
mod engine;
mod error;
mod fp8;
mod host;
pub mod op;
pub mod parallel;
pub mod planner;
mod program;
pub mod ranks;
mod rounding;
mod shape;
mod slot;
mod widen;

/// The `tracing` target of what a person who waits should read, also where only warnings are shown otherwise.
pub const NOTICE: &str = "ironhorse::notice";

pub use builder::Builder;
pub use device::{DeviceDescription, Limit, Limits, MemoryUse};
pub use dropout::{DropMask, DropRate, DropRow, DropSite};
pub use dtype::{
    DType, Fp8Products, Fp8Scales, Operands, Optimizer, Precision, bf16_to_f32, f16_to_f32, f32_to_bf16,
    f32_to_f16,
};
pub use engine::{Engine, EngineExt, Pending, Scalars, Timed, TokenChoice};
pub use error::{Error, Result};
pub use fp8::{Fp8, power_of_two};
pub use host::host_vec as host_memory;
pub(crate) use host::host_vec;
pub use host::{
    HostMemory, HostSlice, HostSliceMut, MakeHostMemory, check_host_bytes, check_host_len, no_host_memory,
};
pub use program::{
    Layout, MuonMatrix, Node, Param, Program, Section, Update, Value, ValueKind, muon_matrices,
};
pub use ranks::{Communicator, Place, Shard, Slices, SumTree};
pub use rounding::{RandomRounding, join_master, split_master};
pub use shape::Shape;
pub use slot::{ALIGN, Pool, Slot, align_up};
pub use widen::Widening;
