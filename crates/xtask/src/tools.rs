//! Commands that use optional tools: cargo-deny, cargo-fuzz, and the comparison with PyTorch.

use crate::args::{Args, unknown};
use crate::process::{output_of, run, shown};
use crate::repo::{Profile, Repo};
use crate::{out, python};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;

/// Help of `cargo xtask deny`.
pub const DENY_HELP: &str = "\
Checks the dependencies against deny.toml: permissive licences, crates.io as the only source, no duplicates, and no known
advisories (the list is downloaded). Needs cargo-deny: cargo install cargo-deny --locked

Usage: cargo xtask deny [CHECK]...

CHECK is one of licenses, bans, sources, advisories [default: all].";

/// Help of `cargo xtask fuzz`.
pub const FUZZ_HELP: &str = "\
Fuzzes the readers of files and of requests: one target of fuzz/fuzz_targets, or each in turn. Inputs that fail are saved in fuzz/artifacts.
Needs a nightly toolchain (rustup toolchain install nightly) and cargo-fuzz (cargo install cargo-fuzz).

Usage: cargo xtask fuzz [TARGET] [--seconds N]

  --seconds N   how long each target runs [default: 60]

Example: cargo xtask fuzz safetensors --seconds 300";

/// Help of `cargo xtask bench`.
pub const BENCH_HELP: &str = "\
Builds the release binary and times the same training step in ironhorse and in PyTorch, alternating in one run.

Usage: cargo xtask bench [FLAG]...

The flags are those of benches/compare_torch.py; `cargo xtask bench -- --help` lists them.

Example: cargo xtask bench --model d12 --batch 4 --seq 64 --threads 2 --steps 10 --rounds 3 --json compare.json";

/// `cargo xtask deny`
pub fn deny(repo: &Repo, args: Args) -> Result<bool> {
    ensure!(
        output_of(repo.cargo().args(["deny", "--version"])).is_some(),
        "cargo-deny is not installed: cargo install cargo-deny --locked"
    );
    let checks = args.rest();
    if let Some(other) =
        checks.iter().find(|check| !["licenses", "bans", "sources", "advisories"].contains(&check.as_str()))
    {
        return unknown(other);
    }
    run(repo.cargo().args(["deny", "--workspace", "check"]).args(checks))
}

/// `cargo xtask fuzz`
pub fn fuzz(repo: &Repo, mut args: Args) -> Result<bool> {
    let (mut wanted, mut seconds) = (None, 60_u32);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seconds" => {
                let text = args.value("--seconds")?;
                let number = text.parse().ok().filter(|&number| number > 0);
                seconds = number.with_context(|| {
                    format!("--seconds is '{text}', expected a whole number of at least 1")
                })?;
            }
            _ if arg.starts_with('-') || wanted.is_some() => return unknown(&arg),
            _ => wanted = Some(arg),
        }
    }
    let mut targets = fuzz_targets(repo)?;
    if let Some(name) = wanted {
        ensure!(
            targets.contains(&name),
            "unknown fuzz target '{name}'; expected one of {}",
            targets.join(", ")
        );
        targets = vec![name];
    }
    let nightly = || {
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]).current_dir(repo.root());
        command
    };
    ensure!(
        output_of(nightly().arg("--version")).is_some(),
        "fuzzing needs a nightly toolchain: rustup toolchain install nightly"
    );
    ensure!(
        output_of(nightly().args(["fuzz", "--version"])).is_some(),
        "cargo-fuzz is not installed: cargo install cargo-fuzz"
    );
    for (i, target) in targets.iter().enumerate() {
        out::line(format!("==> {}/{} {target}, {seconds} s", i + 1, targets.len()));
        let limit = format!("-max_total_time={seconds}");
        if !run(nightly().args(["fuzz", "run", target, "--", &limit]))? {
            out::line(format!("{target} failed; the input is saved in fuzz/artifacts/{target}"));
            return Ok(false);
        }
    }
    Ok(true)
}

/// The targets by name: the files of fuzz/fuzz_targets.
fn fuzz_targets(repo: &Repo) -> Result<Vec<String>> {
    let folder = repo.root().join("fuzz/fuzz_targets");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).context("cannot read fuzz/fuzz_targets")? {
        let path = entry.context("cannot read fuzz/fuzz_targets")?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// `cargo xtask bench`
pub fn bench(repo: &Repo, args: Args) -> Result<bool> {
    python::setup(repo)?;
    repo.build_release(&["ironhorse-cli"])?;
    let mut compare = repo.python();
    compare
        .arg("benches/compare_torch.py")
        .args(args.rest())
        .env("IRONHORSE_BIN", repo.binary(Profile::Release)?);
    out::line(format!("==> {}", shown(&compare)));
    run(&mut compare)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fuzz_target_is_known_to_cargo() {
        let repo = Repo::find().unwrap();
        let manifest = fs::read_to_string(repo.root().join("fuzz/Cargo.toml")).unwrap();
        let targets = fuzz_targets(&repo).unwrap();
        assert!(!targets.is_empty());
        for name in targets {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in fuzz/Cargo.toml");
        }
    }

    #[test]
    fn wrong_arguments_are_refused_before_anything_runs() {
        let repo = Repo::find().unwrap();
        let all = fuzz_targets(&repo).unwrap().join(", ");
        let unknown = format!("unknown fuzz target 'nothing'; expected one of {all}");
        for (text, want) in [
            ("--seconds x", "--seconds is 'x', expected a whole number of at least 1"),
            ("--seconds 0", "--seconds is '0', expected a whole number of at least 1"),
            ("model shard", "unknown argument 'shard' (see --help)"),
            ("nothing", &unknown),
        ] {
            let args = Args::new(text.split_whitespace().map(str::to_owned));
            let error = fuzz(&repo, args).unwrap_err().to_string();
            assert!(error.starts_with(want), "{text}: {error}");
        }
    }
}
