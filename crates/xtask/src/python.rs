//! The Python environment `.venv`: created once, and updated when its requirements change.

use crate::args::Args;
use crate::out;
use crate::process::{output_of, run};
use crate::repo::{Compiler, Profile, Repo, python_of};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Help of `cargo xtask setup`.
pub const HELP: &str = "\
Creates the Python environment .venv in the root of the repository with the packages that the checks need (torch, numpy,
pytest, safetensors, transformers, gguf, NVRTC, maturin, ruff, mypy), builds the wheel of this package and installs it there.
Downloads nothing if the required packages have not changed.

Usage: cargo xtask setup [--packages]

  --packages   only the packages, without the wheel of this package

Says if there is no Chromium or no tmux, without which the tests of pages or of `watch` in a terminal are skipped
(Debian, Ubuntu: apt install chromium tmux).

The environment variable PYTHON names the interpreter to use [default: python3]. It must be 3.10 or newer.
The first download is large (PyTorch). To start over, delete .venv.";

/// The oldest Python the package supports.
const OLDEST: (u32, u32) = (3, 10);
/// The packages that the checks need.
const REQUIREMENTS: &str = "python/requirements-test.txt";
/// Holds the hash of the environment's requirements; written last.
const STAMP: &str = "ironhorse.stamp";
/// How often pip is started before giving up; each time, pip itself retries too.
const ATTEMPTS: u32 = 3;

/// The flag of `cargo xtask setup` that leaves the wheel out.
const PACKAGES_ONLY: &str = "--packages";

/// `cargo xtask setup`
pub fn setup_command(repo: &Repo, mut args: Args) -> Result<bool> {
    let packages = args.flag(PACKAGES_ONLY);
    args.end()?;
    if packages {
        return setup(repo).map(|()| true);
    }
    out::line("==> 1/2 .venv: Python and the packages of python/requirements-test.txt");
    setup(repo)?;
    out::line("==> 2/2 ironhorse: the wheel, release build");
    wheel(repo, Profile::Release, Compiler::Rustc)?;
    out::line("the Python environment is ready: .venv");
    Ok(true)
}

/// Builds the wheel and installs it into the environment: the tests import an installed package, as users do.
pub fn wheel(repo: &Repo, profile: Profile, compiler: Compiler) -> Result<()> {
    repo.ensure_venv()?;
    // maturin is one of the requirements, so the build needs no download. Without --force-reinstall pip would keep the
    // old wheel, which has the same version.
    let install = ["install", "--no-deps", "--no-build-isolation", "--force-reinstall", "."];
    pip(repo, &install, (profile, compiler), 1)
        .context("the wheel could not be built and installed (the messages are above)")
}

/// `cargo xtask setup --packages` as a process of its own: pip mostly waits for the network and the disk, so that cargo
/// can compile meanwhile.
pub fn packages_command(repo: &Repo) -> Command {
    let mut command = repo.xtask();
    command.args(["setup", PACKAGES_ONLY]).current_dir(repo.root());
    command
}

/// What Chromium is called (python/tests/browser.py looks for the same names).
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Creates or updates the environment, without this package.
pub fn setup(repo: &Repo) -> Result<()> {
    let found =
        |names: &[&str], flag| names.iter().any(|name| output_of(Command::new(name).arg(flag)).is_some());
    if !found(&BROWSERS, "--version") {
        out::line(
            "there is no Chromium: the tests of pages are skipped (Debian, Ubuntu: apt install chromium)",
        );
    }
    if !found(&["tmux"], "-V") {
        out::line(
            "there is no tmux: the tests of `watch` in a terminal are skipped (Debian, Ubuntu: apt install tmux)",
        );
    }
    let requirements = repo.root().join(REQUIREMENTS);
    let wanted = fs::read_to_string(&requirements).with_context(|| format!("cannot read {REQUIREMENTS}"))?;
    let venv = repo.venv();
    let mut version = version_of(&python_of(&venv).into());
    if version.is_none_or(|version| version < OLDEST) {
        create(&venv)?;
        version = version_of(&python_of(&venv).into());
    }
    let stamp = fingerprint(&[&wanted, &format!("{version:?}")]);
    let stamp_file = venv.join(STAMP);
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found.trim() == stamp) {
        out::line(".venv is up to date");
        return Ok(());
    }
    let _ = fs::remove_file(&stamp_file);
    let missing = missing(repo, &wanted);
    if missing.is_empty() {
        out::line(".venv has every package already");
    } else {
        out::line(format!("to install: {} (PyTorch is a large download)", missing.join(", ")));
        // Python compiles what is imported, which is a small part of PyTorch and transformers.
        pip(
            repo,
            &["install", "--no-compile", "-r", REQUIREMENTS],
            (Profile::Release, Compiler::Rustc),
            ATTEMPTS,
        )?;
    }
    fs::write(&stamp_file, stamp).context("cannot write to .venv")
}

/// The requirements that the environment does not meet; all of them if that cannot be determined.
fn missing(repo: &Repo, wanted: &str) -> Vec<String> {
    let lines = wanted.lines().map(str::trim);
    let all: Vec<String> =
        lines.filter(|line| !line.is_empty() && !line.starts_with(['#', '-'])).map(String::from).collect();
    // `packaging` comes with pytest; without it, pip decides.
    let script = "\
import sys
from importlib.metadata import PackageNotFoundError, version
from packaging.requirements import Requirement
for text in sys.argv[1:]:
    need = Requirement(text)
    if need.marker and not need.marker.evaluate():
        continue
    try:
        there = need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        there = False
    if not there:
        print(text)
";
    match output_of(repo.python().args(["-c", script]).args(&all)) {
        Some(text) => text.lines().map(str::to_owned).collect(),
        None => all,
    }
}

fn create(venv: &Path) -> Result<()> {
    let python = interpreter()?;
    let has =
        |module: &str| output_of(Command::new(&python).args(["-c", &format!("import {module}")])).is_some();
    ensure!(
        has("venv") && has("ensurepip"),
        "{} has no venv module, which makes environments; install it (Debian, Ubuntu: apt install python3-venv; \
         others: the full Python package)",
        python.display()
    );
    let made = run(Command::new(&python).args(["-m", "venv", "--clear"]).arg(venv))?;
    ensure!(made, "{} could not make the environment .venv (its message is above)", python.display());
    Ok(())
}

/// A Python of this system that is new enough.
fn interpreter() -> Result<OsString> {
    let (given, python) = match std::env::var_os("PYTHON") {
        Some(python) => (true, python),
        None => (false, "python3".into()),
    };
    match version_of(&python) {
        Some(version) if version >= OLDEST => Ok(python),
        Some((major, minor)) => bail!(
            "{} is Python {major}.{minor}, and 3.10 or newer is needed; install one and name it: \
             PYTHON=python3.12 cargo xtask test",
            python.display()
        ),
        None if given => bail!("PYTHON is '{}', which does not run", python.display()),
        None => bail!(
            "there is no python3; install Python 3.10 or newer (Debian, Ubuntu: apt install python3 python3-venv), or \
             leave the Python part out: cargo xtask test --no-python"
        ),
    }
}

fn version_of(python: &OsString) -> Option<(u32, u32)> {
    let text = output_of(Command::new(python).args(["-c", "import sys; print(*sys.version_info[:2])"]))?;
    let (major, minor) = text.split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The search path with the programs of the environment first: pip calls maturin by its name.
fn search_path(repo: &Repo) -> Result<OsString> {
    let python = python_of(&repo.venv());
    let programs = python.parent().map(Path::to_path_buf);
    let before = std::env::var_os("PATH").unwrap_or_default();
    let folders = programs.into_iter().chain(std::env::split_paths(&before));
    std::env::join_paths(folders).context("the path of this checkout cannot be part of PATH")
}

/// Runs pip in the environment, up to `attempts` times: a download of gigabytes does not always succeed.
fn pip(repo: &Repo, args: &[&str], (profile, compiler): (Profile, Compiler), attempts: u32) -> Result<()> {
    for attempt in 1..=attempts {
        let mut pip = repo.python();
        pip.env("PATH", search_path(repo)?);
        compiler.set(&mut pip);
        pip.env("MATURIN_PEP517_ARGS", format!("--profile {}", profile.name()));
        pip.args(["-m", "pip", "--disable-pip-version-check", "--retries", "5", "--timeout", "60"]);
        if run(pip.args(args))? {
            return Ok(());
        }
        if attempt < attempts {
            out::line(format!("pip failed; starting attempt {} of {attempts}", attempt + 1));
            std::thread::sleep(Duration::from_secs(5));
        }
    }
    bail!(
        "`pip {}` failed (attempts: {attempts}; its messages are above); check the network and the space on the disk, then \
         run `cargo xtask setup` again, or leave the Python part out: cargo xtask test --no-python",
        args.join(" ")
    )
}

/// FNV-1a over all parts, the same on every machine.
pub fn fingerprint(parts: &[&str]) -> String {
    let separated = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = separated.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_tells_parts_apart() {
        assert_eq!(fingerprint(&[]), "cbf29ce484222325");
        assert_ne!(fingerprint(&["ab", "c"]), fingerprint(&["a", "bc"]));
        assert_ne!(fingerprint(&["a"]), fingerprint(&["b"]));
    }

    #[test]
    fn what_does_not_run_has_no_version() {
        assert_eq!(version_of(&"no-such-python-here".into()), None);
        assert_eq!(version_of(&"cargo".into()), None);
    }
}
