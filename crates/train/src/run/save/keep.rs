//! Which checkpoints of a run are kept.

use super::Saver;
use crate::Result;
use crate::format::atomic;
use crate::format::checkpoint::{Checkpoint, best_checkpoint, checkpoints_of};
use std::path::{Path, PathBuf};

/// Removes all checkpoints but the newest and the best.
pub fn tidy(run: &Path, keep: usize) -> Result<()> {
    if keep == 0 {
        return Ok(());
    }
    let all = checkpoints_of(run);
    let manifest = |path: &PathBuf| Checkpoint::manifest(path).ok();
    let best = best_checkpoint(run).map(|(best, _)| best.step);
    let whole = all.iter().filter(|(_, path)| manifest(path).is_some()).map(|(step, _)| *step);
    let newest: Vec<u64> = whole.take(keep).collect();
    for (_, path) in all.iter().filter(|(step, _)| !newest.contains(step) && best != Some(*step)) {
        atomic::remove_folder(path)?;
    }
    Ok(())
}

impl Saver {
    /// Removes the checkpoints after `step`: the run went back to `step` and makes them again. The one of
    /// `step` itself has the right weights but another position in the data, so it is due again.
    pub(in crate::run) fn forget_after(&mut self, step: u64, leads: bool) -> Result<()> {
        self.last_step = None;
        if !leads {
            return Ok(());
        }
        for (_, path) in checkpoints_of(&self.plan.run).into_iter().filter(|(at, _)| *at > step) {
            atomic::remove_folder(&path)?;
        }
        Ok(())
    }
}
