//! Models, file formats, data, the training loop and verification. Names no engine.
#![forbid(unsafe_code)]

pub mod bench;
pub mod data;
pub mod error;
pub mod format;
pub mod generate;
pub mod heatmap;
mod master;
pub mod metrics;
pub mod model;
pub mod plot;
pub mod rng;
pub mod run;
pub mod sample;
pub mod schedule;
pub mod session;
pub mod verify;

pub use error::{Error, Result};
