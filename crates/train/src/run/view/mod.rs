//! A run as whoever looks at it sees it: the terminal, a page, a report. Nothing in its folder is changed or locked, so the
//! run does not know.
//!
//! ```text
//! mod.rs    the folder, and what is new in it    tail.rs   the log as it grows, and is cut back
//! table.rs  the log by columns                   curve.rs  a column as it is drawn: smoothed and thinned
//! loads.rs  the loads of experts over the steps
//! ```

mod curve;
mod loads;
mod table;
mod tail;

pub use curve::{Column, Drawn, SMOOTHING};
pub use loads::Loads;
pub use table::{Quantity, Sparse, Table};

use self::tail::Tail;
use super::folder::{CONFIG, LOCK, METRICS, SAMPLES};
use super::provenance::RunJson;
use crate::format::checkpoint::checkpoints_of;
use crate::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// How many of the newest steps the present speed is judged by.
const RECENT: usize = 100;

/// Whether a process trains in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// This one does.
    Process(u32),
    /// None does, on this machine.
    Nobody,
    /// The system does not say; the log tells when it was written last.
    Unknown,
}

/// A run.
#[derive(Debug)]
pub struct RunView {
    path: PathBuf,
    /// What is wrong with lines that cannot be read, if there are any: how many, and the first.
    pub unreadable: Option<(u64, String)>,
    /// The numbers.
    pub table: Table,
    /// Its `config.toml`; empty if it has none.
    pub config: toml::Table,
    /// Where the run comes from, if its folder says so.
    pub origin: Option<RunJson>,
    /// Samples: after how many steps, and the file.
    pub samples: Vec<(u64, PathBuf)>,
    /// Checkpoints: after how many steps, the newest first.
    pub checkpoints: Vec<u64>,
    /// Who trains in it.
    pub life: Life,
    /// When the log was written last.
    pub written: Option<SystemTime>,
    tail: Tail,
}

impl RunView {
    /// Reads a run folder. All it needs is `metrics.jsonl`.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join(METRICS).is_file() {
            let found = if path.is_dir() { "a folder without metrics.jsonl" } else { "not a folder" };
            return Err(Error::field(path, "run", found, "the folder of a run, such as runs/0001"));
        }
        let mut view = Self {
            path: path.to_owned(),
            unreadable: None,
            table: Table::default(),
            config: toml::Table::new(),
            origin: None,
            samples: Vec::new(),
            checkpoints: Vec::new(),
            life: Life::Unknown,
            written: None,
            tail: Tail::default(),
        };
        view.refresh()?;
        Ok(view)
    }

    /// Reads what is new; gives whether anything is. A log that is gone for a moment, because its run is overwritten, is an
    /// empty one.
    pub fn refresh(&mut self) -> Result<bool> {
        let news = self.tail.read(&self.path.join(METRICS))?;
        if news.starts_again {
            (self.table, self.unreadable) = (Table::default(), None);
        }
        let mut changed = news.starts_again || !news.table.is_empty();
        if let Some((count, first)) = news.unreadable {
            let before = self.unreadable.take();
            let all = before.as_ref().map_or(0, |(count, _)| *count) + count;
            self.unreadable = Some((all, before.map_or(first, |(_, first)| first)));
            changed = true;
        }
        self.table.append(news.table);
        changed |= self.read_folder();
        Ok(changed)
    }

    /// Reads everything but the log; gives whether it changed.
    fn read_folder(&mut self) -> bool {
        let text = fs::read_to_string(self.path.join(CONFIG)).unwrap_or_default();
        let config = text.parse().unwrap_or_default();
        let origin = RunJson::read(&self.path).ok().flatten();
        let samples = samples_of(&self.path);
        let checkpoints = checkpoints_of(&self.path).into_iter().map(|(step, _)| step).collect();
        let life = life_of(&self.path);
        let written = fs::metadata(self.path.join(METRICS)).and_then(|meta| meta.modified()).ok();
        let now = (config, origin, samples, checkpoints, life, written);
        let before = (
            std::mem::replace(&mut self.config, now.0),
            std::mem::replace(&mut self.origin, now.1),
            std::mem::replace(&mut self.samples, now.2),
            std::mem::replace(&mut self.checkpoints, now.3),
            std::mem::replace(&mut self.life, now.4),
            std::mem::replace(&mut self.written, now.5),
        );
        before.0 != self.config
            || before.1 != self.origin
            || before.2 != self.samples
            || before.3 != self.checkpoints
            || before.4 != self.life
            || before.5 != self.written
    }

    /// The folder of the run.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last part of its path.
    pub fn name(&self) -> String {
        let full = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        full.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned())
    }

    /// A setting of a whole number.
    pub fn setting(&self, name: &str) -> Option<u64> {
        self.config.get(name)?.as_integer().and_then(|value| u64::try_from(value).ok())
    }

    /// Steps that are made.
    pub fn made(&self) -> u64 {
        self.table.steps.last().map_or(0, |last| last + 1)
    }

    /// Seconds until the last step at the present speed; `None` if that is not known or nothing is left.
    pub fn eta(&self) -> Option<f64> {
        let left = self.setting("steps")?.checked_sub(self.made()).filter(|left| *left > 0)?;
        let ms = self.table.recent(Quantity::StepMs, RECENT)?;
        Some(left as f64 * f64::from(ms) / 1e3)
    }

    /// Tokens per second at present.
    pub fn speed(&self) -> Option<f32> {
        self.table.recent(Quantity::TokensPerS, RECENT)
    }

    /// Model FLOPs utilization at present: operations of the model over the peak of the device's datasheet; `None` where that
    /// is not known.
    pub fn mfu(&self) -> Option<f64> {
        let work = self.origin.as_ref()?.last_start().work?;
        Some(f64::from(self.speed()?) * work.flops_per_token? / work.datasheet_flops?)
    }

    /// Whether every step is made, or the run ended before for a reason.
    pub fn is_complete(&self) -> bool {
        self.table.ended.is_some() || self.setting("steps").is_some_and(|steps| self.made() >= steps)
    }

    /// The text of a sample.
    pub fn sample(&self, index: usize) -> Option<(u64, String)> {
        let (step, path) = self.samples.get(index)?;
        let bytes = fs::read(path).ok()?;
        Some((*step, String::from_utf8_lossy(&bytes).into_owned()))
    }
}

/// The samples of a run by step.
fn samples_of(run: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(run.join(SAMPLES)).into_iter().flatten().flatten();
    let of = |path: PathBuf| {
        let step = path.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(".txt")?.parse().ok()?;
        Some((step, path))
    };
    let mut samples: Vec<(u64, PathBuf)> = entries.filter_map(|entry| of(entry.path())).collect();
    samples.sort();
    samples
}

/// Who holds the lock of a run's folder, without touching it: a lock that is tried could be in the way of one that trains.
#[cfg(target_os = "linux")]
fn life_of(run: &Path) -> Life {
    use std::os::unix::fs::MetadataExt;
    let (Ok(meta), Ok(locks)) = (fs::metadata(run.join(LOCK)), fs::read_to_string("/proc/locks")) else {
        return Life::Unknown;
    };
    // "1: FLOCK  ADVISORY  WRITE 4711 fe:01:123456 0 EOF"; the device is left out: file systems disagree about it
    let inode = format!(":{}", meta.ino());
    for line in locks.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [_, "FLOCK", _, "WRITE", process, place, ..] = words[..]
            && place.ends_with(&inode)
        {
            return process.parse().ok().filter(|process| *process > 0).map_or(Life::Unknown, Life::Process);
        }
    }
    Life::Nobody
}

#[cfg(not(target_os = "linux"))]
fn life_of(_: &Path) -> Life {
    let _ = LOCK;
    Life::Unknown
}

#[cfg(test)]
mod tests;
