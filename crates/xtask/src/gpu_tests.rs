//! The Rust tests that need a GPU, as programs for `cargo xtask gpu-bundle`.

use crate::compile::{Messages, Program, compile};
use crate::repo::{Compiler, Repo};
use crate::rust_tests::{IN_FULL, has_ignored};
use anyhow::{Result, ensure};

/// Packages with tests marked `#[ignore = "needs a GPU"]`.
const PACKAGES: [&str; 2] = ["ironhorse-cuda", "ironhorse"];

/// Builds the tests and returns the programs that contain tests that need a GPU.
pub fn build(repo: &Repo) -> Result<Vec<Program>> {
    let packages = PACKAGES.iter().flat_map(|name| ["--package", name]);
    let args: Vec<&str> = ["test", "--no-run", "--lib", "--tests"].into_iter().chain(packages).collect();
    let (passed, Messages { mut programs, .. }) = compile(repo, Compiler::Rustc, &args)?;
    ensure!(passed, "`cargo {}` failed (its messages are above)", args.join(" "));
    programs.retain(|program| has_ignored(program, &["--skip", IN_FULL]));
    ensure!(
        !programs.is_empty(),
        "no test of {} is marked #[ignore = \"needs a GPU\"]",
        PACKAGES.join(" and ")
    );
    Ok(programs)
}
