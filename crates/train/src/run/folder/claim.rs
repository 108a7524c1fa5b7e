//! Who may use a folder: it is locked while a process trains in it, and nothing that is not ours is touched.

use super::super::events::TENSORBOARD;
use super::super::provenance;
use super::{CONFIG, METRICS, SAMPLES};
use crate::format::black_box::BAD;
use crate::format::checkpoint::{CHECKPOINTS, checkpoints_of, is_run};
use crate::{Error, Result};
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::Path;

pub const LOSS_SVG: &str = "loss.svg";
pub const EXPERTS_SVG: &str = "experts.svg";
/// The picture of `ironhorse compare`.
pub const COMPARE_SVG: &str = "compare.svg";
/// The logs of ranks.
pub const RANKS: &str = "ranks";
pub const LOCK: &str = "lock";
/// The lock file begins with this, followed by the process id.
const HOLDER: &str = "process ";
/// Where `--overwrite` puts the run that was there until the new one has a checkpoint.
pub const PREVIOUS: &str = "previous";
/// Everything a run writes into its folder, those of earlier versions included. The first [`WITH_WEIGHTS`] hold weights:
/// they are put aside first, so that a process which is killed on the way leaves them together.
pub const OURS: [&str; 17] = [
    CHECKPOINTS,
    BAD,
    "checkpoint",
    "before-divergence",
    "before-error",
    METRICS,
    SAMPLES,
    provenance::RUN_JSON,
    provenance::ALGORITHMS,
    LOSS_SVG,
    EXPERTS_SVG,
    COMPARE_SVG,
    RANKS,
    TENSORBOARD,
    "report.html",
    "report.md",
    CONFIG,
];
const WITH_WEIGHTS: usize = 5;

/// Refuses a folder that holds a run which is not to be overwritten, or any file that is not ours.
pub fn check_free(path: &Path, overwrite: bool) -> Result<()> {
    if is_run(path) {
        return if overwrite { Ok(()) } else { Err(Error::RunExists { path: path.to_owned() }) };
    }
    let entries = fs::read_dir(path).map_err(|source| Error::io(path, "read", source))?;
    let begun = begun_by_us(path);
    let ours = |name: &OsStr| {
        name == LOCK
            || name == PREVIOUS
            || begun && OURS[WITH_WEIGHTS..].iter().any(|ours| name == *ours || is_temporary(name, ours))
    };
    let theirs = entries.flatten().map(|entry| entry.file_name()).find(|name| !ours(name));
    match theirs {
        None => Ok(()),
        Some(name) => Err(Error::field(
            path,
            "folder",
            format!("not a run and holds {}", name.display()),
            "an empty or new folder for --out",
        )),
    }
}

/// Whether one of our processes began a run in this folder. What it left when it was killed before its first step does not keep
/// another from beginning here.
fn begun_by_us(path: &Path) -> bool {
    fs::read_to_string(path.join(LOCK)).is_ok_and(|text| text.starts_with(HOLDER) && text.contains(" on "))
}

/// Whether `name` is that of a file `ours` while it is being written.
fn is_temporary(name: &OsStr, ours: &str) -> bool {
    let rest = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_prefix(ours));
    rest.is_some_and(|rest| rest.starts_with(".tmp-"))
}

/// Takes the lock of a run's folder: the system gives it back when the process ends, however it ends.
pub fn lock(path: &Path) -> Result<File> {
    let at = path.join(LOCK);
    let opened = File::options().read(true).write(true).create(true).truncate(false).open(&at);
    let mut file = opened.map_err(|source| Error::io(&at, "create", source))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder); // only for the error message
            let holder = if holder.trim().is_empty() { "another process" } else { holder.trim() };
            return Err(Error::field(path, "run", format!("in use by {holder}"), "one at a time"));
        }
        // a file system without locks: better to train without one than not at all
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
        Err(TryLockError::Error(source)) => return Err(Error::io(&at, "lock", source)),
    }
    let said = format!("{HOLDER}{} on {}\n", std::process::id(), provenance::host());
    let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(said.as_bytes()));
    Ok(file)
}

/// Moves a run into `previous/`. An older run in there is removed, unless the newer one
/// has no checkpoint: then the older one is kept and the newer one is removed.
pub fn put_aside(path: &Path) -> Result<()> {
    let previous = path.join(PREVIOUS);
    let keep_older =
        previous.exists() && checkpoints_of(path).is_empty() && !checkpoints_of(&previous).is_empty();
    if !keep_older {
        remove_if_there(&previous)?;
        fs::create_dir(&previous).map_err(|source| Error::io(&previous, "create", source))?;
    }
    for name in OURS.iter().map(|name| path.join(name)).filter(|name| name.exists()) {
        let to = previous.join(name.file_name().unwrap_or_default());
        if keep_older {
            remove_if_there(&name)?;
        } else {
            fs::rename(&name, &to).map_err(|source| Error::io(&name, "put aside", source))?;
        }
    }
    Ok(())
}

pub fn remove_if_there(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(path, "remove", error)),
        _ => Ok(()),
    }
}
