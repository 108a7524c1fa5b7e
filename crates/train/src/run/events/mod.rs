//! The log of a run as TensorBoard reads it: `tensorboard/events.out.tfevents.*`. `metrics.jsonl` stays the truth; these
//! files say the same.
//!
//! ```text
//! mod.rs   the files: one for each start, cut back like the log    summary.rs  what is shown, and under which tag
//! wire.rs  protobuf fields, records with checksums
//! ```

mod summary;
mod wire;

use self::wire::{Field, Message, fields, record, split_record};
use super::append::Appender;
use super::metrics::{Ended, Metrics};
use super::provenance::host;
use crate::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The folder of the files.
pub(super) const TENSORBOARD: &str = "tensorboard";
/// What their names begin and end with; between are the seconds since 1970 and the name of the machine, by which followers of live runs (W&B's) tell
/// whose file it is.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".ironhorse";
/// The first event of a file says this.
const VERSION: &str = "brain.Event:2";

// Fields of Event, Summary and Value.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
const VALUE: u32 = 1;
const TENSOR: u32 = 8;

/// Writes the events of a run. Each start, and each return to a checkpoint, has a file of its own: TensorBoard, which follows
/// files by their offset, then forgets the steps that were undone.
#[derive(Debug)]
pub(super) struct EventWriter {
    folder: PathBuf,
    /// Made with the first event.
    out: Option<Appender>,
    /// The step at which the next file begins.
    begins_at: u64,
}

impl EventWriter {
    /// The writer for a run's folder; nothing is written yet.
    pub fn new(run: &Path) -> Self {
        Self { folder: run.join(TENSORBOARD), out: None, begins_at: 0 }
    }

    /// Removes what was logged from `step` on, and a record torn by a crash. A sample after `step` steps stays, as its file
    /// does.
    pub fn cut_back(&mut self, step: u64) -> Result<()> {
        (self.out, self.begins_at) = (None, step);
        for path in files(&self.folder) {
            let bytes = fs::read(&path).map_err(|e| Error::io(&path, "read", e))?;
            let kept = kept_bytes(&bytes, step);
            if kept < bytes.len() {
                let cut = File::options().write(true).open(&path).and_then(|file| file.set_len(kept as u64));
                cut.map_err(|e| Error::io(&path, "cut", e))?;
            }
        }
        Ok(())
    }

    /// Whether there is no file.
    pub fn is_empty(&self) -> bool {
        files(&self.folder).is_empty()
    }

    /// A step.
    pub fn step(&mut self, metrics: &Metrics) -> Result<()> {
        self.step_at(metrics, now())
    }

    /// The steps of a log that was written without events, the last of them just made.
    pub fn backfill(&mut self, all: &[Metrics]) -> Result<()> {
        let seconds = |metrics: &Metrics| f64::from(metrics.ms.max(0.0)) / 1e3; // of NaN 0, too
        self.begins_at = 0;
        let mut wall = now() - all.iter().map(seconds).sum::<f64>();
        for metrics in all {
            wall += seconds(metrics);
            self.step_at(metrics, wall)?;
        }
        Ok(())
    }

    fn step_at(&mut self, metrics: &Metrics, wall: f64) -> Result<()> {
        self.put(metrics.step, wall, &summary::of_step(metrics))
    }

    /// The validation that ended a run: it was measured after the step.
    pub fn end(&mut self, step: u64, ended: &Ended) -> Result<()> {
        self.put(step + 1, now(), &summary::of_end(ended))
    }

    /// A sample after this many steps.
    pub fn sample(&mut self, step: u64, text: &str) -> Result<()> {
        self.put(step, now(), &summary::of_sample(text))
    }

    /// Writes what could not be written before.
    pub fn flush(&mut self) -> Result<()> {
        self.out.as_mut().map_or(Ok(()), Appender::flush)
    }

    fn put(&mut self, step: u64, wall: f64, summary: &Message) -> Result<()> {
        let event = Message::default().double(WALL_TIME, wall).number(STEP, step).bytes(SUMMARY, summary);
        let begins_at = self.begins_at;
        let out = match &mut self.out {
            Some(out) => out,
            none => none.insert(begin(&self.folder, begins_at)?),
        };
        out.write(&record(&event.0))
    }
}

/// Starts a file. Its second event tells a reader that what it has of `step` and later was undone.
fn begin(folder: &Path, step: u64) -> Result<Appender> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))?;
    let last = files(folder).iter().rev().find_map(|path| number(path)).unwrap_or(0);
    let number = (now() as u64).max(last + 1); // readers go by the order of the names
    let mut out = Appender::create(&folder.join(format!("{PREFIX}{number:010}.{}{SUFFIX}", machine())))?;
    let version = Message::default().double(WALL_TIME, now()).bytes(FILE_VERSION, VERSION);
    let start = Message::default().number(1, 1); // SessionLog.START
    let start = Message::default().double(WALL_TIME, now()).number(STEP, step).bytes(SESSION_LOG, start);
    out.write(&[record(&version.0), record(&start.0)].concat())?;
    Ok(out)
}

/// The files in a folder, in the order of their names.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| number(path).is_some()).collect();
    files.sort();
    files
}

/// The number in the name of a file of ours; those of earlier versions do not name the machine.
fn number(path: &Path) -> Option<u64> {
    let between = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    between.split('.').next()?.parse().ok()
}

/// The name of this machine, as a part of the name of a file.
fn machine() -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    host().chars().map(plain).collect()
}

/// How many bytes of a file are whole records of before `step`.
fn kept_bytes(bytes: &[u8], step: u64) -> usize {
    let mut rest = bytes;
    while let Some((event, after)) = split_record(rest) {
        let (at, is_sample) = what(event);
        if at.is_some_and(|at| at > step || at == step && !is_sample) {
            break;
        }
        rest = after;
    }
    bytes.len() - rest.len()
}

/// The step of an event with a summary, and whether that is a sample.
fn what(event: &[u8]) -> (Option<u64>, bool) {
    let (mut at, mut summary) = (0, None);
    for (field, value) in fields(event) {
        match (field, value) {
            (STEP, Field::Number(step)) => at = step,
            (SUMMARY, Field::Bytes(bytes)) => summary = Some(bytes),
            _ => {}
        }
    }
    let Some(summary) = summary else { return (None, false) };
    let is_sample = fields(summary).any(|(field, value)| match (field, value) {
        (VALUE, Field::Bytes(value)) => fields(value).any(|(field, _)| field == TENSOR),
        _ => false,
    });
    (Some(at), is_sample)
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Metrics {
        Metrics { step, loss: 1.5, lr: 1e-3, ms: 2.0, tokens_per_s: 8.0, ..Metrics::default() }
    }

    /// Every event of a folder: its step, and S for a sample, N for numbers, B for the beginning of a file.
    fn told(run: &Path) -> Vec<(u64, char)> {
        let mut all = Vec::new();
        for path in files(&run.join(TENSORBOARD)) {
            let bytes = fs::read(path).unwrap();
            let mut rest = &bytes[..];
            while let Some((event, after)) = split_record(rest) {
                rest = after;
                let at = fields(event).find_map(|(field, value)| match (field, value) {
                    (STEP, Field::Number(step)) => Some(step),
                    _ => None,
                });
                all.extend(at.map(|at| match what(event) {
                    (None, _) => (at, 'B'),
                    (_, sample) => (at, if sample { 'S' } else { 'N' }),
                }));
            }
            assert!(rest.is_empty(), "a torn record");
        }
        all
    }

    #[test]
    fn files_are_cut_back_and_continued() {
        let run = tempfile::tempdir().unwrap();
        let mut events = EventWriter::new(run.path());
        assert!(events.is_empty());
        (0..3).for_each(|i| events.step(&step(i)).unwrap());
        events.sample(3, "three").unwrap();
        (3..5).for_each(|i| events.step(&step(i)).unwrap());
        events.sample(5, "five").unwrap();
        let first = files(&events.folder)[0].clone();
        let whole = fs::read(&first).unwrap();
        fs::write(&first, &whole[..whole.len() - 3]).unwrap(); // killed while it wrote
        let mut events = EventWriter::new(run.path());
        events.cut_back(5).unwrap();
        assert_eq!(told(run.path()), [(0, 'B'), (0, 'N'), (1, 'N'), (2, 'N'), (3, 'S'), (3, 'N'), (4, 'N')]);
        events.cut_back(3).unwrap();
        events.step(&step(3)).unwrap();
        let expected = [(0, 'B'), (0, 'N'), (1, 'N'), (2, 'N'), (3, 'S'), (3, 'B'), (3, 'N')];
        assert_eq!(told(run.path()), expected);
        assert_eq!(files(&events.folder).len(), 2);
        assert!(!events.is_empty());
        // the first file alone: from the second start on nothing of it is touched
        assert_eq!(
            kept_bytes(&fs::read(&first).unwrap(), u64::MAX),
            fs::metadata(&first).unwrap().len() as usize
        );
    }

    #[test]
    fn a_log_without_events_gets_them() {
        let run = tempfile::tempdir().unwrap();
        let mut events = EventWriter::new(run.path());
        events.backfill(&[step(0), Metrics { ms: f32::NAN, ..step(1) }]).unwrap();
        assert_eq!(told(run.path()), [(0, 'B'), (0, 'N'), (1, 'N')]);
    }

    #[test]
    fn names_say_when_and_where_and_those_of_earlier_versions_still_count() {
        let name = |text: &str| number(Path::new(text));
        assert_eq!(name("a/events.out.tfevents.1794942280.ironhorse"), Some(1_794_942_280));
        assert_eq!(name("events.out.tfevents.1794942280.node-7.example.org.ironhorse"), Some(1_794_942_280));
        for other in
            ["events.out.tfevents.1794942280.node-7", "events.out.tfevents.x.ironhorse", "metrics.jsonl"]
        {
            assert_eq!(name(other), None, "{other} is not one of ours");
        }
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join(TENSORBOARD);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("events.out.tfevents.9999999998.ironhorse"), "").unwrap();
        EventWriter::new(top.path()).step(&step(0)).unwrap();
        let made = files(&folder).pop().unwrap();
        assert_eq!(number(&made), Some(9_999_999_999), "after the others");
        assert!(made.to_str().unwrap().ends_with(&format!(".{}.ironhorse", machine())));
        assert!(machine().chars().all(|c| c != '/' && !c.is_whitespace()));
    }
}
