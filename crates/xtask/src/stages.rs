//! `cargo xtask test`: the stages and what they do.

use crate::args::{Args, unknown};
use crate::compile::compile;
use crate::counts::{Counts, Dialect};
use crate::lanes::run_stages;
use crate::process::{output_of, run_counted, shown};
use crate::repo::{Compiler, Profile, Repo};
use crate::{changed, kernels, out, pytest, python, report, rust_tests, torture};
use anyhow::{Context, Result, bail, ensure};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// Help of `cargo xtask test`.
pub const HELP: &str = "\
Runs all checks, in stages, and stops at the first that fails:

  fmt      cargo fmt --check
  build    all targets, compiled once for all stages and linted by clippy; warnings are errors
  test     unit and integration tests of all crates
  wheel    the Python package, built and installed into .venv
  pytest   the Python tests, and that binary against PyTorch

Beside these, from the beginning, as far as they need nothing of them; their output is shown when each has ended:

  setup    the packages of the Python environment .venv (see cargo xtask setup)
  ruff     ruff check on the Python code
  ruff-fmt ruff format --check on the Python code
  mypy     type check of the Python package
  kernels  the CUDA kernels compiled for sm_80 and sm_90a (see cargo xtask kernels); needs no GPU
  doctest  the examples in the documentation
  torture  10 training runs of the binary, killed at random moments and resumed (see cargo xtask torture)
  torture-ranks  2 runs of four ranks, one of which is killed; other numbers of them go on
  doc      only with --all: the documentation of every item, private ones too, without a warning

Tests keep temporary files in memory (/dev/shm) if 8 GiB are free, or where TMPDIR says.

Binary and wheel are built like the tests (profile dev, optimised) and for the whole workspace, so that nothing is compiled
twice. At the end a table shows the stages with their times; the last line is `N passed, N failed`, with `, N skipped` if
any were skipped and `, N only with --all` if any were left out. A stage that fails without counting tests counts as one
failure.

Usage: cargo xtask test [--quick | --all] [--no-python] [--stage NAME]... [--json FILE]

  --quick        while editing: fmt, build, test, and setup to mypy; of the tests the unit tests, those of cpu, testkit, text and
                 train where the crate has changed since the last commit, and every op in ironhorse selftest --quick
  --all          before a release: the tests that take minutes, all kernels for all six architectures, 100 torture runs and 20 of ranks;
                 tests compiled by rustc itself, binary and wheel in the release profile
  --no-python    skip setup, ruff, ruff-fmt, mypy, kernels, wheel and pytest
  --stage NAME   run only this stage; may be given several times
  --json FILE    write the table as JSON

Examples:
  cargo xtask test
  cargo xtask test --quick
  cargo xtask test --stage build --stage wheel --stage pytest";

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    Quick,
    Usual,
    All,
}

impl Depth {
    /// The profile of the binary and the wheel.
    fn profile(self) -> Profile {
        if self == Self::All { Profile::Release } else { Profile::Dev }
    }

    /// What compiles the tests. Before a release they have every check of a debug build.
    fn compiler(self) -> Compiler {
        if self == Self::All { Compiler::Rustc } else { Compiler::Clippy }
    }

    fn torture_rounds(self) -> u64 {
        if self == Self::All { 100 } else { 10 }
    }

    /// Four processes share the cores, so a round takes longer.
    fn torture_rounds_of_ranks(self) -> u64 {
        if self == Self::All { 20 } else { 2 }
    }

    /// The cargo commands that compile the tests: everything, or in the inner loop what it takes for what has changed.
    fn tests(self, repo: &Repo) -> Vec<Vec<String>> {
        match self {
            Self::Quick => changed::quick(repo).into(),
            Self::Usual | Self::All => {
                vec![["build", "--workspace", "--all-targets"].map(str::to_owned).into()]
            }
        }
    }
}

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub python: bool,
    /// Whether it is part of `--quick`.
    pub quick: bool,
    /// Whether it runs beside the others, after the stages of its kind: one core is enough for that while cargo links or waits.
    pub beside: bool,
    /// Whether it is run only with `--all`, or where it is named.
    pub in_full: bool,
    /// The stages whose results it uses.
    pub needs: &'static [&'static str],
    pub work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Setup,
    Fmt,
    Doctest,
    Doc,
    /// A Python module with its arguments.
    Lint(&'static str, &'static [&'static str]),
    Kernels,
    Build,
    Tests,
    Torture,
    TortureRanks,
    Wheel,
    Pytest,
}

/// The seed of the random moments at which the torture stage kills a run.
const TORTURE_SEED: u64 = 1;

pub const STAGES: [Stage; 14] = [
    Stage::cargo("fmt", Work::Fmt).quick(),
    Stage::cargo("build", Work::Build).quick(),
    Stage::cargo("test", Work::Tests).quick(),
    Stage::beside("setup", Work::Setup, &[]).quick().of_python(),
    Stage::beside("ruff", Work::Lint("ruff", &["check"]), &["setup"]).quick().of_python(),
    Stage::beside("ruff-fmt", Work::Lint("ruff", &["format", "--check"]), &["setup"]).quick().of_python(),
    Stage::beside("mypy", Work::Lint("mypy", &[]), &["setup"]).quick().of_python(),
    // NVRTC comes with the Python environment.
    Stage::beside("kernels", Work::Kernels, &["setup"]).of_python(),
    Stage::beside("doctest", Work::Doctest, &["build"]),
    Stage::beside("torture", Work::Torture, &["build"]),
    Stage::beside("torture-ranks", Work::TortureRanks, &["build"]),
    Stage { in_full: true, ..Stage::beside("doc", Work::Doc, &["build"]) },
    Stage { needs: &["setup"], ..Stage::cargo("wheel", Work::Wheel).of_python() },
    Stage { needs: &["setup"], ..Stage::cargo("pytest", Work::Pytest).of_python() },
];

impl Stage {
    const fn cargo(name: &'static str, work: Work) -> Self {
        Self { name, python: false, quick: false, beside: false, in_full: false, needs: &[], work }
    }

    const fn beside(name: &'static str, work: Work, needs: &'static [&'static str]) -> Self {
        Self { beside: true, needs, ..Self::cargo(name, work) }
    }

    const fn of_python(self) -> Self {
        Self { python: true, ..self }
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
    let start = Instant::now();
    let done = run_stages(repo, &stages, depth);
    let total = start.elapsed();
    let names: Vec<&'static str> = stages.iter().map(|stage| stage.name).collect();
    out::line(report::table(&done, &names, total));
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&report::json(&done, &names, total))?;
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
    let mut counts = Counts::default();
    done.iter().for_each(|one| counts += one.counts);
    out::line(format!("\n{counts}"));
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
        let named = only.iter().any(|name| name == stage.name);
        (named || only.is_empty() && (depth == Depth::All || !stage.in_full))
            && !(no_python && stage.python)
            && (depth != Depth::Quick || stage.quick)
    };
    Ok(Asked { stages: STAGES.iter().filter(wanted).copied().collect(), depth, no_python, json })
}

/// Prints what the stage does and runs it; returns whether all passed, and the counts.
pub fn run_work(repo: &Repo, work: Work, depth: Depth) -> Result<(bool, Counts)> {
    match work {
        Work::Build => build(repo, depth).map(|passed| (passed, Counts::default())),
        Work::Tests => {
            let (compiler, mut programs) = (depth.compiler(), Vec::new());
            for args in depth.tests(repo) {
                let (compiled, messages) = compile(repo, compiler, &args)?;
                ensure!(compiled, "the tests do not compile without warnings (the messages are above)");
                programs.extend(messages.programs);
            }
            out::line(format!("{} programs, {} at a time", programs.len(), crate::jobs::at_a_time()));
            let selftest = (depth == Depth::Quick).then(|| selftest(repo)).transpose()?;
            Ok(rust_tests::run(&programs, selftest, compiler, depth == Depth::All))
        }
        Work::Wheel => {
            out::line(format!("pip install . (profile {})", depth.profile().name()));
            python::wheel(repo, depth.profile(), depth.compiler()).map(|()| (true, Counts::default()))
        }
        Work::Pytest => {
            out::line("pytest python/tests, in pieces");
            pytest::run(repo, &built(repo, depth.profile())?, depth == Depth::All)
        }
        Work::Kernels if cfg!(target_os = "macos") => {
            out::line("skipped: NVRTC does not exist for this system");
            Ok((true, Counts { skipped: 1, ..Counts::default() }))
        }
        _ => {
            let (mut command, dialect) = command(repo, work, depth)?;
            out::line(shown(&command));
            run_counted(&mut command, dialect)
        }
    }
}

/// The stage as one program, whose output can be kept until it has ended.
pub fn command(repo: &Repo, work: Work, depth: Depth) -> Result<(Command, Dialect)> {
    match work {
        Work::Setup => Ok((python::packages_command(repo), Dialect::Lint)),
        Work::Lint(module, args) => Ok((lint(repo, module, args)?, Dialect::Lint)),
        Work::Fmt => {
            let mut cargo = repo.cargo();
            cargo.args(["fmt", "--all", "--check"]);
            Ok((cargo, Dialect::Silent))
        }
        Work::Doctest => {
            let mut cargo = repo.cargo_with(depth.compiler());
            cargo.args(["test", "--workspace", "--no-fail-fast", "--doc"]);
            Ok((cargo, Dialect::Cargo))
        }
        Work::Doc => {
            let mut cargo = repo.cargo();
            cargo.args(["doc", "--workspace", "--no-deps", "--document-private-items"]);
            cargo.env("RUSTDOCFLAGS", "-D warnings");
            Ok((cargo, Dialect::Lint))
        }
        Work::Kernels => {
            let mut command = kernels::command(repo)?;
            command.args((depth == Depth::All).then_some("--all"));
            Ok((command, Dialect::Kernels))
        }
        Work::Torture => {
            let flags = ["--device=cpu".to_owned()];
            let binary = built(repo, depth.profile())?;
            Ok((torture::command(&binary, depth.torture_rounds(), TORTURE_SEED, &flags), Dialect::Torture))
        }
        Work::TortureRanks => {
            let flags = ["--device=cpu", "--ranks=4", "--steps=12"].map(str::to_owned);
            let (binary, rounds) = (built(repo, depth.profile())?, depth.torture_rounds_of_ranks());
            Ok((torture::command(&binary, rounds, TORTURE_SEED, &flags), Dialect::Torture))
        }
        other => bail!("{other:?} is not one program"),
    }
}

/// Compiles what the other stages run.
fn build(repo: &Repo, depth: Depth) -> Result<bool> {
    let compiled = |compiler: Compiler, args: &[String]| {
        out::line(format!("cargo {} ({compiler})", args.join(" ")));
        compile(repo, compiler, args).map(|(passed, messages)| {
            if !messages.faults.is_empty() {
                out::line(format!("{} warnings and errors: each fails the run", messages.faults.len()));
            }
            passed
        })
    };
    let mut commands: Vec<(Compiler, Vec<String>)> =
        depth.tests(repo).into_iter().map(|args| (depth.compiler(), args)).collect();
    if depth == Depth::All {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        commands.insert(0, (Compiler::Clippy, words("check --workspace --all-targets")));
        commands.push((depth.compiler(), words("build --workspace --release")));
    }
    for (compiler, args) in commands {
        if !compiled(compiler, &args)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Every op of the CPU engine on a few shapes, in seconds.
fn selftest(repo: &Repo) -> Result<Command> {
    let mut command = Command::new(built(repo, Profile::Dev)?);
    command.args(["selftest", "--quick", "--device", "cpu"]);
    Ok(command)
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
        let all = STAGES.map(|stage| stage.name);
        assert_eq!(chosen("--all").unwrap(), all);
        let usual: Vec<&str> = all.into_iter().filter(|name| *name != "doc").collect();
        assert_eq!(chosen("").unwrap(), usual);
        assert_eq!(chosen("--stage doc").unwrap(), ["doc"]);
        assert_eq!(
            chosen("--no-python").unwrap(),
            ["fmt", "build", "test", "doctest", "torture", "torture-ranks"]
        );
        let quick = ["fmt", "build", "test", "setup", "ruff", "ruff-fmt", "mypy"];
        assert_eq!(chosen("--quick --json x").unwrap(), quick);
        assert_eq!(chosen("--stage pytest --stage fmt").unwrap(), ["fmt", "pytest"]);
        assert!(all.iter().all(|name| HELP.contains(&format!("\n  {name} "))), "the help lists every stage");
    }

    #[test]
    fn only_everything_is_built_as_released() {
        for depth in [Depth::Quick, Depth::Usual] {
            assert_eq!((depth.profile(), depth.compiler()), (Profile::Dev, Compiler::Clippy));
        }
        assert_eq!((Depth::All.profile(), Depth::All.compiler()), (Profile::Release, Compiler::Rustc));
        for depth in [Depth::Usual, Depth::All] {
            let named = format!("{} t", depth.torture_rounds());
            assert!(HELP.contains(&named), "the help says {named}");
        }
    }

    #[test]
    fn wrong_flags_are_refused() {
        for (text, want) in [
            ("--stage lint", "unknown stage 'lint'; expected one of fmt, build,"),
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
