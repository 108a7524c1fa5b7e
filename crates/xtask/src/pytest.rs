//! Runs the Python tests in one process per core: torch uses one thread in each, and most tests are single-threaded.

use crate::counts::{Counts, Dialect};
use crate::jobs;
use crate::repo::Repo;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Pieces per process: enough that the last ones are short, few enough that importing torch costs little.
const PIECES: usize = 3;

/// Runs every test file of python/tests with the package in `.venv` and this `ironhorse` binary.
pub fn run(repo: &Repo, binary: &Path, in_full: bool) -> Result<(bool, Counts)> {
    repo.ensure_venv()?;
    let pieces = split(test_files(repo)?, jobs::at_a_time() * PIECES);
    let compiled = empty(repo.target()?.join("torchinductor"))?;
    let tests = |files: &Vec<PathBuf>| {
        let mut python = command(repo, binary, files, in_full);
        python.env("TORCHINDUCTOR_CACHE_DIR", &compiled);
        python
    };
    let commands = pieces.iter().map(tests).collect();
    Ok(jobs::run(commands, Dialect::Pytest))
}

/// A folder for what torch compiles, without what it compiled for another state of the package: torch keeps that and does not see that
/// an op has changed.
fn empty(folder: PathBuf) -> Result<PathBuf> {
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot empty {}", folder.display()))
        }
        _ => Ok(folder),
    }
}

fn command(repo: &Repo, binary: &Path, files: &[PathBuf], in_full: bool) -> Command {
    let mut python = repo.python();
    python.args(["-m", "pytest", "-p", "no:cacheprovider"]).args(files).env("IRONHORSE_BIN", binary);
    python.args(in_full.then_some("--in-full"));
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
}
