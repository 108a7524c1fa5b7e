//! One file per command.

mod batches;
pub mod bench;
pub mod chat;
pub mod choices;
pub mod compare;
pub mod convert;
pub mod data;
pub mod doctor;
pub mod eval;
pub mod fetch;
pub mod generate;
#[cfg(feature = "serve")]
mod key;
pub mod model;
pub mod plan;
pub mod prepare;
pub mod profile;
pub mod report;
pub mod resume_check;
mod runs;
pub mod selftest;
#[cfg(feature = "serve")]
pub mod serve;
mod speaking;
pub mod tokenizer;
pub mod train;
pub mod verify;
pub mod watch;
mod workload;
