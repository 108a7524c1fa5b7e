//! What a run writes: checkpoints, and the host memory that a save needs.

use crate::hardware::human_bytes;
use ironhorse::core::{Layout, Precision};
use ironhorse::train::format::checkpoint::{CheckpointParts, checkpoint_bytes};
use ironhorse::train::model::Adapted;
use serde::Serialize;

/// What a run takes of the disk, and of host memory while it saves.
#[derive(Serialize)]
pub struct Disk {
    /// One checkpoint.
    checkpoint_bytes: u64,
    keep: usize,
    /// The most at a time: those kept, the best, and the one being written. Absent where all are kept.
    kept_bytes: Option<u64>,
    /// The copy that a thread writes while training continues; not needed with `--save-sync`.
    save_memory_bytes: u64,
}

impl Disk {
    pub fn new(model: &Adapted, precision: Precision, layout: &Layout, keep: usize) -> Self {
        let checkpoint_bytes = checkpoint_bytes(model, precision);
        let pools = CheckpointParts::pools(precision);
        Self {
            checkpoint_bytes,
            keep,
            kept_bytes: (keep > 0).then(|| checkpoint_bytes.saturating_mul(keep as u64 + 2)),
            save_memory_bytes: pools.into_iter().map(|pool| layout.bytes(pool) as u64).sum(),
        }
    }

    /// The lines of the table.
    pub fn lines(&self) -> [String; 2] {
        let one = human_bytes(self.checkpoint_bytes);
        let all = match self.kept_bytes {
            Some(bytes) => format!(
                "at most {} at a time with --keep {}: the newest {}, the best, and the one being written",
                human_bytes(bytes),
                self.keep,
                self.keep
            ),
            None => "all are kept".into(),
        };
        let copy = human_bytes(self.save_memory_bytes);
        [
            format!("{:<20} {one:>12}  on the disk; {all}", "a checkpoint"),
            format!(
                "{:<20} {copy:>12}  of host memory: the copy that is written while training continues",
                "a save"
            ),
        ]
    }
}
