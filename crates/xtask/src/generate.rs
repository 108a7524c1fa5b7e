//! Files that are made of the table of eager ops.

use crate::args::{Args, unknown};
use crate::process::run;
use crate::repo::Repo;
use anyhow::Result;

pub const HELP: &str = "\
Writes the op section of crates/capi/include/ironhorse.h and python/ironhorse/ops/__init__.pyi, which follow from the table of
ops in crates/ironhorse/src/ops/entries.rs.

Usage: cargo xtask generate [--check]

  --check   write nothing, fail if a file is not up to date (as cargo test -p ironhorse --test generated does)";

/// `cargo xtask generate`
pub fn generate(repo: &Repo, mut args: Args) -> Result<bool> {
    let check = match args.next().as_deref() {
        None => false,
        Some("--check") => true,
        Some(other) => return unknown(other),
    };
    args.end()?;
    let mut cargo = repo.cargo();
    cargo.args(["test", "--quiet", "-p", "ironhorse", "--test", "generated"]);
    run(cargo.env("IRONHORSE_BLESS", if check { "0" } else { "1" }))
}
