//! The folder of a run: settings, metrics, curve, samples, checkpoint.

use crate::format::Elem;
use crate::format::atomic;
use crate::format::checkpoint::{CheckpointParts, Part, TrainerState, write_checkpoint};
use crate::format::llmc_model::{check_finite, row_len};
use crate::format::tokenizer::Tokenizer;
use crate::heatmap::load_svg;
use crate::metrics::{Metrics, MetricsWriter};
use crate::plot::{Series, Style, loss_svg};
use crate::session::{LayerRouting, Session};
use crate::{Error, Result};
use ironhorse_core::Pool;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const CHECKPOINT: &str = "checkpoint";
const METRICS: &str = "metrics.jsonl";
const SAMPLES: &str = "samples";

/// How a run ended, which decides where its checkpoint goes: nobody continues from one that went wrong unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps were made.
    Done,
    /// Numbers were no longer finite.
    Diverged,
    /// Something else went wrong.
    Failed,
}

impl Ending {
    const ALL: [Self; 3] = [Self::Done, Self::Diverged, Self::Failed];

    fn folder(self) -> &'static str {
        match self {
            Self::Done => CHECKPOINT,
            Self::Diverged => "before-divergence",
            Self::Failed => "before-error",
        }
    }
}

/// A run's folder, open for writing.
pub struct RunFolder {
    path: PathBuf,
    metrics: MetricsWriter,
    train: Vec<(f64, f64)>,
    val: Vec<(f64, f64)>,
    /// Shares of the experts, layer by layer, as a moving average.
    load: Vec<Vec<f64>>,
}

/// How much a reading counts in the average of the experts' shares: about the last fifty matter.
const NEWEST: f64 = 0.04;

impl RunFolder {
    /// Makes the folder; one that already holds a run is refused unless `overwrite`, which removes
    /// its checkpoints and samples.
    pub fn create(path: &Path, config_toml: &str, overwrite: bool) -> Result<Self> {
        let holds_run = path.join(METRICS).exists();
        if holds_run && !overwrite {
            return Err(Error::Config(format!(
                "{}: holds a run already; choose another --out or add --overwrite",
                path.display()
            )));
        }
        // what an earlier run left must not pass for this one's
        for old in Ending::ALL.map(Ending::folder).into_iter().chain([SAMPLES]).filter(|_| holds_run) {
            match fs::remove_dir_all(path.join(old)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(Error::io(&path.join(old), "remove", error));
                }
                _ => {}
            }
        }
        fs::create_dir_all(path.join(SAMPLES)).map_err(|source| Error::io(path, "create", source))?;
        atomic::write_file(&path.join("config.toml"), |sink| sink.put(config_toml.as_bytes()))?;
        let metrics = MetricsWriter::create(&path.join(METRICS))?;
        Ok(Self { path: path.to_owned(), metrics, train: Vec::new(), val: Vec::new(), load: Vec::new() })
    }

    /// Steps logged so far.
    pub fn steps(&self) -> u64 {
        self.train.len() as u64
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a step to `metrics.jsonl`.
    pub fn log(&mut self, metrics: &Metrics) -> Result<()> {
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
        self.metrics.write(metrics)
    }

    /// Draws `loss.svg` and, of a model with experts, `experts.svg`.
    pub fn curve(&self) -> Result<()> {
        let series = |name: &str, points: &[(f64, f64)], style| Series {
            name: name.into(),
            points: points.iter().copied().filter(|(_, loss)| loss.is_finite()).collect(),
            style,
        };
        let mut all = vec![series("training", &self.train, Style::Smoothed)];
        if !self.val.is_empty() {
            all.push(series("validation", &self.val, Style::Dots));
        }
        loss_svg(&self.path.join("loss.svg"), "loss (nats per token)", &all)?;
        if self.load.is_empty() { Ok(()) } else { load_svg(&self.path.join("experts.svg"), &self.load) }
    }

    /// Writes a sample.
    pub fn sample(&self, step: u64, text: &str) -> Result<()> {
        let path = self.path.join(SAMPLES).join(format!("step-{step:06}.txt"));
        atomic::write_file(&path, |sink| sink.put(text.as_bytes()))
    }

    /// Writes a checkpoint: weights, moments and the trainer's state. Numbers that are not finite are refused.
    pub fn checkpoint(
        &self,
        ending: Ending,
        session: &mut Session,
        tokenizer: Option<&Tokenizer>,
        trainer: &TrainerState,
    ) -> Result<PathBuf> {
        let config = *session.config();
        let parts = CheckpointParts { config: &config, elem: Elem::F32, trainer, tokenizer };
        let path = self.path.join(ending.folder());
        let mut values = Vec::new();
        write_checkpoint(&path, &parts, |part, spec, out| {
            let pool = match part {
                Part::Weight => Pool::Params,
                Part::M => Pool::Moment1,
                Part::V => Pool::Moment2,
            };
            session.read_param(pool, &spec.name, &mut values)?;
            check_finite(&path, &spec.name, &values, || row_len(spec))?;
            out.copy_from_slice(&values);
            Ok(())
        })?;
        Ok(path)
    }
}

/// The checkpoint of the newest run below `runs`.
pub fn latest_checkpoint(runs: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(runs).ok()?;
    let checkpoints =
        entries.flatten().map(|entry| entry.path().join(CHECKPOINT)).filter(|path| path.is_dir());
    checkpoints
        .max_by_key(|path| fs::metadata(path.join("trainer.json")).and_then(|meta| meta.modified()).ok())
}
