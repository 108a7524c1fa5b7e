//! Models, file formats, data, the training loop and verification. Names no engine.
//!
//! ```text
//! model/     GPT-2 and mixtures of experts as programs of ops        format/   weights, checkpoints, tokenizers, shards on disk
//! session/   a model on an engine: its programs over one set of weights
//! data/      token shards, built-in stories, the order of batches    run/      a training run: loop, folder, saves, bad steps
//! generate/  writing text                                            verify/   answer keys, lockstep, replay of bad steps
//! eval/      losses of data, multiple choice
//! picture/   the SVG pictures of runs and profiles                   bench.rs  timing of steps and kernels
//! host.rs    the memory of this machine, names of files
//! ```
#![forbid(unsafe_code)]

pub mod bench;
pub mod data;
pub mod error;
pub mod eval;
pub mod format;
pub mod generate;
pub mod host;
pub mod model;
pub mod picture;
pub mod rng;
pub mod run;
pub mod session;
pub mod verify;

pub use error::{Error, Result};
