//! Compares a run with one that was not interrupted: its last checkpoint byte by byte, its metrics field by field.

use anyhow::{Context, Result};
use ironhorse::train::format::checkpoint::{CHECKPOINTS, step_name};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Fields of the metrics that say how long something took.
const TIMES: [&str; 3] = ["ms", "data_ms", "tokens_per_s"];
/// Bytes that are compared at a time.
const PIECE: usize = 1 << 20;

/// How two runs differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// How many files were compared: those of the last checkpoint, and samples.
    pub files: usize,
    /// How many bytes these files have.
    pub bytes: u64,
    /// Bytes of them that differ; of a file that only one of the runs has, all.
    pub bytes_differ: u64,
    /// Fields of the metrics that were compared.
    pub fields: usize,
    /// How many fields of the metrics differ, or are in one of the runs only.
    pub fields_differ: usize,
    /// Temporary names that a run left behind.
    pub leftovers: Vec<String>,
    /// The first place where the runs differ, in words.
    pub first: Option<String>,
}

impl Difference {
    /// Whether nothing differs.
    pub fn is_none(&self) -> bool {
        self.first.is_none() && self.files > 0 && self.fields > 0
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        self.first.get_or_insert_with(text);
    }
}

/// Compares two runs of so many steps.
pub fn compare(reference: &Path, run: &Path, steps: u64) -> Result<Difference> {
    let mut found = Difference::default();
    for folder in [Path::new(CHECKPOINTS).join(step_name(steps)), PathBuf::from("samples")] {
        compare_folders(reference, run, &folder, &mut found)?;
    }
    compare_metrics(reference, run, &mut found)?;
    found.leftovers = leftovers(run)?;
    if let Some(name) = found.leftovers.first().cloned() {
        found.say(|| format!("{name} was left behind"));
    }
    Ok(found)
}

/// The files of a folder with their sizes; of a folder that is not there, none.
fn files_of(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.with_context(|| format!("{}: cannot read", folder.display()))?;
        let size =
            entry.metadata().with_context(|| format!("{}: cannot read", entry.path().display()))?.len();
        files.insert(entry.file_name().to_string_lossy().into_owned(), size);
    }
    Ok(files)
}

fn compare_folders(reference: &Path, run: &Path, folder: &Path, found: &mut Difference) -> Result<()> {
    let (one, two) = (reference.join(folder), run.join(folder));
    let (in_one, in_two) = (files_of(&one)?, files_of(&two)?);
    let names: BTreeSet<&String> = in_one.keys().chain(in_two.keys()).collect();
    for name in names {
        found.files += 1;
        let shown = folder.join(name);
        let (Some(&size_one), Some(&size_two)) = (in_one.get(name), in_two.get(name)) else {
            found.bytes_differ += in_one.get(name).or(in_two.get(name)).copied().unwrap_or(0).max(1);
            let whose = if in_one.contains_key(name) { "the uninterrupted" } else { "the resumed" };
            found.say(|| format!("only {whose} run has {}", shown.display()));
            continue;
        };
        found.bytes += size_one.max(size_two);
        let (differ, first) = compare_files(&one.join(name), &two.join(name))?;
        found.bytes_differ += differ;
        if let Some(first) = first {
            found.say(|| format!("{}: {differ} bytes, the first at {first}", shown.display()));
        }
    }
    Ok(())
}

/// How many bytes of two files differ, and the first.
fn compare_files(one: &Path, two: &Path) -> Result<(u64, Option<u64>)> {
    let open = |path: &Path| File::open(path).with_context(|| format!("{}: cannot open", path.display()));
    let (mut file_one, mut file_two) = (open(one)?, open(two)?);
    let (mut piece_one, mut piece_two) = (Vec::new(), Vec::new());
    let (mut at, mut differ, mut first) = (0_u64, 0_u64, None);
    loop {
        for (path, file, piece) in
            [(one, &mut file_one, &mut piece_one), (two, &mut file_two, &mut piece_two)]
        {
            piece.clear();
            let read = file.take(PIECE as u64).read_to_end(piece);
            read.with_context(|| format!("{}: cannot read", path.display()))?;
        }
        let longest = piece_one.len().max(piece_two.len());
        if longest == 0 {
            return Ok((differ, first));
        }
        if piece_one != piece_two {
            let other = (0..longest).filter(|&i| piece_one.get(i) != piece_two.get(i));
            for i in other {
                differ += 1;
                first.get_or_insert(at + i as u64);
            }
        }
        at += longest as u64;
    }
}

fn metrics_of(run: &Path) -> Result<Vec<Map<String, Value>>> {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("{}: cannot read", path.display()))?;
    let lines = text.lines().map(|line| {
        let mut fields: Map<String, Value> = serde_json::from_str(line)?;
        fields.retain(|name, _| !TIMES.contains(&name.as_str()));
        Ok(fields)
    });
    let lines: Result<Vec<_>, serde_json::Error> = lines.collect();
    lines.with_context(|| format!("{}: not valid", path.display()))
}

fn compare_metrics(reference: &Path, run: &Path, found: &mut Difference) -> Result<()> {
    let (one, two) = (metrics_of(reference)?, metrics_of(run)?);
    let nothing = Map::new();
    for line in 0..one.len().max(two.len()) {
        let (one, two) = (one.get(line).unwrap_or(&nothing), two.get(line).unwrap_or(&nothing));
        let names: BTreeSet<&String> = one.keys().chain(two.keys()).collect();
        for name in names {
            found.fields += 1;
            let (a, b) = (one.get(name), two.get(name));
            if a != b {
                found.fields_differ += 1;
                let text =
                    |value: Option<&Value>| value.map_or_else(|| "missing".into(), ToString::to_string);
                found.say(|| {
                    format!("metrics.jsonl line {}: {name} is {}, expected {}", line + 1, text(b), text(a))
                });
            }
        }
    }
    Ok(())
}

/// Temporary names below a run.
fn leftovers(run: &Path) -> Result<Vec<String>> {
    let (mut found, mut folders) = (Vec::new(), vec![run.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("{}: cannot read", folder.display()))? {
            let path = entry.with_context(|| format!("{}: cannot read", folder.display()))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') && (name.contains(".tmp-") || name.contains(".old-")) {
                found.push(path.strip_prefix(run).unwrap_or(&path).display().to_string());
            } else if path.is_dir() {
                folders.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(top: &Path, name: &str) -> PathBuf {
        let run = top.join(name);
        fs::create_dir_all(run.join("checkpoints/step-000002")).unwrap();
        fs::create_dir_all(run.join("samples")).unwrap();
        fs::write(run.join("checkpoints/step-000002/model.safetensors"), vec![7; 3 * PIECE + 5]).unwrap();
        fs::write(run.join("samples/step-000002.txt"), "once").unwrap();
        let metrics = "{\"step\":0,\"loss\":1.5,\"ms\":3}\n{\"step\":1,\"loss\":1.25,\"ms\":4}\n";
        fs::write(run.join("metrics.jsonl"), metrics).unwrap();
        run
    }

    #[test]
    fn equal_runs_do_not_differ_and_times_do_not_count() {
        let top = tempfile::tempdir().unwrap();
        let (one, two) = (run(top.path(), "one"), run(top.path(), "two"));
        let metrics = fs::read_to_string(two.join("metrics.jsonl")).unwrap().replace("\"ms\":3", "\"ms\":9");
        fs::write(two.join("metrics.jsonl"), metrics).unwrap();
        let found = compare(&one, &two, 2).unwrap();
        assert!(found.is_none(), "{found:?}");
        assert_eq!((found.files, found.fields, found.bytes), (2, 4, 3 * PIECE as u64 + 9));
    }

    #[test]
    fn every_difference_is_found() {
        let top = tempfile::tempdir().unwrap();
        let one = run(top.path(), "one");
        let differs = |name: &str, change: &dyn Fn(&Path), want: (u64, usize, &str)| {
            let two = run(top.path(), name);
            change(&two);
            let found = compare(&one, &two, 2).unwrap();
            assert!(!found.is_none());
            assert_eq!(
                (found.bytes_differ, found.fields_differ, found.first.as_deref()),
                (want.0, want.1, Some(want.2))
            );
        };
        let model = |run: &Path| run.join("checkpoints/step-000002/model.safetensors");
        differs(
            "byte",
            &|run| {
                let mut bytes = fs::read(model(run)).unwrap();
                (bytes[PIECE + 1], bytes[PIECE + 9]) = (0, 0);
                fs::write(model(run), bytes).unwrap();
            },
            (2, 0, "checkpoints/step-000002/model.safetensors: 2 bytes, the first at 1048577"),
        );
        differs(
            "short",
            &|run| fs::write(model(run), vec![7; 3 * PIECE]).unwrap(),
            (5, 0, "checkpoints/step-000002/model.safetensors: 5 bytes, the first at 3145728"),
        );
        differs(
            "missing",
            &|run| fs::remove_file(run.join("samples/step-000002.txt")).unwrap(),
            (4, 0, "only the uninterrupted run has samples/step-000002.txt"),
        );
        differs(
            "metrics",
            &|run| {
                fs::write(run.join("metrics.jsonl"), "{\"step\":0,\"loss\":1.5000001,\"ms\":3}\n").unwrap()
            },
            (0, 3, "metrics.jsonl line 1: loss is 1.5000001, expected 1.5"),
        );
        let left = ".step-000002.tmp-0";
        differs(
            "leftover",
            &|run| fs::create_dir(run.join(CHECKPOINTS).join(left)).unwrap(),
            (0, 0, &format!("checkpoints/{left} was left behind")),
        );
    }
}
