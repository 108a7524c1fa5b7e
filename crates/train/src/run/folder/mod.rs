//! The folder of a run: settings, metrics, curve, samples, checkpoints. One process at a time holds it.

mod claim;

pub use self::claim::COMPARE_SVG;
pub(super) use self::claim::LOCK;
use self::claim::{EXPERTS_SVG, LOSS_SVG, OURS, PREVIOUS, check_free, lock, put_aside, remove_if_there};
use crate::format::atomic;
use crate::format::black_box::BAD;
use crate::format::checkpoint::{CHECKPOINTS, is_run};
use crate::picture::{Series, Style, load_svg, loss_svg};
use crate::run::events::EventWriter;
use crate::run::metrics::{Ended, Metrics, MetricsWriter, read_metrics};
use crate::session::LayerRouting;
use crate::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

pub(super) const CONFIG: &str = "config.toml";
pub(super) const METRICS: &str = "metrics.jsonl";
pub(super) const SAMPLES: &str = "samples";
/// A file of this name asks for a save.
const SAVE: &str = "SAVE";
/// A run's folder, open for writing and locked.
pub struct RunFolder {
    path: PathBuf,
    /// Held until the run ends, however it ends; `None` where another rank holds it.
    _lock: Option<File>,
    /// `None` where another rank writes it.
    metrics: Option<MetricsWriter>,
    /// The same for TensorBoard.
    events: EventWriter,
    train: Vec<(f64, f64)>,
    val: Vec<(f64, f64)>,
    /// Shares of the experts, layer by layer, as a moving average.
    load: Vec<Vec<f64>>,
}

/// How much a reading counts in the average of the experts' shares: about the last fifty matter.
const NEWEST: f64 = 0.04;

impl RunFolder {
    /// Makes the folder, or takes an empty one. One that holds a run is refused unless `overwrite`, which puts the old
    /// run aside until this one has a checkpoint; one that holds anything else is refused.
    pub fn create(path: &Path, config_toml: &str, overwrite: bool) -> Result<Self> {
        fs::create_dir_all(path).map_err(|source| Error::io(path, "create", source))?;
        check_free(path, overwrite)?;
        let lock = lock(path)?;
        check_free(path, overwrite)?; // again: another process may have been between the look and the lock
        let _ = atomic::sweep(path); // of a process that was killed while it began
        if OURS.iter().any(|name| path.join(name).exists()) {
            put_aside(path)?;
        }
        fs::create_dir_all(path.join(SAMPLES)).map_err(|source| Error::io(path, "create", source))?;
        atomic::write_file(&path.join(CONFIG), |sink| sink.put(config_toml.as_bytes()))?;
        let metrics = MetricsWriter::create(&path.join(METRICS))?;
        Ok(Self::with(path, Some(lock), Some(metrics)))
    }

    /// Refuses what [`Self::create`] would, where there is something already: to be asked before hours of work.
    pub fn check_free(path: &Path, overwrite: bool) -> Result<()> {
        if path.exists() { check_free(path, overwrite) } else { Ok(()) }
    }

    /// Takes the folder of a run that is resumed, and removes temporary files of a killed process.
    pub fn open(path: &Path) -> Result<Self> {
        if !is_run(path) {
            return Err(Error::field(path, "folder", "not a run", "one with config.toml and metrics.jsonl"));
        }
        let lock = lock(path)?;
        let boxes = fs::read_dir(path.join(BAD)).into_iter().flatten().flatten().map(|entry| entry.path());
        for folder in [path.to_owned(), path.join(CHECKPOINTS), path.join(SAMPLES)].into_iter().chain(boxes) {
            let _ = atomic::sweep(&folder); // what cannot be removed does no harm
        }
        fs::create_dir_all(path.join(SAMPLES)).map_err(|source| Error::io(path, "create", source))?;
        let (metrics, _) = MetricsWriter::resume(&path.join(METRICS), u64::MAX)?;
        Ok(Self::with(path, Some(lock), Some(metrics)))
    }

    /// The folder of a run that another rank writes: nothing in it is changed.
    pub fn follow(path: &Path) -> Self {
        Self::with(path, None, None)
    }

    /// Whether this process writes it.
    fn leads(&self) -> bool {
        self.metrics.is_some()
    }

    /// Removes the folder of a run that failed before its first step, so that the next try can use the name. One
    /// that another process holds by now, or that has steps, is left alone; what cannot be removed does no harm.
    pub fn remove_unused(path: &Path) {
        if let Ok(_lock) = lock(path)
            && fs::metadata(path.join(METRICS)).map_or(0, |meta| meta.len()) == 0
        {
            let _ = fs::remove_dir_all(path);
        }
    }

    fn with(path: &Path, lock: Option<File>, metrics: Option<MetricsWriter>) -> Self {
        let (train, val, load) = (Vec::new(), Vec::new(), Vec::new());
        Self { path: path.to_owned(), _lock: lock, metrics, events: EventWriter::new(path), train, val, load }
    }

    /// Cuts the log back to the steps before `step` and gives them. The last one does not say any longer that the run ended.
    pub fn cut_back(&mut self, step: u64) -> Result<Vec<Metrics>> {
        let kept = match self.leads() {
            true => self.cut_log(step)?,
            false => {
                let mut kept = read_metrics(&self.path.join(METRICS))?;
                kept.retain(|metrics| metrics.step < step);
                kept
            }
        };
        (self.train, self.val, self.load) = (Vec::new(), Vec::new(), Vec::new());
        kept.iter().for_each(|metrics| self.remember(metrics));
        Ok(kept)
    }

    fn cut_log(&mut self, step: u64) -> Result<Vec<Metrics>> {
        let (mut writer, mut kept) = MetricsWriter::resume(&self.path.join(METRICS), step)?;
        if let Some(last) = kept.last_mut().filter(|last| last.ended.is_some()) {
            last.ended = None;
            writer.amend_last(last)?;
        }
        self.metrics = Some(writer);
        self.remove_samples_after(step);
        self.events.cut_back(step)?;
        if self.events.is_empty() {
            self.events.backfill(&kept)?; // a run of a version that wrote none
        }
        Ok(kept)
    }

    /// Replaces the settings with those of a resumed run.
    pub fn set_config(&self, config_toml: &str) -> Result<()> {
        atomic::write_file(&self.path.join(CONFIG), |sink| sink.put(config_toml.as_bytes()))
    }

    /// Steps logged so far.
    pub fn steps(&self) -> u64 {
        self.train.len() as u64
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a step to `metrics.jsonl` and to TensorBoard's file. Where the disk refuses, both are kept and written with the
    /// next one.
    pub fn log(&mut self, metrics: &Metrics) -> Result<()> {
        self.remember(metrics);
        let Some(log) = &mut self.metrics else { return Ok(()) };
        log.write(metrics).and(self.events.step(metrics))
    }

    /// Writes into the last line of `metrics.jsonl` why the run ended.
    pub(super) fn log_end(&mut self, ended: Ended) -> Result<()> {
        let Some(log) = &mut self.metrics else { return Ok(()) };
        log.flush()?;
        let Some(last) = read_metrics(&self.path.join(METRICS))?.pop() else { return Ok(()) };
        let last = Metrics { ended: Some(ended), ..last };
        self.val.extend(last_val(&last));
        log.amend_last(&last)?;
        self.events.end(last.step, &ended)
    }

    /// How many validations after that of `step` are in the log.
    pub(super) fn validations_after(&self, step: u64) -> u64 {
        self.val.iter().filter(|(at, _)| *at > step as f64).count() as u64
    }

    /// Writes lines that the disk refused before.
    pub fn flush(&mut self) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), MetricsWriter::flush).and(self.events.flush())
    }

    /// The log's file, for another thread to sync.
    pub(super) fn log_handle(&self) -> Option<File> {
        self.metrics.as_ref().and_then(MetricsWriter::handle)
    }

    fn remember(&mut self, metrics: &Metrics) {
        let step = metrics.step as f64;
        self.train.push((step, f64::from(metrics.loss)));
        self.val.extend(metrics.val_loss.map(|loss| (step, f64::from(loss))));
        if self.load.len() != metrics.router.len() && !metrics.router.is_empty() {
            let first = |layer: &LayerRouting| layer.load.iter().map(|&load| f64::from(load)).collect();
            self.load = metrics.router.iter().map(first).collect();
        }
        for (mean, layer) in self.load.iter_mut().zip(&metrics.router) {
            for (mean, &load) in mean.iter_mut().zip(&layer.load) {
                *mean += NEWEST * (f64::from(load) - *mean);
            }
        }
    }

    /// Whether there is a file `SAVE` in the folder, which is then removed.
    pub(super) fn take_save(&self) -> bool {
        let path = self.path.join(SAVE);
        self.leads() && path.exists() && fs::remove_file(path).is_ok()
    }

    /// Draws `loss.svg` and, of a model with experts, `experts.svg`.
    pub fn curve(&self) -> Result<()> {
        if !self.leads() {
            return Ok(());
        }
        let series = |name: &str, points: &[(f64, f64)], style| Series {
            name: name.into(),
            points: points.iter().copied().filter(|(_, loss)| loss.is_finite()).collect(),
            style,
        };
        let mut all = vec![series("training", &self.train, Style::Smoothed)];
        if !self.val.is_empty() {
            all.push(series("validation", &self.val, Style::Dots));
        }
        let title = self.path.file_name().map_or("run".into(), |name| name.to_string_lossy());
        loss_svg(&self.path.join(LOSS_SVG), &title, &all)?;
        if self.load.is_empty() { Ok(()) } else { load_svg(&self.path.join(EXPERTS_SVG), &self.load) }
    }

    /// Removes samples of steps that were undone; one that cannot be removed does no harm.
    fn remove_samples_after(&self, step: u64) {
        for entry in fs::read_dir(self.path.join(SAMPLES)).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let of = name
                .to_str()
                .and_then(|name| name.strip_prefix("step-")?.strip_suffix(".txt")?.parse::<u64>().ok());
            if of.is_some_and(|of| of > step) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn sample_path(&self, step: u64) -> PathBuf {
        self.path.join(SAMPLES).join(format!("step-{step:06}.txt"))
    }

    /// Whether there is a sample after this many steps.
    pub(super) fn has_sample(&self, step: u64) -> bool {
        self.sample_path(step).exists()
    }

    /// Writes a sample.
    pub fn sample(&mut self, step: u64, text: &str) -> Result<()> {
        if !self.leads() {
            return Ok(());
        }
        atomic::write_file(&self.sample_path(step), |sink| sink.put(text.as_bytes()))?;
        self.events.sample(step, text)
    }

    /// Removes the run that `--overwrite` put aside, now that this one has a checkpoint.
    pub(super) fn forget_previous(&self) -> Result<()> {
        remove_if_there(&self.path.join(PREVIOUS))
    }
}

/// The validation that ended a run: it was measured after the step of its line.
fn last_val(metrics: &Metrics) -> Option<(f64, f64)> {
    metrics.ended.map(|ended| ((metrics.step + 1) as f64, f64::from(ended.val_loss)))
}

#[cfg(test)]
mod tests {
    use super::claim::LOCK;
    use super::*;
    use crate::format::checkpoint::checkpoints_of;

    #[test]
    fn a_folder_that_is_not_ours_is_left_alone() {
        let top = tempfile::tempdir().unwrap();
        for name in ["thesis.tex", "config.toml"] {
            let mine = top.path().join(format!("of-{name}"));
            fs::create_dir(&mine).unwrap();
            fs::write(mine.join(name), "precious").unwrap();
            for overwrite in [false, true] {
                let text = RunFolder::create(&mine, "steps = 1\n", overwrite).err().unwrap().to_string();
                assert!(text.contains(&format!("not a run and holds {name}")), "{text}");
            }
            assert_eq!(fs::read_dir(&mine).unwrap().count(), 1, "nothing was put there");
            assert_eq!(fs::read_to_string(mine.join(name)).unwrap(), "precious");
        }
    }

    #[test]
    fn two_never_share_a_folder() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("run");
        let first = RunFolder::create(&path, "steps = 1\n", false).unwrap();
        for second in [RunFolder::create(&path, "", true), RunFolder::open(&path)] {
            let text = second.err().unwrap().to_string();
            assert!(text.contains("in use by process"), "{text}");
        }
        assert_eq!(fs::read_to_string(path.join(CONFIG)).unwrap(), "steps = 1\n");
        drop(first);
        let text = RunFolder::create(&path, "", false).err().unwrap().to_string();
        assert!(text.contains("holds a run already; resume it with --resume"), "{text}");
        RunFolder::open(&path).unwrap();
    }

    #[test]
    fn a_start_that_was_killed_is_not_in_the_way() {
        let top = tempfile::tempdir().unwrap();
        let begun: [&[&str]; 4] = [
            &[],
            &[".config.toml.tmp-0123456789abcdef0123456789abcdef"],
            &["config.toml"],
            &["config.toml", "metrics.jsonl", ".run.json.tmp-0123456789abcdef0123456789abcdef"],
        ];
        for (i, names) in begun.iter().enumerate() {
            let path = top.path().join(i.to_string());
            fs::create_dir_all(path.join(SAMPLES)).unwrap();
            fs::write(path.join(LOCK), "process 1 on here\n").unwrap();
            names.iter().for_each(|name| fs::write(path.join(name), "").unwrap());
            let overwrite = names.contains(&"metrics.jsonl");
            drop(RunFolder::create(&path, "steps = 1\n", overwrite).unwrap());
            let hidden = fs::read_dir(&path).unwrap().flatten().map(|entry| entry.file_name());
            assert_eq!(hidden.filter(|name| name.to_string_lossy().starts_with('.')).count(), 0, "{names:?}");
            // a file that is not ours is still refused
            fs::remove_file(path.join(CONFIG)).unwrap();
            fs::write(path.join("thesis.tex"), "precious").unwrap();
            assert!(RunFolder::create(&path, "", true).is_err());
        }
    }

    #[test]
    fn only_a_folder_that_nobody_uses_is_removed() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("run");
        let held = RunFolder::create(&path, "steps = 1\n", false).unwrap();
        RunFolder::remove_unused(&path);
        assert!(path.join(CONFIG).exists(), "another process holds it");
        drop(held);
        fs::write(path.join(METRICS), "a step\n").unwrap();
        RunFolder::remove_unused(&path);
        assert!(path.join(CONFIG).exists(), "it has steps");
        fs::write(path.join(METRICS), "").unwrap();
        RunFolder::remove_unused(&path);
        assert!(!path.exists());
    }

    #[test]
    fn an_overwritten_run_is_kept_until_the_new_one_has_a_checkpoint() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("run");
        drop(RunFolder::create(&path, "steps = 1\n", false).unwrap());
        let old = path.join(CHECKPOINTS).join("step-000005");
        fs::create_dir_all(&old).unwrap();
        fs::write(old.join("trainer.json"), "{}").unwrap();
        fs::write(path.join("notes.txt"), "mine").unwrap();
        let kept = path.join(PREVIOUS).join(CHECKPOINTS).join("step-000005");
        for _ in 0..2 {
            // the second finds a run without a checkpoint and must not let it push the good one out
            let run = RunFolder::create(&path, "steps = 2\n", true).unwrap();
            assert!(kept.exists() && checkpoints_of(&path).is_empty());
            assert_eq!(run.steps(), 0);
        }
        RunFolder::open(&path).unwrap().forget_previous().unwrap();
        assert!(!path.join(PREVIOUS).exists());
        assert_eq!(fs::read_to_string(path.join("notes.txt")).unwrap(), "mine");
    }
}
