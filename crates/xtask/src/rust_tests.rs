//! Runs the compiled tests. `cargo test` runs one program after the other, and at the end of each a core is idle.

use crate::compile::Program;
use crate::counts::{Counts, Dialect};
use crate::jobs;
use crate::process::output_of;
use crate::repo::Compiler;
use std::process::Command;

/// Part of the name of every test that only `--all` runs; it is marked `#[ignore = "only with --all"]`.
pub const IN_FULL: &str = "_in_full";
/// The programs that take longest. They start first, so that no core is idle at the end.
const LONGEST: [&str; 6] = ["cli", "ironhorse_testkit", "all", "ironhorse_text", "conformance", "threads"];

/// Runs the tests of all programs and one more command, several at a time; tests `_in_full` too, if asked to.
pub fn run(
    programs: &[Program],
    another: Option<Command>,
    compiler: Compiler,
    in_full: bool,
) -> (bool, Counts) {
    let mut programs: Vec<&Program> = programs.iter().collect();
    let place = |program: &Program| LONGEST.iter().position(|name| *name == program.name);
    programs.sort_by_key(|program| place(program).unwrap_or(LONGEST.len()));
    let long = programs.iter().filter(|program| in_full && has_ignored(program, &[IN_FULL]));
    let long = long.map(|program| command(program, &["--ignored", IN_FULL]));
    let usual: &[&str] = if in_full { &["--skip", IN_FULL] } else { &[] };
    let mut commands: Vec<Command> =
        long.chain(programs.iter().map(|program| command(program, usual))).chain(another).collect();
    commands.iter_mut().for_each(|command| compiler.set(command)); // some tests call cargo
    jobs::run(commands, Dialect::Cargo)
}

/// The program as cargo would run it, with two threads at least: tests of commands wait for them.
fn command(program: &Program, args: &[&str]) -> Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut command = Command::new(&program.file);
    command.args(args).args(["--test-threads", &(cores / jobs::at_a_time()).max(2).to_string()]);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    command
}

/// Whether the program has ignored tests that these arguments choose.
pub fn has_ignored(program: &Program, args: &[&str]) -> bool {
    let list =
        output_of(Command::new(&program.file).args(["--list", "--ignored", "--format", "terse"]).args(args));
    list.is_some_and(|list| list.lines().any(|line| line.ends_with(": test")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::ONLY_WITH_ALL;
    use crate::repo::Repo;
    use std::path::{Path, PathBuf};

    #[test]
    fn this_program_has_no_ignored_test() {
        let program = |file| Program { name: "a".into(), file, folder: ".".into() };
        assert!(!has_ignored(&program(std::env::current_exe().unwrap()), &[]));
        assert!(!has_ignored(&program("no-such-program-here".into()), &[]));
    }

    fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rust_files(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn tests_in_full_are_marked_and_named_so() {
        let mut files = Vec::new();
        rust_files(&Repo::find().unwrap().root().join("crates"), &mut files);
        let (mut in_full, mark) = (0, format!("#[ignore = \"{ONLY_WITH_ALL}\"]"));
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            for (i, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("fn ")) {
                let name = line.trim_start_matches("fn ").split('(').next().unwrap();
                let marked = lines[i.saturating_sub(2)..i].contains(&mark.as_str());
                assert_eq!(marked, name.ends_with(IN_FULL), "{}: {name}", file.display());
                in_full += usize::from(marked);
            }
        }
        assert!(in_full > 0, "no test waits for --all");
    }
}
