//! Test support for engines and models: an oracle that runs any program in f64, conformance cases for every op with
//! awkward sizes, and finite differences that check the oracle's gradients.
//!
//! An engine crate runs the [`Suite`] from one test; here on the oracle itself, and only a few cases of two ops:
//!
//! ```
//! use ironhorse_testkit::{Mode, OracleEngine, Suite};
//!
//! let suite = Suite { quick: true, ops: vec!["add".into(), "adamw".into()], ..Suite::new(Mode::F32) };
//! let summary = suite.run(&mut OracleEngine::new(), &mut |_, _| ());
//! summary.assert_ok();
//! ```
//!
//! A model's tests call [`check_program_gradients`] on its training program.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a panic is a failed test
#![allow(clippy::needless_range_loop)] // oracle loops are written like the formulas they implement

mod allocations;
pub mod case;
mod checksum;
mod conformance;
mod finite;
mod oracle;
mod report;
mod residual;
mod rng;
mod suite;
mod threads;
mod tolerance;
mod update;
mod wrapped;

pub use case::{Case, Data, Drawn, Earlier, FP8_OPS, Input, Kit, all_cases, cases_in, refusals, refusals_in};
pub use checksum::crc32;
pub use conformance::{Check, check_against, check_engine, check_refusal};
pub use finite::{GradMismatch, OpGradients, ProgramGradients, check_op_gradients, check_program_gradients};
pub use oracle::{OracleEngine, activation};
pub use report::{Fault, Mismatch, Report};
pub use residual::check_residual;
pub use rng::Rng;
pub use suite::{Mode, Row, Suite, Summary};
pub use threads::thread_ranks;
pub use tolerance::{Terms, tolerance};
pub use wrapped::{Hook, Wrapped};
