//! Finds the checkpoints of a run. A checkpoint counts if it is complete, whatever its name says.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::{Best, Checkpoint, TRAINER};
use crate::{Error, Result};

/// The folder of a run's checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// `RUN/best` is the checkpoint of a run with the lowest validation loss.
pub const BEST: &str = "best";
/// The folder of the only checkpoint of a run of an earlier version.
const EARLIER: &str = "checkpoint";

/// The name of the checkpoint after this many steps.
pub fn step_name(step: u64) -> String {
    format!("step-{step:06}")
}

/// The number of steps in the name of a checkpoint.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-").filter(|digits| digits.len() >= 6)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// The folders below `run` that have the name and files of a checkpoint, the one with the most steps first. The
/// contents of the files are not checked.
pub fn checkpoints_of(run: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| Some((step_of(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(_, path)| path.join(TRAINER).is_file())
        .collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    found
}

/// Of the checkpoints of a run whose validation loss is known, the one with the lowest. The contents of its files are not
/// checked.
pub fn best_checkpoint(run: &Path) -> Option<(Best, PathBuf)> {
    let bests = checkpoints_of(run).into_iter().filter_map(|(step, path)| {
        let state = Checkpoint::manifest(&path).ok()?.state;
        // files from before `validated` know it of a best alone
        let measured = state.validated.or(state.best).filter(|measured| measured.step == step)?;
        Some((measured, path))
    });
    bests.min_by(|(a, _), (b, _)| a.val_loss.total_cmp(&b.val_loss))
}

/// The checkpoint that `RUN/best` means; any other path is itself.
pub fn named_checkpoint(path: &Path) -> Result<Cow<'_, Path>> {
    let run = path.parent().filter(|run| path.ends_with(BEST) && is_run(run) && !path.exists());
    let Some(run) = run else { return Ok(path.into()) };
    match best_checkpoint(run) {
        Some((_, path)) => Ok(path.into()),
        None => Err(Error::field(
            run,
            "run",
            "without a checkpoint that was the best",
            "one with a validation loss; for the newest checkpoint give the run itself",
        )),
    }
}

/// Whether a folder is the folder of a run.
pub fn is_run(path: &Path) -> bool {
    let has = |name: &str| path.join(name).exists();
    has("config.toml") && (has("run.json") || has("metrics.jsonl"))
}

/// Whether a folder holds checkpoints, of this version or an earlier one.
pub(in crate::format) fn has_checkpoints(path: &Path) -> bool {
    path.join(CHECKPOINTS).is_dir() || path.join(EARLIER).join(TRAINER).is_file()
}

/// Opens the newest checkpoint of a run that `open` accepts; `damaged` is called for those that were skipped.
pub fn open_latest<T>(
    run: &Path,
    open: impl Fn(&Path) -> Result<T>,
    mut damaged: impl FnMut(&Error),
) -> Result<Option<T>> {
    let earlier = run.join(EARLIER);
    let candidates = checkpoints_of(run).into_iter().map(|(_, path)| path);
    for path in candidates.chain(earlier.join(TRAINER).is_file().then_some(earlier)) {
        match open(&path) {
            Ok(found) => return Ok(Some(found)),
            Err(error) => damaged(&error),
        }
    }
    Ok(None)
}

/// The run below `runs` with the most recently written checkpoint.
pub fn newest_run(runs: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(runs).ok()?;
    let written = |run: &Path| {
        let (_, newest) = checkpoints_of(run).into_iter().next().unwrap_or((0, run.join(EARLIER)));
        std::fs::metadata(newest.join(TRAINER)).and_then(|meta| meta.modified()).ok()
    };
    let runs = entries.flatten().map(|entry| entry.path()).filter_map(|run| Some((written(&run)?, run)));
    runs.max().map(|(_, run)| run)
}

impl Checkpoint {
    /// The newest complete checkpoint of a run, opened for its weights.
    pub fn of_run(run: &Path) -> Result<Self> {
        Self::of_run_as(run, Self::open_weights).map(|(found, _)| found)
    }

    /// The newest checkpoint of a run that `open` accepts, and what is wrong with newer ones.
    pub fn of_run_as(run: &Path, open: impl Fn(&Path) -> Result<Self>) -> Result<(Self, Vec<String>)> {
        let mut damage = Vec::new();
        let found = open_latest(run, open, |error| damage.push(error.to_string()))?;
        match (found, damage.first()) {
            (Some(found), _) => Ok((found, damage)),
            (None, Some(error)) => {
                Err(Error::field(run, "run", format!("without a valid checkpoint ({error})"), "one"))
            }
            (None, None) => Err(Error::field(
                run,
                "run",
                "without a checkpoint: the run ended before the first was written",
                "a run with one, a checkpoint or a Hugging Face folder",
            )),
        }
    }
}
