//! `cargo xtask gpu-bundle`: a folder that can be copied to a GPU machine without Rust and without a network.

use crate::args::{Args, unknown};
use crate::process::{output_of, run as run_command, shown};
use crate::repo::{Profile, Repo, python_of};
use crate::{gpu_tests, out, python};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Help of `cargo xtask gpu-bundle`.
pub const HELP: &str = "\
Makes one folder with everything needed for a run on a GPU machine: the stripped release binary; run.sh, which checks and
measures everything and prints a table; the PyTorch side of the benchmarks; the Python package with its native module,
the C library, the Python tests and pytest; the Rust tests that need a GPU; answer keys of small models, made here. The
GPU machine needs an NVIDIA driver and a Python with PyTorch. It needs neither Rust nor a network.

Usage: cargo xtask gpu-bundle [--out DIR] [--no-build]

  --out DIR    the folder [default: target/gpu-bundle]; one from an earlier run is replaced
  --no-build   use the existing release binary

Fails if the folder is larger than 160 MiB. Then, on the GPU machine: bash gpu-bundle/run.sh --out results";

/// The largest allowed folder, in bytes.
const MOST_BYTES: u64 = 160 << 20;
/// Marks a folder as made by this command; only such folders are deleted.
const MARK: &str = "run.sh";

/// Answer keys: name, sizes, B, T. The first has only odd sizes; the second has the head size of GPT-2. run.sh makes
/// keys of GPT-2's width on the GPU machine, because the key of one such layer is larger than this folder may be.
const KEYS: [(&str, &str, usize, usize); 2] = [
    ("odd", "n_layer=2,n_head=5,n_embd=80,vocab_size=257,max_seq_len=37", 3, 37),
    ("small", "n_layer=2,n_head=2,n_embd=128,vocab_size=515,max_seq_len=128", 1, 128),
];
/// Optimizer steps in each key.
const KEY_STEPS: usize = 5;

/// Files to copy: path in the repository, path in the folder.
const FILES: [(&str, &str); 14] = [
    ("scripts/gpu/run.sh", MARK),
    ("scripts/gpu/moe.sh", "moe.sh"),
    ("scripts/gpu/f32.sh", "f32.sh"),
    ("scripts/gpu/families.sh", "families.sh"),
    ("scripts/gpu/moe_check.py", "moe_check.py"),
    ("scripts/gpu/ranks.sh", "ranks.sh"),
    ("scripts/gpu/runs.sh", "runs.sh"),
    ("scripts/gpu/data.sh", "data.sh"),
    ("scripts/gpu/data_make.py", "data_make.py"),
    ("scripts/gpu/summary.py", "summary.py"),
    ("scripts/gpu/table.sh", "table.sh"),
    ("scripts/gpu/table.py", "table.py"),
    ("scripts/gpu/torch_error.py", "torch_error.py"),
    ("benches/gpu_torch.py", "gpu_torch.py"),
];
/// Folders to copy without Python's bytecode: path in the repository, path in the folder.
const FOLDERS: [(&str, &str); 4] = [
    ("python/ironhorse", "python/ironhorse"),
    ("python/tests", "python/tests"),
    ("benches", "benches"),
    ("examples", "examples"),
];
/// pytest and its dependencies, for machines without them.
const PYTEST: [&str; 6] = ["pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"];
/// Keeps the names of functions for backtraces.
const STRIP: &str = "--strip-debug";
/// Packages built for the folder.
const PACKAGES: [&str; 3] = ["ironhorse-cli", "ironhorse-py", "ironhorse-capi"];

/// `cargo xtask gpu-bundle`
pub fn run(repo: &Repo, mut args: Args) -> Result<bool> {
    let (mut folder, mut build) = (None, true);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--out" => folder = Some(PathBuf::from(args.value("--out")?)),
            "--no-build" => build = false,
            _ => return unknown(&arg),
        }
    }
    let folder = match folder {
        Some(folder) => std::path::absolute(folder).context("--out is not a path")?,
        None => repo.target()?.join("gpu-bundle"),
    };
    if build {
        repo.build_release(&PACKAGES)?;
    }
    if !python_of(&repo.venv()).exists() {
        python::setup(repo)?;
    }
    empty(&folder)?;
    for (from, to) in FILES {
        copy(&repo.root().join(from), &folder.join(to))?;
    }
    for (from, to) in FOLDERS {
        copy_package(&repo.root().join(from), &folder.join(to))?;
    }
    let built = repo.binary(Profile::Release)?;
    binary(&built, &folder.join("ironhorse"), STRIP)?;
    binary(&built.with_file_name("lib_native.so"), &folder.join("python/ironhorse/_native.abi3.so"), STRIP)?;
    binary(&built.with_file_name("libironhorse.so"), &folder.join("libironhorse.so"), STRIP)?;
    rust_tests(repo, &folder)?;
    pytest(repo, &folder.join("pytest"))?;
    KEYS.iter().try_for_each(|key| answer_key(repo, &folder, key))?;
    family_keys(repo, &folder)?;
    let files = list(&folder)?;
    report(&folder, &files);
    check_size(&files, MOST_BYTES)?;
    Ok(true)
}

/// Creates the folder and deletes the contents of an earlier run. A folder with other contents is an error.
fn empty(folder: &Path) -> Result<()> {
    let shown = folder.display();
    if folder.exists() {
        let nothing = fs::read_dir(folder).with_context(|| format!("{shown}: cannot read"))?.next().is_none();
        ensure!(
            nothing || folder.join(MARK).is_file(),
            "{shown} contains other files, which would be deleted; give another --out"
        );
        fs::remove_dir_all(folder).with_context(|| format!("{shown}: cannot delete"))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("{shown}: cannot make the folder"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("{}: cannot make the folder", parent.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// The Rust tests that need a GPU, compressed: uncompressed they would be a third of the folder.
fn rust_tests(repo: &Repo, folder: &Path) -> Result<()> {
    let unpacked = folder.join("rust");
    for program in gpu_tests::build(repo)? {
        binary(&program.file, &unpacked.join(program.name), "--strip-all")?;
    }
    let mut tar = Command::new("tar");
    tar.args(["-czf", "rust.tar.gz", "rust"]).current_dir(folder);
    ensure!(run_command(&mut tar)?, "`{}` failed (its message is above)", shown(&tar));
    fs::remove_dir_all(&unpacked).with_context(|| format!("{}: cannot delete", unpacked.display()))
}

/// Copies a file built by cargo without its debug information, which is most of it.
fn binary(from: &Path, to: &Path, strip: &str) -> Result<()> {
    ensure!(from.is_file(), "{} does not exist: run without --no-build to build it", from.display());
    copy(from, to)?;
    if output_of(Command::new("strip").arg(strip).arg(to)).is_none() {
        out::line("`strip` is missing or failed: the binaries keep their debug information");
    }
    Ok(())
}

/// pytest from the environment of this checkout.
fn pytest(repo: &Repo, to: &Path) -> Result<()> {
    let sites = repo.site_packages();
    for name in PYTEST {
        let from = sites.iter().map(|site| site.join(name)).find(|folder| folder.is_dir());
        let from = from.with_context(|| format!("there is no {name} in .venv: cargo xtask setup"))?;
        copy_package(&from, &to.join(name))?;
    }
    Ok(())
}

/// Copies the sources of the package without Python's bytecode.
fn copy_package(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("{}: cannot read", from.display()))? {
        let path = entry.with_context(|| format!("{}: cannot read", from.display()))?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() && name != "__pycache__" {
            copy_package(&path, &to.join(name))?;
        } else if path.is_file() {
            copy(&path, &to.join(name))?;
        }
    }
    Ok(())
}

/// Lets PyTorch write an answer key, and keeps only the key of all files that the export writes.
fn answer_key(
    repo: &Repo,
    folder: &Path,
    (name, sizes, batch, seq): &(&str, &str, usize, usize),
) -> Result<()> {
    let aside = folder.join("export");
    let mut export = repo.python();
    export.args(["-m", "ironhorse.export", "gpt2", "--model", sizes, "--stem", name, "--out"]).arg(&aside);
    for (flag, value) in [("--batch", *batch), ("--seq", *seq), ("--steps", KEY_STEPS)] {
        export.args([flag, &value.to_string()]);
    }
    export.env("PYTHONPATH", folder.join("python"));
    ensure!(run_command(&mut export)?, "`{}` failed (its message is above)", shown(&export));
    copy(
        &aside.join(format!("{name}_custom.key.safetensors")),
        &folder.join("keys").join(format!("{name}.key.safetensors")),
    )?;
    fs::remove_dir_all(&aside).with_context(|| format!("{}: cannot delete", aside.display()))
}

/// Lets transformers, PEFT and PyTorch write the keys of small models of every family.
fn family_keys(repo: &Repo, folder: &Path) -> Result<()> {
    let mut python = repo.python();
    python.arg(folder.join("python/tests/family_keys.py")).arg(folder.join("keys/families"));
    python.env("PYTHONPATH", folder.join("python"));
    ensure!(run_command(&mut python)?, "`{}` failed (its message is above)", shown(&python));
    Ok(())
}

/// Every file below the folder with its size, by name.
fn list(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("{}: cannot read", next.display()))? {
            let entry = entry.with_context(|| format!("{}: cannot read", next.display()))?;
            let about =
                entry.metadata().with_context(|| format!("{}: cannot read", entry.path().display()))?;
            if about.is_dir() {
                waiting.push(entry.path());
            } else {
                let path = entry.path();
                found.push((path.strip_prefix(folder).unwrap_or(&path).to_owned(), about.len()));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Prints the files; those of a folder as one row.
fn report(folder: &Path, files: &[(PathBuf, u64)]) {
    out::line(format!("\n{}", folder.display()));
    let mut folders: BTreeMap<PathBuf, (usize, u64)> = BTreeMap::new();
    for (path, bytes) in files {
        match path.iter().next().filter(|_| path.components().count() > 1) {
            None => out::line(format!("  {:<34}{:>10.2} MiB", path.display(), mib(*bytes))),
            Some(top) => {
                let (count, sum) = folders.entry(top.into()).or_default();
                (*count, *sum) = (*count + 1, *sum + bytes);
            }
        }
    }
    for (top, (count, bytes)) in folders {
        let name = format!("{}/ ({count} files)", top.display());
        out::line(format!("  {name:<34}{:>10.2} MiB", mib(bytes)));
    }
    let total = files.iter().map(|(_, bytes)| bytes).sum();
    out::line(format!("  {:<34}{:>10.2} MiB", "total", mib(total)));
}

fn check_size(files: &[(PathBuf, u64)], most: u64) -> Result<()> {
    let total: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let largest = files.iter().max_by_key(|(_, bytes)| bytes);
    let largest = largest.map_or_else(String::new, |(path, bytes)| {
        format!("; the largest file is {}, {:.1} MiB", path.display(), mib(*bytes))
    });
    ensure!(
        total <= most,
        "the folder is {:.1} MiB, at most {:.0} MiB are allowed{largest}",
        mib(total),
        mib(most)
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_too_large_is_refused() {
        let files = [(PathBuf::from("ironhorse"), 140 << 20), (PathBuf::from("keys/a"), 21 << 20)];
        let error = check_size(&files, MOST_BYTES).unwrap_err().to_string();
        assert_eq!(
            error,
            "the folder is 161.0 MiB, at most 160 MiB are allowed; the largest file is ironhorse, 140.0 MiB"
        );
        assert!(check_size(&files[..1], MOST_BYTES).is_ok());
        assert!(check_size(&[], 0).is_ok());
    }

    #[test]
    fn only_an_own_folder_is_replaced() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("bundle");
        empty(&folder).unwrap();
        empty(&folder).unwrap();
        fs::write(folder.join("thesis.txt"), "x").unwrap();
        let error = empty(&folder).unwrap_err().to_string();
        assert!(
            error.ends_with("contains other files, which would be deleted; give another --out"),
            "{error}"
        );
        fs::write(folder.join(MARK), "x").unwrap();
        empty(&folder).unwrap();
        assert_eq!(list(&folder).unwrap(), []);
    }

    #[test]
    fn the_package_goes_without_compiled_files() {
        let scratch = tempfile::tempdir().unwrap();
        let from = scratch.path().join("package");
        fs::create_dir_all(from.join("formats/__pycache__")).unwrap();
        for file in ["a.py", "formats/b.py", "formats/__pycache__/b.pyc"] {
            fs::write(from.join(file), "12345").unwrap();
        }
        let to = scratch.path().join("copy");
        copy_package(&from, &to).unwrap();
        assert_eq!(list(&to).unwrap(), [("a.py".into(), 5), ("formats/b.py".into(), 5)]);
    }

    #[test]
    fn what_goes_in_is_there_and_scripts_are_bash() {
        let repo = Repo::find().unwrap();
        for (from, _) in FILES {
            assert!(repo.root().join(from).is_file(), "{from}");
        }
        for (from, _) in FOLDERS {
            assert!(repo.root().join(from).is_dir(), "{from}");
        }
        for (script, _) in FILES.iter().filter(|(from, _)| from.ends_with(".sh")) {
            let checked = Command::new("bash").arg("-n").arg(repo.root().join(script)).output();
            let checked = checked.expect("bash, which runs the script too");
            assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        }
    }

    #[test]
    fn wrong_arguments_are_refused_before_anything_runs() {
        let repo = Repo::find().unwrap();
        for (text, want) in
            [("--out", "--out needs a value (see --help)"), ("x", "unknown argument 'x' (see --help)")]
        {
            let args = Args::new(text.split_whitespace().map(str::to_owned));
            assert_eq!(run(&repo, args).unwrap_err().to_string(), want);
        }
    }
}
