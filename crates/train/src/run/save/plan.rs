//! What every save of a run shares: where checkpoints go, what is in them, and what room there is for them.

use crate::format::atomic::NewFolder;
use crate::format::checkpoint::{
    CHECKPOINTS, CheckpointAdapter, CheckpointParts, Report, Share, SharedLayout, TrainerState, Written,
    checkpoint_bytes, step_name, write_checkpoint,
};
use crate::format::disk::free_bytes;
use crate::format::tokenizer::KeptTokenizer;
use crate::host::human_bytes;
use crate::model::{Adapted, ModelConfig};
use crate::{Error, Result};
use ironhorse_core::{Param, Pool, Precision};
use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};

/// What every save of a run shares, on this thread and on the one that writes.
pub(super) struct Plan {
    pub run: PathBuf,
    pub config: ModelConfig,
    pub adapter: Option<CheckpointAdapter>,
    pub precision: Precision,
    pub params: Vec<Param>,
    pub pools: Vec<(Pool, usize)>,
    pub tokenizer: Option<KeptTokenizer>,
    pub part_bytes: u64,
}

impl Plan {
    pub fn place(&self, step: u64) -> PathBuf {
        self.run.join(CHECKPOINTS).join(step_name(step))
    }

    fn model(&self) -> Adapted {
        Adapted { config: self.config, lora: self.adapter.as_ref().map(|adapter| adapter.lora) }
    }

    /// Refuses to begin what the disk has no room for.
    pub fn check_space(&self) -> Result<()> {
        let (needs, has) = (checkpoint_bytes(&self.model(), self.precision), free_bytes(&self.run)?);
        if needs <= has {
            return Ok(());
        }
        let found = format!("{} free", human_bytes(has));
        Err(Error::field(&self.run, "disk", found, format!("{} for a checkpoint", human_bytes(needs))))
    }

    /// A tensor of the snapshot.
    pub fn tensor(&self, snapshot: &[u8], pool: Pool, index: usize, bytes: &mut Vec<u8>) -> Result<()> {
        let start = self.pools.iter().find(|(held, _)| *held == pool).map(|&(_, start)| start);
        let found = start.zip(self.params.get(index)).and_then(|(start, param)| {
            let slot = param.in_pool(pool);
            snapshot.get(start + slot.offset..start + slot.offset + slot.bytes())
        });
        let Some(found) = found else {
            let text = format!("the snapshot has no tensor number {index} of the {}", pool.name());
            return Err(ironhorse_core::Error::Program(text).into());
        };
        bytes.clear();
        bytes.extend_from_slice(found);
        Ok(())
    }

    /// Writes the checkpoint of a step to its place in the run.
    pub fn write(
        &self,
        state: &TrainerState,
        log: Option<File>,
        read: impl FnMut(Pool, usize, &mut Vec<u8>) -> Result<()>,
    ) -> Result<Written> {
        if let Some(log) = log {
            let _ = log.sync_data(); // the steps before a checkpoint must not be missing from the log after a power cut
        }
        let folder = self.run.join(CHECKPOINTS);
        std::fs::create_dir_all(&folder).map_err(|source| Error::io(&folder, "create", source))?;
        self.write_to(&self.place(state.step), state, read)
    }

    pub fn write_to(
        &self,
        place: &Path,
        state: &TrainerState,
        read: impl FnMut(Pool, usize, &mut Vec<u8>) -> Result<()>,
    ) -> Result<Written> {
        write_checkpoint(place, &self.parts(state), read)
    }

    fn parts<'a>(&'a self, state: &'a TrainerState) -> CheckpointParts<'a> {
        CheckpointParts {
            config: &self.config,
            precision: self.precision,
            trainer: state,
            adapter: self.adapter.as_ref(),
            tokenizer: self.tokenizer.as_ref(),
            part_bytes: self.part_bytes,
        }
    }

    /// Makes the folder of a checkpoint that all ranks write into.
    pub fn begin_shared(&self, place: &Path) -> Result<NewFolder> {
        self.check_space()?;
        let folder = self.run.join(CHECKPOINTS);
        std::fs::create_dir_all(&folder).map_err(|source| Error::io(&folder, "create", source))?;
        SharedLayout::new(&self.parts(&TrainerState::default()))?.begin(place)
    }

    /// Writes what this rank has into it; `read(number)` gives the bytes of each share.
    pub fn write_shares<'a>(
        &self,
        at: &Path,
        state: &TrainerState,
        shares: &[Share],
        read: impl FnMut(usize) -> Result<Cow<'a, [u8]>>,
    ) -> Result<Report> {
        let parts = self.parts(state);
        SharedLayout::new(&parts)?.write(at, &parts, shares, read)
    }

    /// The same of a copy that holds them one after the other.
    pub fn write_copied(
        &self,
        at: &Path,
        state: &TrainerState,
        shares: &[Share],
        mut rest: &[u8],
    ) -> Result<Report> {
        self.write_shares(at, state, shares, |number| {
            let share = &shares[number];
            let length = share.elements.len() * self.precision.of(share.pool).size();
            let (bytes, later) = rest.split_at(length.min(rest.len()));
            rest = later;
            Ok(Cow::Borrowed(bytes))
        })
    }

    /// Completes it.
    pub fn finish_shared(
        &self,
        folder: NewFolder,
        state: &TrainerState,
        reports: &[Report],
    ) -> Result<Written> {
        let parts = self.parts(state);
        SharedLayout::new(&parts)?.finish(folder, &parts, reports)
    }

    /// The places for the last checkpoint if it cannot be written to the run's folder: home, temporary folder, memory.
    pub fn other_places(&self, step: u64) -> Vec<PathBuf> {
        let run = std::path::absolute(&self.run).unwrap_or_else(|_| self.run.clone());
        let name = run.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let folders = home.into_iter().chain([std::env::temp_dir(), PathBuf::from("/dev/shm")]);
        let needs = checkpoint_bytes(&self.model(), self.precision);
        folders
            .filter(|folder| folder.is_dir() && free_bytes(folder).is_ok_and(|free| free > needs))
            .map(|folder| folder.join(format!("ironhorse-rescued-{name}-{}", step_name(step))))
            .filter(|place| !place.exists())
            .collect()
    }
}
