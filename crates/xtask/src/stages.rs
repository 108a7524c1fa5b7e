//! `cargo xtask test`: the stages, cheapest first, their times, and the counts.

use crate::args::{Args, unknown};
use crate::counts::{Counts, Dialect};
use crate::process::{captured, output_of, run_counted, shown};
use crate::repo::{Profile, Repo};
use crate::report::{self, Done, seconds};
use crate::{kernels, out, pytest, python, torture};
use anyhow::{Context, Result, bail, ensure};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::time::Instant;

/// Help of `cargo xtask test`.
pub const HELP: &str = "\
Runs all checks, in stages, and stops at the first that fails:

  fmt      cargo fmt --check
  clippy   cargo clippy on all targets, warnings are errors
  test     unit and integration tests of all crates
  doctest  the examples in the documentation
  build    the ironhorse binary and the C library
  torture  10 training runs of that binary, killed at random moments and resumed (see cargo xtask torture)
  setup    the packages of the Python environment .venv (see cargo xtask setup)
  ruff     ruff check on the Python code
  ruff-fmt ruff format --check on the Python code
  mypy     type check of the Python package
  kernels  the CUDA kernels compiled for sm_80 and sm_90a (see cargo xtask kernels); needs no GPU
  wheel    the Python package, built and installed into .venv
  pytest   the Python tests, and that binary against PyTorch

The stages setup to mypy run beside those of Rust from the beginning; their output is shown when each has ended. Binary
and wheel are built like the tests (profile dev, optimised) and for the whole workspace, so that nothing is compiled
twice. At the end a table shows the stages with their times; the last line is `N passed, N failed`, with `, N skipped` if
any were skipped. A stage that fails without counting tests counts as one failure.

Usage: cargo xtask test [--quick | --all] [--no-python] [--stage NAME]... [--json FILE]

  --quick        while editing: the stages up to test, with the unit tests that take seconds, and setup to mypy
  --all          all kernels for all six architectures, 100 torture runs, binary and wheel in the release profile
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
    /// Whether it runs beside the others, after those of its kind: one core does that while cargo links or waits.
    beside: bool,
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
    Stage::cargo("fmt", Work::Cargo(&["fmt", "--all", "--check"], Dialect::Silent)).quick(),
    Stage::cargo("clippy", CLIPPY).quick(),
    Stage::cargo("test", Work::Tests).quick(),
    Stage::cargo("doctest", DOCTESTS),
    Stage::cargo("build", Work::Build),
    Stage::cargo("torture", Work::Torture),
    Stage::beside("setup", Work::Setup),
    Stage::beside("ruff", Work::Lint("ruff", &["check"])),
    Stage::beside("ruff-fmt", Work::Lint("ruff", &["format", "--check"])),
    Stage::beside("mypy", Work::Lint("mypy", &[])),
    // NVRTC comes with the Python environment.
    Stage::python("kernels", Work::Kernels),
    Stage::python("wheel", Work::Wheel),
    Stage::python("pytest", Work::Pytest),
];

impl Stage {
    const fn cargo(name: &'static str, work: Work) -> Self {
        Self { name, python: false, quick: false, beside: false, work }
    }

    const fn python(name: &'static str, work: Work) -> Self {
        Self { python: true, ..Self::cargo(name, work) }
    }

    const fn beside(name: &'static str, work: Work) -> Self {
        Self { beside: true, quick: true, ..Self::python(name, work) }
    }

    const fn quick(self) -> Self {
        Self { quick: true, ..self }
    }
}

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
    let done = run_stages(repo, &stages, depth);
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

/// Runs the stages until one fails: a thread those that run beside the others, this one the others.
fn run_stages(repo: &Repo, stages: &[Stage], depth: Depth) -> Vec<Done> {
    let (beside, in_order): (Vec<Stage>, Vec<Stage>) = stages.iter().partition(|stage| stage.beside);
    std::thread::scope(|scope| {
        let (ended, besides) = mpsc::channel();
        scope.spawn(move || run_beside(repo, &beside, &ended));
        let mut done: Vec<Done> = Vec::new();
        for (i, stage) in in_order.iter().enumerate() {
            // a stage of Python needs what the others install
            if stage.python {
                done.extend(besides.iter().map(show));
            } else {
                done.extend(besides.try_iter().map(show));
            }
            if done.iter().any(|one| !one.passed) {
                break;
            }
            out::bytes(format!("\n==> {}/{} {}: ", i + 1, in_order.len(), stage.name).as_bytes());
            done.push(run_stage(stage, || run_work(repo, stage.work, depth)));
        }
        done.extend(besides.iter().map(show));
        done
    })
}

/// A stage that ran beside others, and what it printed.
type Ended = (Done, String);

fn run_beside(repo: &Repo, stages: &[Stage], ended: &mpsc::Sender<Ended>) {
    for stage in stages {
        let start = Instant::now();
        let (passed, text) = match beside_command(repo, stage.work) {
            Ok(mut command) => captured(&mut command)
                .map(|(passed, text)| (passed, format!("{}\n{text}", shown(&command))))
                .unwrap_or_else(|error| (false, format!("error: {error:#}\n"))),
            Err(error) => (false, format!("error: {error:#}\n")),
        };
        let mut counts = Counts::default();
        text.lines().for_each(|line| Dialect::Lint.read(line, &mut counts));
        counts.failed = counts.failed.max(usize::from(!passed));
        let done = Done { name: stage.name, passed, time: start.elapsed(), cpu: None, beside: true, counts };
        if ended.send((done, text)).is_err() || !passed {
            return;
        }
    }
}

/// The stage as a program of its own, whose output can be kept until it has ended.
fn beside_command(repo: &Repo, work: Work) -> Result<Command> {
    match work {
        Work::Setup => Ok(python::packages_command(repo)),
        Work::Lint(module, args) => lint(repo, module, args),
        other => bail!("{other:?} does not run beside others"),
    }
}

/// Prints what a stage that ran beside others printed.
fn show((done, text): Ended) -> Done {
    let verdict = if done.passed { "passed" } else { "FAILED" };
    let time = seconds(done.time);
    out::line(format!("\n==> {}, beside the others: {text}<== {} {verdict} in {time}", done.name, done.name));
    done
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
    Done { name: stage.name, passed, time, cpu, beside: false, counts }
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
        Work::Setup | Work::Lint(..) => counted(beside_command(repo, work)?, Dialect::Lint),
        Work::Cargo(args, dialect) => counted(cargo(args), dialect),
        Work::Tests => {
            counted(cargo(if depth == Depth::Quick { QUICK_TESTS } else { TESTS }), Dialect::Cargo)
        }
        Work::Build => {
            counted(cargo(&["build", "--workspace", "--profile", profile.name()]), Dialect::Silent)
        }
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
            "fmt", "clippy", "test", "doctest", "build", "torture", "setup", "ruff", "ruff-fmt", "mypy",
            "kernels", "wheel", "pytest",
        ];
        assert_eq!(chosen("").unwrap(), all);
        assert_eq!(chosen("--all").unwrap(), all);
        assert_eq!(chosen("--no-python").unwrap(), ["fmt", "clippy", "test", "doctest", "build", "torture"]);
        let quick = ["fmt", "clippy", "test", "setup", "ruff", "ruff-fmt", "mypy"];
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
