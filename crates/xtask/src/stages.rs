//! `cargo xtask test`: the stages, cheapest first, their times, and the counts.

use crate::args::{Args, unknown};
use crate::counts::{Counts, Dialect};
use crate::process::{output_of, run_counted, shown};
use crate::repo::{Profile, Repo};
use crate::report::{self, Done, seconds};
use crate::{kernels, out, pytest, python, torture};
use anyhow::{Context, Result, bail, ensure};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// Help of `cargo xtask test`.
pub const HELP: &str = "\
Runs all checks, in stages, and stops at the first that fails:

  fmt      cargo fmt --check
  clippy   cargo clippy on all targets, warnings are errors
  setup    the packages of the Python environment .venv, installed while fmt and clippy run (see cargo xtask setup)
  ruff     ruff check on the Python code
  ruff-fmt ruff format --check on the Python code
  mypy     type check of the Python package
  kernels  the CUDA kernels compiled for sm_80 and sm_90a (see cargo xtask kernels); needs no GPU
  test     unit and integration tests of all crates
  doctest  the examples in the documentation
  build    the ironhorse binary and the C library
  torture  10 training runs of that binary, killed at random moments and resumed (see cargo xtask torture)
  wheel    the Python package, built and installed into .venv
  pytest   the Python tests, and that binary against PyTorch

Binary and wheel are built like the tests (profile dev, optimised) and for the whole workspace, so that nothing is
compiled twice. At the end a table
shows the stages with their times; the last line is `N passed, N failed`, with `, N skipped` if any were skipped. A stage
that fails without counting tests counts as one failure.

Usage: cargo xtask test [--quick | --all] [--no-python] [--stage NAME]... [--json FILE]

  --quick        while editing: setup to clippy, then the unit tests that take seconds
  --all          kernels for all six architectures, 100 torture runs, binary and wheel in the release profile
  --no-python    skip setup, ruff, ruff-fmt, mypy, kernels, wheel and pytest
  --stage NAME   run only this stage; may be given several times
  --json FILE    write the table as JSON

Examples:
  cargo xtask test
  cargo xtask test --quick
  cargo xtask test --stage build --stage wheel --stage pytest";

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Quick,
    Usual,
    All,
}

impl Depth {
    /// The profile of the binary and the wheel.
    fn profile(self) -> Profile {
        if self == Self::All { Profile::Release } else { Profile::Dev }
    }

    fn torture_rounds(self) -> u64 {
        if self == Self::All { 100 } else { 10 }
    }
}

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stage {
    name: &'static str,
    python: bool,
    /// Whether it is part of `--quick`.
    quick: bool,
    work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Setup,
    Cargo(&'static [&'static str], Dialect),
    /// A Python module with its arguments.
    Lint(&'static str, &'static [&'static str]),
    Kernels,
    Tests,
    Build,
    Torture,
    Wheel,
    Pytest,
}

/// The seed of the random moments at which the torture stage kills a run.
const TORTURE_SEED: u64 = 1;
const CLIPPY: Work =
    Work::Cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], Dialect::Silent);
const DOCTESTS: Work = Work::Cargo(&["test", "--workspace", "--no-fail-fast", "--doc"], Dialect::Cargo);
/// All tests except the doctests, which are a separate stage; examples are built.
const TESTS: &[&str] = &["test", "--workspace", "--no-fail-fast", "--tests", "--examples"];
/// Unit tests only, without those of testkit: comparing the oracle with itself takes minutes.
const QUICK_TESTS: &[&str] =
    &["test", "--workspace", "--exclude", "ironhorse-testkit", "--no-fail-fast", "--lib", "--bins"];

const STAGES: [Stage; 13] = [
    Stage {
        name: "fmt",
        python: false,
        quick: true,
        work: Work::Cargo(&["fmt", "--all", "--check"], Dialect::Silent),
    },
    Stage { name: "clippy", python: false, quick: true, work: CLIPPY },
    // Installed since the beginning of the run, beside the stages above: see `python::Installing`.
    Stage { name: "setup", python: true, quick: true, work: Work::Setup },
    Stage { name: "ruff", python: true, quick: true, work: Work::Lint("ruff", &["check"]) },
    Stage { name: "ruff-fmt", python: true, quick: true, work: Work::Lint("ruff", &["format", "--check"]) },
    Stage { name: "mypy", python: true, quick: true, work: Work::Lint("mypy", &[]) },
    // NVRTC comes with the Python environment.
    Stage { name: "kernels", python: true, quick: false, work: Work::Kernels },
    Stage { name: "test", python: false, quick: true, work: Work::Tests },
    Stage { name: "doctest", python: false, quick: false, work: DOCTESTS },
    Stage { name: "build", python: false, quick: false, work: Work::Build },
    Stage { name: "torture", python: false, quick: false, work: Work::Torture },
    Stage { name: "wheel", python: true, quick: false, work: Work::Wheel },
    Stage { name: "pytest", python: true, quick: false, work: Work::Pytest },
];

/// The options of the command line.
struct Asked {
    stages: Vec<Stage>,
    depth: Depth,
    no_python: bool,
    json: Option<PathBuf>,
}

/// `cargo xtask test`
pub fn test(repo: &Repo, args: Args) -> Result<bool> {
    let Asked { stages, depth, no_python, json } = choose(args)?;
    let mut done: Vec<Done> = Vec::new();
    let setup = stages.iter().any(|stage| stage.work == Work::Setup);
    let mut installing = setup.then(|| python::Installing::start(repo)).transpose()?;
    for (i, stage) in stages.iter().enumerate() {
        out::bytes(format!("\n==> {}/{} {}: ", i + 1, stages.len(), stage.name).as_bytes());
        done.push(match installing.take_if(|_| stage.work == Work::Setup) {
            Some(installing) => run_stage(stage, || finish(installing)),
            None => run_stage(stage, || run_work(repo, stage.work, depth)),
        });
        if done.last().is_some_and(|one| !one.passed) {
            break;
        }
    }
    if let Some(installing) = installing {
        out::line("\nwaiting for the Python packages, which are still being installed");
        installing.finish()?;
    }
    let names: Vec<&'static str> = stages.iter().map(|stage| stage.name).collect();
    out::line(report::table(&done, &names));
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&report::json(&done, &names))?;
        std::fs::write(&path, text).with_context(|| format!("{}: cannot write", path.display()))?;
    }
    if no_python {
        out::line(
            "\nTHE PYTHON PART WAS LEFT OUT (--no-python): nothing was compared with PyTorch, no kernel was compiled, \
             no Python checked.",
        );
    }
    if depth == Depth::Quick {
        out::line("\nONLY THE QUICK CHECKS WERE RUN (--quick): run cargo xtask test before a commit");
    }
    let mut total = Counts::default();
    done.iter().for_each(|one| total += one.counts);
    out::line(format!("\n{total}"));
    Ok(done.iter().all(|one| one.passed))
}

/// Parses the options; stages are in their order.
fn choose(mut args: Args) -> Result<Asked> {
    let (mut depth, mut no_python, mut only, mut json) = (Depth::Usual, false, Vec::new(), None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" | "--all" => {
                ensure!(depth == Depth::Usual, "--quick and --all exclude each other");
                depth = if arg == "--all" { Depth::All } else { Depth::Quick };
            }
            "--no-python" => no_python = true,
            "--stage" => only.push(args.value("--stage")?),
            "--json" => json = Some(args.value("--json")?.into()),
            _ => return unknown(&arg),
        }
    }
    for name in &only {
        let Some(stage) = STAGES.iter().find(|stage| stage.name == name) else {
            let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
            bail!("unknown stage '{name}'; expected one of {}", names.join(", "));
        };
        ensure!(!(no_python && stage.python), "--no-python excludes --stage {name}: choose one of the two");
        ensure!(
            depth != Depth::Quick || stage.quick,
            "--quick excludes --stage {name}: choose one of the two"
        );
    }
    let wanted = |stage: &&Stage| {
        (only.is_empty() || only.iter().any(|name| name == stage.name))
            && !(no_python && stage.python)
            && (depth != Depth::Quick || stage.quick)
    };
    Ok(Asked { stages: STAGES.iter().filter(wanted).copied().collect(), depth, no_python, json })
}

/// The stage `setup`: the packages were installed meanwhile, and what remains is to wait.
fn finish(installing: python::Installing) -> Result<(bool, Counts)> {
    out::line("the Python environment .venv");
    Ok((installing.finish()?, Counts::default()))
}

fn run_stage(stage: &Stage, work: impl FnOnce() -> Result<(bool, Counts)>) -> Done {
    let (start, cpu) = (Instant::now(), report::children_cpu());
    let (passed, mut counts) = work().unwrap_or_else(|error| {
        out::line(format!("error: {error:#}"));
        (false, Counts::default())
    });
    if !passed && counts.failed == 0 {
        counts.failed = 1; // it did not compile or crashed: the last line must not say 0 failed
    }
    let time = start.elapsed();
    let verdict = if passed { "passed" } else { "FAILED" };
    out::line(format!("<== {} {verdict} in {}", stage.name, seconds(time)));
    let cpu = report::children_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    Done { name: stage.name, passed, time, cpu, counts }
}

/// Prints what the stage does and runs it; returns whether all passed, and the counts.
fn run_work(repo: &Repo, work: Work, depth: Depth) -> Result<(bool, Counts)> {
    let counted = |mut command: Command, dialect| {
        out::line(shown(&command));
        run_counted(&mut command, dialect)
    };
    let cargo = |args: &[&str]| {
        let mut command = repo.cargo();
        command.args(args);
        command
    };
    let profile = depth.profile();
    match work {
        Work::Setup => {
            out::line("the Python environment .venv");
            python::setup(repo).map(|()| (true, Counts::default()))
        }
        Work::Cargo(args, dialect) => counted(cargo(args), dialect),
        Work::Tests => {
            counted(cargo(if depth == Depth::Quick { QUICK_TESTS } else { TESTS }), Dialect::Cargo)
        }
        Work::Build => {
            counted(cargo(&["build", "--workspace", "--profile", profile.name()]), Dialect::Silent)
        }
        Work::Lint(module, args) => counted(lint(repo, module, args)?, Dialect::Lint),
        Work::Kernels if cfg!(target_os = "macos") => {
            out::line("skipped: NVRTC does not exist for this system");
            Ok((true, Counts { skipped: 1, ..Counts::default() }))
        }
        Work::Kernels => {
            let mut command = kernels::command(repo)?;
            command.args((depth == Depth::All).then_some("--all"));
            counted(command, Dialect::Kernels)
        }
        Work::Torture => {
            let flags = ["--device=cpu".to_owned()];
            let command =
                torture::command(&built(repo, profile)?, depth.torture_rounds(), TORTURE_SEED, &flags);
            counted(command, Dialect::Torture)
        }
        Work::Wheel => {
            out::line(format!("pip install . (profile {})", profile.name()));
            python::wheel(repo, profile).map(|()| (true, Counts::default()))
        }
        Work::Pytest => {
            out::line("pytest python/tests, in pieces");
            pytest::run(repo, &built(repo, profile)?)
        }
    }
}

/// The binary of the stage `build`.
fn built(repo: &Repo, profile: Profile) -> Result<PathBuf> {
    let binary = repo.binary(profile)?;
    let shown = binary.display();
    ensure!(binary.is_file(), "{shown} is not built: add --stage build");
    Ok(binary)
}

fn lint(repo: &Repo, module: &str, args: &[&str]) -> Result<Command> {
    repo.ensure_venv()?;
    let there = output_of(repo.python().args(["-c", &format!("import {module}")])).is_some();
    ensure!(there, "{module} is not in .venv yet: cargo xtask setup");
    let mut python = repo.python();
    python.args(["-m", module]).args(args);
    if std::io::stdout().is_terminal() {
        python.env("FORCE_COLOR", "1");
    }
    Ok(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(text: &str) -> Result<Vec<&'static str>> {
        let asked = choose(Args::new(text.split_whitespace().map(str::to_owned)))?;
        Ok(asked.stages.iter().map(|stage| stage.name).collect())
    }

    #[test]
    fn stages_are_chosen_in_their_order() {
        let all = [
            "fmt", "clippy", "setup", "ruff", "ruff-fmt", "mypy", "kernels", "test", "doctest", "build",
            "torture", "wheel", "pytest",
        ];
        assert_eq!(chosen("").unwrap(), all);
        assert_eq!(chosen("--all").unwrap(), all);
        assert_eq!(chosen("--no-python").unwrap(), ["fmt", "clippy", "test", "doctest", "build", "torture"]);
        let quick = ["fmt", "clippy", "setup", "ruff", "ruff-fmt", "mypy", "test"];
        assert_eq!(chosen("--quick --json x").unwrap(), quick);
        assert_eq!(chosen("--stage pytest --stage fmt").unwrap(), ["fmt", "pytest"]);
        assert!(all.iter().all(|name| HELP.contains(&format!("\n  {name} "))), "the help lists every stage");
    }

    #[test]
    fn only_everything_is_built_as_released() {
        assert_eq!([Depth::Quick, Depth::Usual].map(Depth::profile), [Profile::Dev; 2]);
        assert_eq!(Depth::All.profile(), Profile::Release);
        for depth in [Depth::Usual, Depth::All] {
            let named = format!("{} t", depth.torture_rounds());
            assert!(HELP.contains(&named), "the help says {named}");
        }
    }

    #[test]
    fn wrong_flags_are_refused() {
        for (text, want) in [
            ("--stage lint", "unknown stage 'lint'; expected one of fmt, clippy,"),
            ("--stage", "--stage needs a value"),
            ("--fast", "unknown argument '--fast'"),
            ("--quick --all", "--quick and --all exclude each other"),
            ("--no-python --stage pytest", "--no-python excludes --stage pytest"),
            ("--quick --stage kernels", "--quick excludes --stage kernels"),
        ] {
            let error = chosen(text).unwrap_err().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
        }
    }
}
