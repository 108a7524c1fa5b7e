//! Compiles all targets once for all checks. Clippy's driver is a rustc that lints too: with it as the compiler, linting
//! is not a second compilation. `cargo xtask` itself is compiled so (see .cargo/config.toml).

use crate::out;
use crate::process::shown;
use crate::repo::{Compiler, Repo};
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::PathBuf;
use std::process::Stdio;

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name of its target.
    pub name: String,
    /// The path of the executable.
    pub file: PathBuf,
    /// The folder of its package, in which cargo would run it.
    pub folder: PathBuf,
}

/// What cargo's messages say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// The test programs, in the order in which they were compiled.
    pub programs: Vec<Program>,
    /// Warnings and errors as rustc prints them. The library and its tests are compiled from the same files, and cargo
    /// repeats the warnings of what it does not compile again: each text counts once.
    pub faults: BTreeSet<String>,
}

impl Messages {
    /// Reads one line; returns a warning or error that was not read before, to print.
    fn read(&mut self, line: &str) -> Option<String> {
        let message: Value = serde_json::from_str(line).ok()?;
        match message["reason"].as_str()? {
            "compiler-artifact"
                if message["profile"]["test"] == true && message["target"]["kind"][0] != "bench" =>
            {
                let manifest = PathBuf::from(message["manifest_path"].as_str()?);
                self.programs.push(Program {
                    name: message["target"]["name"].as_str()?.into(),
                    file: message["executable"].as_str()?.into(),
                    folder: manifest.parent()?.into(),
                });
                None
            }
            "compiler-message" => {
                let message = &message["message"];
                let summary =
                    message["code"].is_null() && message["spans"].as_array().is_none_or(Vec::is_empty);
                let counts = matches!(message["level"].as_str()?, "warning" | "error");
                let text = message["rendered"].as_str()?.trim_end().to_owned();
                // `3 warnings emitted` and `aborting due to 2 previous errors` say nothing new
                let new =
                    counts && !(summary && (text.contains(" emitted") || text.contains("aborting due to")));
                (new && self.faults.insert(text.clone())).then_some(text)
            }
            _ => None,
        }
    }
}

/// Runs a cargo command that compiles. Its progress and all warnings are shown. True if it succeeded without a warning.
pub fn compile(repo: &Repo, compiler: Compiler, args: &[impl AsRef<OsStr>]) -> Result<(bool, Messages)> {
    let mut cargo = repo.cargo_with(compiler);
    cargo.args(args);
    let colours = std::io::stderr().is_terminal();
    cargo.args(["--message-format", if colours { "json-diagnostic-rendered-ansi" } else { "json" }]);
    let text = shown(&cargo);
    let mut child = cargo.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start `{text}`"))?;
    let mut messages = Messages::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.with_context(|| format!("cannot read the output of `{text}`"))?;
            if let Some(fault) = messages.read(&line) {
                out::line(format!("{fault}\n"));
            }
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{text}`"))?;
    Ok((status.success() && messages.faults.is_empty(), messages))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARTIFACTS: &str = r#"{"reason":"compiler-artifact","manifest_path":"/r/cuda/Cargo.toml","target":{"name":"large"},"profile":{"test":true},"executable":"/t/large-1"}
{"reason":"compiler-artifact","manifest_path":"/r/core/Cargo.toml","target":{"name":"core"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/r/xtask/Cargo.toml","target":{"name":"xtask"},"profile":{"test":false},"executable":"/t/xtask"}
{"reason":"compiler-artifact","manifest_path":"/r/cpu/Cargo.toml","target":{"name":"gemm","kind":["bench"]},"profile":{"test":true},"executable":"/t/gemm"}
not json
{"reason":"build-finished","success":true}"#;

    #[test]
    fn test_programs_are_read_from_the_messages() {
        let mut messages = Messages::default();
        assert!(ARTIFACTS.lines().all(|line| messages.read(line).is_none()));
        let large = Program { name: "large".into(), file: "/t/large-1".into(), folder: "/r/cuda".into() };
        assert_eq!((messages.programs, messages.faults.len()), (vec![large], 0));
    }

    #[test]
    fn a_warning_counts_once() {
        let warning = r#"{"reason":"compiler-message","message":{"level":"warning","code":{"code":"unused"},"spans":[{}],"rendered":"warning: unused x\n"}}"#;
        let summary = r#"{"reason":"compiler-message","message":{"level":"warning","code":null,"spans":[],"rendered":"warning: 1 warning emitted\n\n"}}"#;
        let mut messages = Messages::default();
        let shown: Vec<Option<String>> = [warning, summary, warning].map(|line| messages.read(line)).into();
        assert_eq!(shown, [Some("warning: unused x".to_owned()), None, None]);
        assert_eq!(messages.faults.len(), 1);
        let linker = r#"{"reason":"compiler-message","message":{"level":"warning","code":null,"spans":[],"rendered":"warning: the linker says so"}}"#;
        assert!(messages.read(linker).is_some());
    }

    /// A package whose code is correct and has one fault that only clippy finds.
    #[test]
    fn what_clippy_finds_fails_the_build_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("Cargo.toml", "[package]\nname = \"one\"\nedition = \"2024\"\n[workspace]\n");
        std::fs::create_dir(folder.path().join("src")).unwrap();
        write("src/lib.rs", "pub fn none(all: &[u8]) -> bool {\n    all.len() == 0\n}\n");
        let manifest = folder.path().join("Cargo.toml");
        let target = folder.path().join("target");
        let args = ["build", "--offline", "--all-targets", "--manifest-path", manifest.to_str().unwrap()];
        let args = [&args[..], &["--target-dir", target.to_str().unwrap()]].concat();
        let repo = Repo::find().unwrap();
        for (compiler, passes) in
            [(Compiler::Clippy, false), (Compiler::Clippy, false), (Compiler::Rustc, true)]
        {
            let (passed, messages) = compile(&repo, compiler, &args).unwrap();
            assert_eq!((passed, messages.faults.is_empty()), (passes, passes), "{messages:?}");
            assert!(messages.faults.iter().all(|fault| fault.contains("len_zero")), "{messages:?}");
            assert_eq!(messages.programs.len(), 1);
        }
        write("src/lib.rs", "pub fn none(all: &[u8]) -> bool {\n    all.is_empty()\n}\n");
        assert!(compile(&repo, Compiler::Clippy, &args).unwrap().0);
    }
}
