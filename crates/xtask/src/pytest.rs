//! Runs the Python tests in one process per core: torch uses one thread in each, and most tests are single-threaded.

use crate::counts::{Counts, Dialect};
use crate::out;
use crate::process::{captured, shown};
use crate::repo::Repo;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Pieces per process: enough that the last ones are short, few enough that importing torch costs little.
const PIECES: usize = 3;

/// Runs every test file of python/tests with the package in `.venv` and this `ironhorse` binary.
pub fn run(repo: &Repo, binary: &Path) -> Result<(bool, Counts)> {
    repo.ensure_venv()?;
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    let pieces = Mutex::new(split(test_files(repo)?, workers * PIECES));
    let done = Mutex::new((true, Counts::default()));
    let take = || pieces.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
    std::thread::scope(|scope| {
        let work = || {
            while let Some(files) = take() {
                let one = run_piece(&mut command(repo, binary, &files));
                let mut all = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                all.0 &= one.0;
                all.1 += one.1;
            }
        };
        (0..workers).for_each(|_| _ = scope.spawn(work));
    });
    Ok(done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// Runs one process to its end and then prints its output, so that the output of two processes does not mix.
fn run_piece(command: &mut Command) -> (bool, Counts) {
    let (passed, text) = match captured(command) {
        Ok(ended) => ended,
        Err(error) => (false, format!("error: {error:#}\n")),
    };
    let mut counts = Counts::default();
    text.lines().for_each(|line| Dialect::Pytest.read(line, &mut counts));
    if !passed && counts.failed == 0 {
        counts.failed = 1; // it died before its last line
    }
    out::bytes(format!("\n$ {}\n{text}", shown(command)).as_bytes());
    (passed, counts)
}

fn command(repo: &Repo, binary: &Path, files: &[PathBuf]) -> Command {
    let mut python = repo.python();
    python.args(["-m", "pytest", "-p", "no:cacheprovider"]).args(files).env("IRONHORSE_BIN", binary);
    python
}

/// Every test file, as pytest finds them, with its size.
fn test_files(repo: &Repo) -> Result<Vec<(u64, PathBuf)>> {
    let folder = Path::new("python/tests");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(repo.root().join(folder)).context("cannot read python/tests")? {
        let entry = entry.context("cannot read python/tests")?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("test_") && name.ends_with(".py") {
            found.push((entry.metadata().context("cannot read python/tests")?.len(), folder.join(name)));
        }
    }
    ensure!(!found.is_empty(), "python/tests has no test_*.py");
    Ok(found)
}

/// Splits the files into this many pieces of about the same size: each file, largest first, goes to the smallest piece.
fn split(mut files: Vec<(u64, PathBuf)>, pieces: usize) -> Vec<Vec<PathBuf>> {
    files.sort_by(|a, b| b.cmp(a));
    let mut all: Vec<(u64, Vec<PathBuf>)> = vec![(0, Vec::new()); pieces];
    for (size, file) in files {
        if let Some(smallest) = all.iter_mut().min_by_key(|(size, _)| *size) {
            smallest.0 += size;
            smallest.1.push(file);
        }
    }
    all.into_iter().map(|(_, files)| files).filter(|files| !files.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_in_one_piece() {
        let files = test_files(&Repo::find().unwrap()).unwrap();
        let mut want: Vec<PathBuf> = files.iter().map(|(_, file)| file.clone()).collect();
        for pieces in [1, 2, 6, 1000] {
            let split = split(files.clone(), pieces);
            assert!(split.len() == pieces.min(files.len()) && split.iter().all(|files| !files.is_empty()));
            let mut got = split.concat();
            got.sort();
            want.sort();
            assert_eq!(got, want);
        }
    }

    #[test]
    fn a_process_that_dies_counts_as_failed() {
        let (passed, counts) = run_piece(Command::new("sh").args(["-c", "echo 3 passed in 0.1s; exit 1"]));
        assert_eq!((passed, counts.passed, counts.failed), (false, 3, 1));
        let (passed, counts) = run_piece(Command::new("sh").args(["-c", "echo 3 passed in 0.1s >&2"]));
        assert_eq!((passed, counts.passed, counts.failed), (true, 3, 0));
        assert!(!run_piece(&mut Command::new("no-such-program-here")).0);
    }
}
