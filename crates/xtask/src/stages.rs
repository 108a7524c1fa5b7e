//! `cargo xtask test`: the stages, cheapest first, their times, and the counts.

use crate::args::{Args, unknown};
use crate::counts::{Counts, Dialect};
use crate::process::{output_of, run_counted, shown};
use crate::repo::{Repo, python_of};
use crate::{kernels, out, python, torture};
use anyhow::{Result, bail, ensure};
use std::io::IsTerminal;
use std::process::Command;
use std::time::{Duration, Instant};

/// Help of `cargo xtask test`.
pub const HELP: &str = "\
Every check there is. Sets up the Python environment .venv the first time, then runs the stages in this order and
stops at the first that fails:

  setup    the Python environment (see cargo xtask setup)
  fmt      cargo fmt --check
  ruff     the Python code, linted
  ruff-fmt the same, its formatting
  mypy     the types of the Python package
  clippy   cargo clippy on all targets, warnings are errors
  kernels  every CUDA kernel compiled for every architecture (see cargo xtask kernels); needs no GPU
  test     unit and integration tests of all crates
  doctest  the examples in the documentation
  build    the ironhorse binary, release
  torture  20 training runs of it, killed at random moments and resumed (see cargo xtask torture)
  wheel    the Python package, built and installed into .venv
  pytest   the Python tests, and that binary against PyTorch

The last line is `N passed, N failed`, with `, N skipped` if any were; a stage that fails without counting tests counts
as one failed.

Usage: cargo xtask test [--no-python] [--stage NAME]...

  --no-python    leave setup, ruff, ruff-fmt, mypy, kernels, wheel and pytest out
  --stage NAME   run only this stage; may be given several times

Examples:
  cargo xtask test
  cargo xtask test --stage build --stage wheel --stage pytest";

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stage {
    name: &'static str,
    python: bool,
    work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Setup,
    Cargo(&'static [&'static str], Dialect),
    /// A Python module with its arguments.
    Lint(&'static str, &'static [&'static str]),
    Kernels,
    Torture,
    Wheel,
    Pytest,
}

/// Rounds of the torture stage, and the seed of their moments.
const TORTURE: (u64, u64) = (20, 1);

const STAGES: [Stage; 13] = [
    Stage { name: "setup", python: true, work: Work::Setup },
    Stage { name: "fmt", python: false, work: Work::Cargo(&["fmt", "--all", "--check"], Dialect::Silent) },
    Stage { name: "ruff", python: true, work: Work::Lint("ruff", &["check"]) },
    Stage { name: "ruff-fmt", python: true, work: Work::Lint("ruff", &["format", "--check"]) },
    Stage { name: "mypy", python: true, work: Work::Lint("mypy", &[]) },
    Stage {
        name: "clippy",
        python: false,
        work: Work::Cargo(
            &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
            Dialect::Silent,
        ),
    },
    // Its compiler comes with the Python environment.
    Stage { name: "kernels", python: true, work: Work::Kernels },
    Stage {
        name: "test",
        python: false,
        // Not the doctests, which are a stage of their own; examples are built.
        work: Work::Cargo(
            &["test", "--workspace", "--no-fail-fast", "--tests", "--examples"],
            Dialect::Cargo,
        ),
    },
    Stage {
        name: "doctest",
        python: false,
        work: Work::Cargo(&["test", "--workspace", "--no-fail-fast", "--doc"], Dialect::Cargo),
    },
    Stage {
        name: "build",
        python: false,
        work: Work::Cargo(&["build", "--release", "--package", "ironhorse-cli"], Dialect::Silent),
    },
    Stage { name: "torture", python: false, work: Work::Torture },
    Stage { name: "wheel", python: true, work: Work::Wheel },
    Stage { name: "pytest", python: true, work: Work::Pytest },
];

/// A stage that was run.
struct Done {
    name: &'static str,
    passed: bool,
    time: Duration,
    counts: Counts,
}

/// `cargo xtask test`
pub fn test(repo: &Repo, args: Args) -> Result<bool> {
    let (stages, no_python) = choose(args)?;
    let mut done: Vec<Done> = Vec::new();
    for (i, stage) in stages.iter().enumerate() {
        let one = run_stage(repo, stage, (i + 1, stages.len()));
        let passed = one.passed;
        done.push(one);
        if !passed {
            break;
        }
    }
    out::line(table(&done, &stages));
    if no_python {
        out::line(
            "\nTHE PYTHON PART WAS LEFT OUT (--no-python): nothing was compared with PyTorch, no kernel was compiled, \
             no Python checked.",
        );
    }
    let mut total = Counts::default();
    done.iter().for_each(|one| total += one.counts);
    out::line(format!("\n{total}"));
    Ok(done.iter().all(|one| one.passed))
}

/// The stages asked for, in their order, and whether the Python part is left out.
fn choose(mut args: Args) -> Result<(Vec<Stage>, bool)> {
    let (mut no_python, mut only) = (false, Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--no-python" => no_python = true,
            "--stage" => only.push(args.value("--stage")?),
            _ => return unknown(&arg),
        }
    }
    for name in &only {
        let Some(stage) = STAGES.iter().find(|stage| stage.name == name) else {
            let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
            bail!("there is no stage '{name}'; there are {}", names.join(", "));
        };
        ensure!(!(no_python && stage.python), "--no-python leaves out --stage {name}: choose one of the two");
    }
    let wanted = |stage: &&Stage| {
        (only.is_empty() || only.iter().any(|name| name == stage.name)) && !(no_python && stage.python)
    };
    Ok((STAGES.iter().filter(wanted).copied().collect(), no_python))
}

fn run_stage(repo: &Repo, stage: &Stage, (number, of): (usize, usize)) -> Done {
    let start = Instant::now();
    let announce = |what: String| out::line(format!("\n==> {number}/{of} {}: {what}", stage.name));
    let outcome = match stage.work {
        Work::Setup => {
            announce("the Python environment .venv".into());
            python::setup(repo).map(|()| (true, Counts::default()))
        }
        Work::Cargo(args, dialect) => {
            let mut command = repo.cargo();
            command.args(args);
            announce(shown(&command));
            run_counted(&mut command, dialect)
        }
        Work::Lint(module, args) => lint(repo, module, args).and_then(|mut command| {
            announce(shown(&command));
            run_counted(&mut command, Dialect::Lint)
        }),
        Work::Kernels if cfg!(target_os = "macos") => {
            announce("left out: NVRTC does not exist for this system".into());
            Ok((true, Counts { skipped: 1, ..Counts::default() }))
        }
        Work::Kernels => kernels::command(repo).and_then(|mut command| {
            announce("cargo xtask kernels".into());
            run_counted(&mut command, Dialect::Kernels)
        }),
        Work::Torture => repo.binary().and_then(|binary| {
            ensure!(
                binary.is_file(),
                "the binary is not built: cargo xtask test --stage build --stage torture"
            );
            let mut command = torture::command(&binary, TORTURE.0, TORTURE.1, &["--device=cpu".to_owned()]);
            announce(shown(&command));
            run_counted(&mut command, Dialect::Torture)
        }),
        Work::Wheel => {
            announce("pip install .".into());
            python::wheel(repo).map(|()| (true, Counts::default()))
        }
        Work::Pytest => pytest(repo).and_then(|mut command| {
            announce(shown(&command));
            run_counted(&mut command, Dialect::Pytest)
        }),
    };
    let (passed, mut counts) = outcome.unwrap_or_else(|error| {
        out::line(format!("error: {error:#}"));
        (false, Counts::default())
    });
    if !passed && counts.failed == 0 {
        counts.failed = 1; // a program that did not compile, or died: the last line must not say 0 failed
    }
    let time = start.elapsed();
    let verdict = if passed { "passed" } else { "FAILED" };
    out::line(format!("<== {} {verdict} in {}", stage.name, seconds(time)));
    Done { name: stage.name, passed, time, counts }
}

fn lint(repo: &Repo, module: &str, args: &[&str]) -> Result<Command> {
    ensure!(python_of(&repo.venv()).exists(), "there is no .venv yet: cargo xtask setup");
    let there = output_of(repo.python().args(["-c", &format!("import {module}")])).is_some();
    ensure!(there, "{module} is not in .venv yet: cargo xtask setup");
    let mut python = repo.python();
    python.args(["-m", module]).args(args);
    if std::io::stdout().is_terminal() {
        python.env("FORCE_COLOR", "1");
    }
    Ok(python)
}

fn pytest(repo: &Repo) -> Result<Command> {
    let binary = repo.binary()?;
    ensure!(binary.is_file(), "the binary is not built: cargo xtask test --stage build --stage pytest");
    ensure!(python_of(&repo.venv()).exists(), "there is no .venv yet: cargo xtask setup");
    let mut python = repo.python();
    python.args(["-m", "pytest", "python/tests"]).env("IRONHORSE_BIN", binary);
    if std::io::stdout().is_terminal() {
        python.arg("--color=yes");
    }
    Ok(python)
}

/// A row for each stage, those that were not reached too.
fn table(done: &[Done], stages: &[Stage]) -> String {
    let mut text = format!("\n{:<10}{:<10}{:>10}   tests\n", "stage", "result", "time");
    for stage in stages {
        let row = match done.iter().find(|one| one.name == stage.name) {
            Some(one) => {
                let verdict = if one.passed { "passed" } else { "FAILED" };
                let tests =
                    if one.counts == Counts::default() { String::new() } else { one.counts.to_string() };
                format!("{:<10}{verdict:<10}{:>10}   {tests}", one.name, seconds(one.time))
            }
            None => format!("{:<10}{:<10}", stage.name, "not run"),
        };
        text += row.trim_end();
        text.push('\n');
    }
    let total: Duration = done.iter().map(|one| one.time).sum();
    text + &format!("{:<20}{:>10}", "total", seconds(total))
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(text: &str) -> Result<(Vec<&'static str>, bool)> {
        let (stages, no_python) = choose(Args::new(text.split_whitespace().map(str::to_owned)))?;
        Ok((stages.iter().map(|stage| stage.name).collect(), no_python))
    }

    #[test]
    fn stages_are_chosen_in_their_order() {
        let all = [
            "setup", "fmt", "ruff", "ruff-fmt", "mypy", "clippy", "kernels", "test", "doctest", "build",
            "torture", "wheel", "pytest",
        ];
        assert_eq!(chosen("").unwrap(), (all.to_vec(), false));
        assert_eq!(
            chosen("--no-python").unwrap(),
            (vec!["fmt", "clippy", "test", "doctest", "build", "torture"], true)
        );
        assert_eq!(chosen("--stage pytest --stage fmt").unwrap(), (vec!["fmt", "pytest"], false));
        assert!(all.iter().all(|name| HELP.contains(&format!("\n  {name} "))), "the help lists every stage");
    }

    #[test]
    fn wrong_flags_are_refused() {
        for (text, want) in [
            ("--stage lint", "there is no stage 'lint'; there are setup, fmt,"),
            ("--stage", "--stage needs a value"),
            ("--fast", "unknown argument '--fast'"),
            ("--no-python --stage pytest", "--no-python leaves out --stage pytest"),
        ] {
            let error = chosen(text).unwrap_err().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
        }
    }

    #[test]
    fn the_table_shows_what_was_not_reached() {
        let counts = Counts { passed: 5, failed: 1, skipped: 0 };
        let done = [
            Done { name: "fmt", passed: true, time: Duration::from_millis(1500), counts: Counts::default() },
            Done { name: "test", passed: false, time: Duration::from_secs(62), counts },
        ];
        let stages = STAGES.map(|stage| stage.name);
        let stages =
            ["fmt", "test", "pytest"].map(|name| STAGES[stages.iter().position(|&s| s == name).unwrap()]);
        let want = "
stage     result          time   tests
fmt       passed         1.5 s
test      FAILED        62.0 s   5 passed, 1 failed
pytest    not run
total                   63.5 s";
        assert_eq!(table(&done, &stages), want);
    }
}
