//! The `ironhorse` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(ironhorse_cli::main_with(std::env::args_os()))
}
