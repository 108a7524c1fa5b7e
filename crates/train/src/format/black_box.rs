//! The black box of a step whose loss or gradient norm was NaN or infinite: its tokens, its numbers and the weights it ran on,
//! so that `ironhorse verify --replay` can run it again anywhere.

use super::atomic;
use super::safetensors::{Dtype, Header, SafeTensors, TensorInfo, Writer};
use crate::model::Recompute;
use crate::session::Batch;
use crate::{Error, Result};
use ironhorse_core::Scalars;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The folder of a run's black boxes.
pub const BAD: &str = "bad";
const FORMAT: &str = "ironhorse-black-box";
const BATCH: &str = "batch.safetensors";
const WEIGHTS: &str = "weights";
const POSITIONS: &str = "positions";
const PAIRS: &str = "pairs";
const REFERENCE: &str = "reference";

/// What is known about a bad step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BadStep {
    /// The step, from 0.
    pub step: u64,
    /// Its loss: a number, or the text "NaN", "inf", "-inf".
    pub loss: String,
    /// Its gradient norm, likewise.
    pub norm: String,
    /// Whether the step was run again at once; of several bad steps in a row only the first is.
    #[serde(default)]
    pub looked: bool,
    /// The first NaN or infinity found then; empty if none was found.
    pub found: String,
    /// The micro-step it was in, where one was found.
    #[serde(default)]
    pub micro_step: Option<u32>,
    /// The engine it ran on.
    pub device: String,
    /// The precision of weights and activations.
    pub dtype: String,
    /// What the backward computed again.
    pub recompute: Recompute,
    /// Into how many parts the tokens were cut for the output head; 0 and 1 are all at once.
    #[serde(default)]
    pub head_chunks: usize,
    /// How often elements were dropped.
    #[serde(default)]
    pub dropout: f64,
    /// The β of the loss of pairs, where preferences were learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<f32>,
    /// Sequences of a micro-step.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Micro-steps of the step.
    pub accumulate: u32,
    /// The samples of the step, by their numbers in the whole run: the first, and the first after.
    pub samples: (u64, u64),
    /// The scalars of the step, by name.
    #[serde(with = "ScalarsJson")]
    pub scalars: Scalars,
    /// The checkpoint with the weights, seen from the black box's folder.
    pub weights: PathBuf,
    /// CRC-32 of that checkpoint's `trainer.json`.
    pub weights_crc32: u32,
}

/// [`Scalars`] as JSON writes them: those of a whole step, so without micro-step and position.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Scalars")]
struct ScalarsJson {
    step: u32,
    #[serde(skip)]
    micro_step: u32,
    #[serde(skip)]
    overwrites: bool,
    loss_scale: f32,
    #[serde(default = "all_count")]
    counted: f32,
    lr: f32,
    beta1: f64,
    beta2: f64,
    eps: f32,
    weight_decay: f32,
    grad_clip: f32,
    #[serde(skip)]
    position: u32,
    seed: u64,
}

/// In boxes of steps without ignored targets, as all were once, every row counts.
fn all_count() -> f32 {
    1.0
}

/// A black box as it is read back.
#[derive(Clone, Debug)]
pub struct BlackBox {
    /// What is known about the step.
    pub bad: BadStep,
    /// Tokens, all micro-steps one after the other.
    pub x: Vec<i32>,
    /// Targets, likewise.
    pub y: Vec<i32>,
    /// Positions in documents, likewise, of packed sequences.
    pub positions: Option<Vec<i32>>,
    /// Rows of pairs, (micro-steps, P, 3), and the losses that the reference gives the tokens, where preferences were learned.
    pub pairs: Option<(Vec<i32>, Vec<f32>)>,
    /// The checkpoint with the weights.
    pub weights: PathBuf,
}

/// The folder of a step's black box.
pub(crate) fn folder_of(run: &Path, step: u64) -> PathBuf {
    run.join(BAD).join(format!("step-{step:06}"))
}

/// The folder inside a black box that has its own weights.
pub(crate) fn weights_of(folder: &Path) -> PathBuf {
    folder.join(WEIGHTS)
}

/// Writes the tokens and numbers of a bad step; its weights are at `bad.weights` by then.
pub(crate) fn write(folder: &Path, bad: &BadStep, batch: Batch<'_>) -> Result<PathBuf> {
    let text = serde_json::to_string(bad).map_err(|error| Error::io(folder, "write", error.into()))?;
    let metadata = [("format".to_owned(), FORMAT.to_owned()), ("step".to_owned(), text)];
    let shape = [bad.accumulate as usize, bad.batch, bad.seq];
    let parts = [("x", Some(batch.x)), ("y", Some(batch.y)), (POSITIONS, batch.positions)];
    let parts: Vec<_> = parts.into_iter().filter_map(|(name, values)| Some((name, values?))).collect();
    let mut tensors: Vec<_> =
        parts.iter().map(|(name, _)| TensorInfo::new(*name, Dtype::I32, shape)).collect();
    if let Some(pairs) = &batch.pairs {
        let count = pairs.bounds.len() / 3 / shape[0].max(1);
        tensors.push(TensorInfo::new(PAIRS, Dtype::I32, [shape[0], count, 3]));
        tensors.push(TensorInfo::new(REFERENCE, Dtype::F32, shape));
    }
    let header = Header::build(&metadata, &tensors)?;
    let path = folder.join(BATCH);
    atomic::write_file(&path, |sink| {
        let mut writer = Writer::new(sink, header)?;
        parts.iter().try_for_each(|(name, values)| writer.put_i32(name, values))?;
        if let Some(pairs) = &batch.pairs {
            writer.put_i32(PAIRS, pairs.bounds)?;
            writer.put_f32(REFERENCE, pairs.reference)?;
        }
        writer.finish()
    })?;
    Ok(path)
}

/// Removes the weights of all black boxes but that of `step`: one set is enough to find out what happened.
pub(crate) fn forget_weights(run: &Path, step: u64) {
    let keep = folder_of(run, step);
    for entry in std::fs::read_dir(run.join(BAD)).into_iter().flatten().flatten() {
        let weights = weights_of(&entry.path());
        if entry.path() != keep && weights.is_dir() {
            let _ = atomic::remove_folder(&weights); // if that fails, only space is wasted
        }
    }
}

impl BlackBox {
    /// Reads a black box: its file, or the folder that holds it.
    pub fn open(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join(BATCH) } else { path.to_owned() };
        let mut tensors = SafeTensors::open(&file)?;
        let said = tensors.header().meta("format").unwrap_or("missing").to_owned();
        if said != FORMAT {
            return Err(Error::field(&file, "format", said, FORMAT));
        }
        let text = tensors.header().meta("step").unwrap_or_default().to_owned();
        let bad: BadStep = serde_json::from_str(&text).map_err(|error| {
            Error::field(&file, "step", format!("not valid ({error})"), "the JSON of a bad step")
        })?;
        let (x, y) = (tensors.read_i32("x")?, tensors.read_i32("y")?);
        let positions = tensors.entry(POSITIONS).is_ok().then(|| tensors.read_i32(POSITIONS)).transpose()?;
        let tokens =
            (bad.accumulate as usize).checked_mul(bad.batch).and_then(|rows| rows.checked_mul(bad.seq));
        let lengths = [y.len(), positions.as_ref().map_or(x.len(), Vec::len)];
        if tokens != Some(x.len()) || lengths != [x.len(); 2] || x.is_empty() {
            let expected = format!("{} x {} x {}", bad.accumulate, bad.batch, bad.seq);
            return Err(Error::field(&file, "tokens", x.len(), expected));
        }
        let pairs = match bad.preference {
            Some(_) => Some((tensors.read_i32(PAIRS)?, tensors.read_f32_vec(REFERENCE)?)),
            None => None,
        };
        if let Some((bounds, reference)) = &pairs
            && (reference.len() != x.len() || !bounds.len().is_multiple_of(3 * bad.accumulate as usize))
        {
            let found = format!("{} rows and {} losses", bounds.len(), reference.len());
            let expected =
                format!("three rows of each in {} micro-steps, {} losses", bad.accumulate, x.len());
            return Err(Error::field(&file, "pairs", found, expected));
        }
        let weights = file.parent().unwrap_or(Path::new(".")).join(&bad.weights);
        Ok(Self { bad, x, y, positions, pairs, weights })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::BatchPairs;

    fn bad() -> BadStep {
        BadStep {
            step: 7,
            loss: "NaN".into(),
            norm: "inf".into(),
            looked: true,
            found: String::new(),
            micro_step: None,
            device: "cpu".into(),
            dtype: "f32".into(),
            recompute: Recompute::None,
            head_chunks: 1,
            dropout: 0.125,
            preference: None,
            batch: 2,
            seq: 3,
            accumulate: 1,
            samples: (14, 16),
            scalars: Scalars::default(),
            weights: WEIGHTS.into(),
            weights_crc32: 5,
        }
    }

    #[test]
    fn a_black_box_comes_back() {
        let top = tempfile::tempdir().unwrap();
        let tokens = [1, 2, 3, 4, 5, 6];
        let packed = Batch { positions: Some(&[0, 1, 0, 0, 1, 2]), ..Batch::plain(&tokens, &tokens) };
        write(top.path(), &bad(), packed).unwrap();
        assert_eq!(BlackBox::open(top.path()).unwrap().positions.unwrap(), [0, 1, 0, 0, 1, 2]);
        let reference = [0.5, 1.5, 0.0, 2.5, 0.0, 0.0];
        let pairs = Some(BatchPairs { bounds: &[0, 2, 3, 3, 3, 3], reference: &reference });
        let preferred = BadStep { preference: Some(0.25), ..bad() };
        write(top.path(), &preferred, Batch { pairs, ..packed }).unwrap();
        let read = BlackBox::open(top.path()).unwrap();
        assert_eq!((read.bad, read.pairs), (preferred, Some((vec![0, 2, 3, 3, 3, 3], reference.to_vec()))));
        let path = write(top.path(), &bad(), Batch::plain(&tokens, &tokens)).unwrap();
        for place in [path.as_path(), top.path()] {
            let read = BlackBox::open(place).unwrap();
            assert_eq!((&read.bad, &read.x[..], &read.y[..]), (&bad(), &tokens[..], &tokens[..]));
            assert_eq!(read.positions, None);
            assert_eq!(read.weights, top.path().join(WEIGHTS));
            assert_eq!(read.bad.scalars, Scalars::default());
        }
        let wrong = BadStep { batch: 3, ..bad() };
        assert!(write(top.path(), &wrong, Batch::plain(&tokens, &tokens)).is_err());
        std::fs::write(&path, b"nonsense").unwrap();
        assert!(BlackBox::open(&path).is_err());
    }
}
