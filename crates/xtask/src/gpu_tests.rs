//! The Rust tests that need a GPU, as programs for `cargo xtask gpu-bundle`.

use crate::process::{output_of, shown};
use crate::repo::Repo;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Packages with tests marked `#[ignore = "needs a GPU"]`.
const PACKAGES: [&str; 2] = ["ironhorse-cuda", "ironhorse"];

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The name of its target.
    pub name: String,
    /// The path of the executable.
    pub file: PathBuf,
}

/// Builds the tests and returns the programs that contain ignored tests.
pub fn build(repo: &Repo) -> Result<Vec<Program>> {
    let mut cargo = repo.cargo();
    cargo.args(["test", "--no-run", "--lib", "--tests", "--message-format", "json"]);
    cargo.args(PACKAGES.iter().flat_map(|name| ["--package", name]));
    let text = shown(&cargo);
    let output = cargo.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{text}`"))?;
    ensure!(output.status.success(), "`{text}` failed (cargo's messages are above)");
    let mut found = programs(&String::from_utf8_lossy(&output.stdout));
    found.retain(has_ignored);
    ensure!(!found.is_empty(), "no test of {} is marked #[ignore = \"needs a GPU\"]", PACKAGES.join(" and "));
    Ok(found)
}

/// The test programs in cargo's messages.
fn programs(messages: &str) -> Vec<Program> {
    let program = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let file = message["executable"].as_str()?.into();
        let is_test = message["profile"]["test"] == true;
        is_test.then(|| Some(Program { name: message["target"]["name"].as_str()?.into(), file }))?
    };
    messages.lines().filter_map(program).collect()
}

fn has_ignored(program: &Program) -> bool {
    let list = output_of(Command::new(&program.file).args(["--list", "--ignored", "--format", "terse"]));
    list.is_some_and(|list| list.lines().any(|line| line.ends_with(": test")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_read_from_the_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"large"},"profile":{"test":true},"executable":"/t/large-1"}
{"reason":"compiler-artifact","target":{"name":"core"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"name":"xtask"},"profile":{"test":false},"executable":"/t/xtask"}
not json
{"reason":"build-finished","success":true}"#;
        assert_eq!(programs(messages), [Program { name: "large".into(), file: "/t/large-1".into() }]);
    }

    #[test]
    fn this_program_has_no_ignored_test() {
        let file = std::env::current_exe().unwrap();
        assert!(!has_ignored(&Program { name: "xtask".into(), file }));
        assert!(!has_ignored(&Program { name: "none".into(), file: "no-such-program-here".into() }));
    }
}
