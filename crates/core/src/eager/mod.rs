//! Eager ops: one call on the caller's memory, without a program, pools or an engine.
//!
//! Each op is a struct of named arrays, sizes and numbers. `ironhorse_cpu::eager` runs it on host memory,
//! `ironhorse_cuda::eager` launches it on a stream of a GPU; `ironhorse::eager` chooses between them. Everything that
//! Rust, C, numpy and PyTorch callers can compute eagerly is one of these structs.
//!
//! Arrays are contiguous and row-major unless strides are given. Results are rounded once to the array's type; sums,
//! statistics and what an op keeps for its backward have the type [`Float::acc`]. Gradients are written, not added to.
//! An output may be the same array as an input where the op's doc says so; any other overlap is undefined.

mod array;
mod elementwise;
mod heads;
mod loss;
mod product;
mod rows;
mod sampling;
mod update;

pub use crate::op::Act;
pub use array::{Array, Float, Rows, Strides, Targets};
pub use elementwise::{
    Binary, BinaryFn, Gate, ScaleBiasRelu, ScaleBiasReluBwd, SwigluBwd, Unary, UnaryBwd, UnaryFn,
};
pub use heads::{
    Attention, AttentionBwd, AttentionShape, Pairs, Rope, RopeAngles, RopeFreqs, RopeQk, RopeShape,
};
pub use loss::{AuxLoss, CrossEntropy, CrossEntropyBwd, CrossEntropyMean, LogProbs, LogProbsBwd};
pub use product::{Gemm, GemmPart, GemmShape, GroupedGemm};
pub use rows::{
    LayerNorm, LayerNormBwd, ResidualRmsNorm, RmsNorm, RmsNormBwd, Softmax, SoftmaxBwd, SoftmaxTopk,
};
pub use sampling::{Argmax, Sample, uniform_of_seed};
pub use update::{AdamWStep, GradClip, ScatterAdd, ZeroGrad};
