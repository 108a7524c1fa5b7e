//! The arithmetic of every family of ops, once: for the engine, which computes in f32, and for eager ops on f64, f32, bf16
//! and f16.
//!
//! Elements are widened to the type of sums ([`Elem::Acc`](crate::element::Elem::Acc)), computed, and rounded once to nearest even. Sums
//! run in lanes that a fixed tree joins. Functions here work on windows ([`Span`](crate::memory::Span)) of a row or a piece;
//! the callers in `op` and `eager` guarantee that tasks write disjoint windows and that an output is an input or shares no
//! memory with it.

mod activation;
pub mod argmax;
pub mod attention;
pub mod dropout;
pub mod elementwise;
pub mod loss;
pub mod norm;
pub mod rope;
pub mod routing;
pub mod sampling;
pub mod softmax;
pub mod tasks;
pub mod topk;
pub mod trig;
pub mod update;
