//! The `ironhorse` binary as users see it: its output, its files and its exit code.
#![allow(clippy::unwrap_used, clippy::panic)]

mod bad_files;
mod bad_input;
mod chat;
mod compare;
mod config;
mod convert;
mod data;
mod disk;
mod dpo;
mod dropout;
mod eval;
mod fetch;
mod generate;
mod newcomer;
mod paths;
mod pipes;
mod place;
mod prepare;
mod ranks;
mod recipes;
mod reports;
mod resume;
mod resume_check;
mod running;
mod schedules;
mod selftest;
#[cfg(debug_assertions)]
#[path = "../../../fetch/tests/server/mod.rs"]
mod server;
mod stops;
mod tokenizer;
mod train;
mod train_eval;
mod verify;

use place::Place;
