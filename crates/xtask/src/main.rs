//! `cargo xtask`: the developer commands. It has few dependencies, so that it builds in seconds on a clean checkout;
//! the CUDA engine is one of them because of its kernels.
#![forbid(unsafe_code)]

mod args;
mod bundle;
mod changed;
mod compile;
mod counts;
mod generate;
mod gpu_tests;
mod jobs;
mod kernel_table;
mod kernels;
mod lanes;
mod out;
mod process;
mod ptxas;
mod pytest;
mod python;
mod repo;
mod report;
mod rust_tests;
mod scratch;
mod stages;
mod tools;
mod torture;

use crate::args::Args;
use crate::repo::Repo;
use anyhow::{Result, bail};
use std::process::ExitCode;

/// One command: its name, its line in the list of commands, its help, and its function, which returns whether it
/// passed.
struct Command {
    name: &'static str,
    summary: &'static str,
    help: &'static str,
    run: fn(&Repo, Args) -> Result<bool>,
}

const COMMANDS: [Command; 9] = [
    Command {
        name: "test",
        summary: "all checks: fmt, clippy, tests, doctests, torture, kernels, ruff, mypy, pytest",
        help: stages::HELP,
        run: stages::test,
    },
    Command {
        name: "setup",
        summary: "only the Python environment .venv",
        help: python::HELP,
        run: python::setup_command,
    },
    Command {
        name: "kernels",
        summary: "every CUDA kernel compiled, for two architectures or with --all for six: registers, shared memory, spills",
        help: kernels::HELP,
        run: kernels::run,
    },
    Command {
        name: "generate",
        summary: "the C header and the Python stub that follow from the table of ops",
        help: generate::HELP,
        run: generate::generate,
    },
    Command {
        name: "gpu-bundle",
        summary: "one folder with everything needed for a run on a GPU machine",
        help: bundle::HELP,
        run: bundle::run,
    },
    Command {
        name: "torture",
        summary: "training runs killed at random moments, resumed, compared byte by byte",
        help: torture::HELP,
        run: torture::torture,
    },
    Command {
        name: "deny",
        summary: "licences, sources and advisories of the dependencies",
        help: tools::DENY_HELP,
        run: tools::deny,
    },
    Command {
        name: "fuzz",
        summary: "the fuzz targets of fuzz/, one per reader of a file or a request",
        help: tools::FUZZ_HELP,
        run: tools::fuzz,
    },
    Command {
        name: "bench",
        summary: "the same training step in ironhorse and in PyTorch, timed",
        help: tools::BENCH_HELP,
        run: tools::bench,
    },
];

fn overview() -> String {
    let list: String = COMMANDS.iter().map(|c| format!("  {:<12}{}\n", c.name, c.summary)).collect();
    format!(
        "Developer commands of ironhorse.\n\nUsage: cargo xtask COMMAND [--help]\n\n{list}\n\
         Exit code: 0 passed, 1 a check failed, 2 could not run."
    )
}

fn run() -> Result<bool> {
    let mut args = Args::new(std::env::args().skip(1));
    let name = match args.next() {
        None => {
            out::line(overview());
            bail!("no command given");
        }
        Some(name) if matches!(name.as_str(), "-h" | "--help" | "help") => {
            out::line(overview());
            return Ok(true);
        }
        Some(name) => name,
    };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
        bail!("unknown command '{name}'; expected one of {}", names.join(", "));
    };
    if args.asks_for_help() {
        out::line(command.help);
        return Ok(true);
    }
    (command.run)(&Repo::find()?, args)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
