//! The log of a run: `metrics.jsonl`, one JSON object per line and step, each flushed when it is written.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::eval::Accuracies;
use crate::format::atomic;
use crate::format::checkpoint::Best;
use crate::run::append::Appender;
use crate::session::{LayerRouting, Rewards, null_is_nan};
use crate::{Error, Result};

/// What a training step reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// The step, from 0.
    pub step: u64,
    /// Mean training loss of the step's tokens, in nats, with the auxiliary loss of every layer of experts. NaN is
    /// written as null.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f32,
    /// Mean validation loss, on the steps that measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f32>,
    /// The mean reward of the chosen texts of the step, if preferences are learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards_chosen: Option<f32>,
    /// The same of the rejected ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards_rejected: Option<f32>,
    /// The share of the step's pairs whose chosen text has the larger reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_accuracy: Option<f32>,
    /// The same of the validation data, on the steps that measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_reward_accuracy: Option<f32>,
    /// Learning rate of the step.
    #[serde(deserialize_with = "null_is_nan")]
    pub lr: f32,
    /// Norm of all gradients before clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f32>,
    /// Wall time of the step in milliseconds.
    #[serde(deserialize_with = "null_is_nan")]
    pub ms: f32,
    /// How long the tokens of the step took to be read, in milliseconds. An engine that works by itself computes the step before meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_ms: Option<f32>,
    /// Tokens of the step; logs of earlier versions do not have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Tokens trained on per second.
    #[serde(deserialize_with = "null_is_nan")]
    pub tokens_per_s: f32,
    /// The loss or the gradient norm was NaN or infinite: the step changed nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bad: bool,
    /// The robust z-score of an outlier loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spike: Option<f32>,
    /// The accuracies of each task by its name, on the steps before which they were graded; on the last line, after it.
    #[serde(default, skip_serializing_if = "Graded::is_empty")]
    pub eval: Graded,
    /// How the tokens spread over the experts of each layer, on the steps that measured it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub router: Vec<LayerRouting>,
    /// Why the run ended after this step, of a run that ended before its last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

impl Metrics {
    /// Takes over the rewards of a step that learns from preferences.
    pub fn set_rewards(&mut self, rewards: Option<Rewards>) {
        self.rewards_chosen = rewards.map(|rewards| rewards.chosen);
        self.rewards_rejected = rewards.map(|rewards| rewards.rejected);
        self.reward_accuracy = rewards.map(|rewards| rewards.accuracy);
    }

    /// The metrics as a line of the file, without its line end.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() // numbers and texts: there is nothing that JSON cannot hold
    }
}

/// Why a run ended before its last step, and on what.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// What ended it.
    pub by: EndedBy,
    /// The validation loss after the step.
    #[serde(deserialize_with = "null_is_nan")]
    pub val_loss: f32,
    /// The lowest validation loss, and the step it was measured at.
    pub best: Best,
}

/// What ends a run before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndedBy {
    /// Too many validations without a new lowest loss.
    Patience,
}

/// The accuracies of tasks, by their names.
pub type Graded = BTreeMap<String, Accuracies>;

fn is_false(value: &bool) -> bool {
    !value
}

/// Appends steps to a metrics file.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    out: Appender,
    line: Vec<u8>,
}

impl MetricsWriter {
    /// Starts a new file; an existing one is emptied.
    pub fn create(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), out: Appender::create(path)?, line: Vec::new() })
    }

    /// Continues a file at `next_step`: later steps, and a line torn by a crash, are dropped. No file is a new file.
    /// Gives the steps that stay.
    pub fn resume(path: &Path, next_step: u64) -> Result<(Self, Vec<Metrics>)> {
        let text = if path.exists() { read_text(path)? } else { String::new() };
        let (mut kept, mut lines) = (Vec::new(), String::new());
        for (line, metrics) in lines_of(path, &text) {
            let metrics = metrics?;
            if metrics.step < next_step {
                lines.extend([line, "\n"]);
                kept.push(metrics);
            }
        }
        atomic::write_file(path, |sink| sink.put(lines.as_bytes()))?;
        Ok((Self::append(path)?, kept))
    }

    fn append(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), out: Appender::open(path)?, line: Vec::new() })
    }

    /// Writes one line at once, so that whoever follows the file sees it now. A line that cannot be written is
    /// kept and written with the next one; the file never holds part of a line.
    pub fn write(&mut self, metrics: &impl Serialize) -> Result<()> {
        encode(&self.path, metrics, &mut self.line)?;
        self.out.write(&self.line)
    }

    /// Writes the lines that could not be written before.
    pub fn flush(&mut self) -> Result<()> {
        self.out.flush()
    }

    /// Replaces the last line, which must be in the file; the file has either the old one or the new one.
    pub fn amend_last(&mut self, metrics: &Metrics) -> Result<()> {
        self.flush()?;
        let text = read_text(&self.path)?;
        let before = text.trim_end_matches('\n').rfind('\n').map_or("", |end| &text[..=end]);
        encode(&self.path, metrics, &mut self.line)?;
        let lines = [before.as_bytes(), &self.line].concat();
        atomic::write_file(&self.path, |sink| sink.put(&lines))?;
        *self = Self::append(&self.path)?;
        Ok(())
    }

    /// The file, for another thread to sync.
    pub fn handle(&self) -> Option<File> {
        self.out.handle()
    }
}

/// A step as a line of the file.
fn encode(path: &Path, metrics: &impl Serialize, line: &mut Vec<u8>) -> Result<()> {
    line.clear();
    serde_json::to_writer(&mut *line, metrics)
        .map_err(|e| Error::io(path, "encode metrics for", e.into()))?;
    line.push(b'\n');
    Ok(())
}

/// Reads a metrics file. A last line without its line end (the run was killed while writing) is left out.
pub fn read_metrics(path: &Path) -> Result<Vec<Metrics>> {
    lines_of(path, &read_text(path)?).map(|(_, metrics)| metrics).collect()
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| Error::io(path, "read", e))
}

/// The whole lines of a file, as they are and as what they say.
fn lines_of<'a>(path: &'a Path, text: &'a str) -> impl Iterator<Item = (&'a str, Result<Metrics>)> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(move |(i, line)| {
        let parsed = serde_json::from_str(line).map_err(|e| {
            Error::field(path, format!("line {}", i + 1), e, "one JSON object with a step's metrics")
        });
        (line, parsed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Metrics {
        Metrics { step, loss: 5.5 - step as f32, lr: 1e-3, ms: 20.0, tokens_per_s: 1e5, ..Metrics::default() }
    }

    #[test]
    fn reads_what_was_written_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        for i in 0..3 {
            let metrics = Metrics { val_loss: (i == 2).then_some(3.75), ..step(i) };
            writer.write(&metrics).unwrap();
            let read = read_metrics(&path).unwrap();
            assert_eq!((read.len() as u64, read.last()), (i + 1, Some(&metrics)));
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"step":0,"loss":5.5,"lr":0.001,"#), "{text}");
    }

    #[test]
    fn resume_drops_later_steps_and_the_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let (mut writer, _) = MetricsWriter::resume(&path, 0).unwrap();
        (0..5).for_each(|i| writer.write(&step(i)).unwrap());
        writer.out.write(b"{\"step\":5,\"lo").unwrap();
        let (mut writer, kept) = MetricsWriter::resume(&path, 3).unwrap();
        assert_eq!(kept, [step(0), step(1), step(2)]);
        writer.write(&step(3)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [step(0), step(1), step(2), step(3)]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_last_line_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        for steps in 1..4 {
            writer.write(&step(steps - 1)).unwrap();
            let best = Best { step: 0, val_loss: 1.5 };
            let ended = Some(Ended { by: EndedBy::Patience, val_loss: 2.5, best });
            let amended = Metrics { ended, ..step(steps - 1) };
            writer.amend_last(&amended).unwrap();
            let read = read_metrics(&path).unwrap();
            assert_eq!((read.len() as u64, read.last()), (steps, Some(&amended)));
            let text = fs::read_to_string(&path).unwrap();
            let says = r#""ended":{"by":"patience","val_loss":2.5,"best":{"step":0,"val_loss":1.5}}}"#;
            assert!(text.trim_end().ends_with(says), "{text}");
            writer.amend_last(&step(steps - 1)).unwrap();
        }
        assert_eq!(read_metrics(&path).unwrap(), [step(0), step(1), step(2)]);
    }

    #[test]
    fn a_loss_that_is_not_a_number_survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::create(&path).unwrap().write(&Metrics { loss: f32::NAN, ..step(0) }).unwrap();
        assert!(read_metrics(&path).unwrap()[0].loss.is_nan());
    }

    #[test]
    fn errors_name_the_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert!(read_metrics(&path).unwrap_err().to_string().contains("metrics.jsonl"));
        fs::write(&path, "{\"step\":0,\"loss\":1,\"lr\":1,\"ms\":1,\"tokens_per_s\":1}\nnonsense\n").unwrap();
        let text = read_metrics(&path).unwrap_err().to_string();
        assert!(text.contains("metrics.jsonl: line 2 is"), "{text}");
        let missing = dir.path().join("no/metrics.jsonl");
        assert!(MetricsWriter::create(&missing).unwrap_err().to_string().contains("metrics.jsonl"));
    }
}
