//! What a checkpoint of a run with adapters has in place of the model's weights.

use super::super::atomic;
use super::super::hf::HfFolder;
use super::super::peft::{
    ADAPTER_CONFIG, ADAPTER_MODEL, AdapterFolder, BaseFacts, config_text, write_adapter,
};
use super::writer::{expect_bytes, is_finite, widen};
use crate::model::{Lora, Targets, TensorSpec};
use crate::{Error, Result};
use ironhorse_core::{Pool, Precision, join_master};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The adapters of a run, and the base that they belong to.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointAdapter {
    /// Rank, alpha and targets.
    pub lora: Lora,
    /// The folder or file of the base.
    pub base: PathBuf,
    /// What tells it from another ([`BaseDigest`](crate::model::BaseDigest)).
    pub digest: String,
}

impl CheckpointAdapter {
    fn facts(&self) -> BaseFacts {
        let name = self.base.to_string_lossy().into_owned();
        BaseFacts { name, digest: Some(self.digest.clone()) }
    }
}

/// The same in `trainer.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AdapterJson {
    rank: usize,
    alpha: f64,
    targets: String,
    base: String,
    digest: String,
}

impl AdapterJson {
    pub fn new(adapter: &CheckpointAdapter) -> Self {
        let Lora { rank, alpha, targets } = adapter.lora;
        let base = adapter.base.to_string_lossy().into_owned();
        Self { rank, alpha, targets: targets.to_string(), base, digest: adapter.digest.clone() }
    }

    pub fn parse(self, path: &Path) -> Result<CheckpointAdapter> {
        let targets = Targets::parse(&self.targets).map_err(|error| error.in_file(path))?;
        let lora = Lora { rank: self.rank, alpha: self.alpha, targets };
        Ok(CheckpointAdapter { lora, base: self.base.into(), digest: self.digest })
    }
}

/// The files that hold the weights of a checkpoint.
#[derive(Debug)]
pub(super) enum Stored {
    Model(HfFolder<File>),
    Adapter(AdapterFolder),
}

impl Stored {
    pub fn read_tensor(&mut self, name: &str, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Model(weights) => weights.read_tensor(name, out),
            Self::Adapter(adapter) => adapter.read_tensor(name, out),
        }
    }
}

/// Reads the bytes of a tensor: of which pool, and its index in the table.
type ReadState<'a> = dyn FnMut(Pool, usize, &mut Vec<u8>) -> Result<()> + 'a;

/// Files with their checksums, and the tensors that hold a NaN or an infinity.
type Written = (Vec<(String, u32)>, Vec<String>);

/// Writes the adapters for PEFT: in f32, from the master weights where there are any.
pub(super) fn write_peft(
    folder: &Path,
    adapter: &CheckpointAdapter,
    (table, precision): (&[TensorSpec], Precision),
    read: &mut ReadState<'_>,
) -> Result<Written> {
    let base = adapter.facts();
    let text = config_text(&adapter.lora, table, &base);
    let settings = atomic::write_bytes(&folder.join(ADAPTER_CONFIG), text.as_bytes())?;
    let (mut bytes, mut residual, mut non_finite) = (Vec::new(), Vec::new(), Vec::new());
    let tensors = atomic::write_file(&folder.join(ADAPTER_MODEL), |sink| {
        write_adapter(sink, table, &base, |index, out| {
            read(Pool::Params, index, &mut bytes)?;
            expect_bytes(&table[index], precision.weights, &bytes)?;
            widen(precision.weights, &bytes, out);
            if !is_finite(precision.weights, &bytes) {
                non_finite.push(table[index].name.clone());
            }
            if precision.has_master() {
                read(Pool::Master, index, &mut residual)?;
                expect_bytes(&table[index], precision.master, &residual)?;
                if precision.has_residual() {
                    let cells = bytes.as_chunks().0.iter().zip(residual.as_chunks().0);
                    for (out, (&weight, &rest)) in out.iter_mut().zip(cells) {
                        *out = join_master(u16::from_le_bytes(weight), i16::from_le_bytes(rest));
                    }
                } else {
                    widen(precision.master, &residual, out);
                }
            }
            Ok(())
        })?;
        Ok(sink.crc32())
    })?;
    Ok((vec![(ADAPTER_CONFIG.to_owned(), settings), (ADAPTER_MODEL.to_owned(), tensors)], non_finite))
}

/// Refuses a checkpoint of adapters where the weights of a model are needed.
pub(super) fn not_weights(folder: &Path) -> Error {
    let found = "of adapters, without the weights of a model";
    let expected = "one with weights; `ironhorse convert RUN FOLDER` makes a folder with the adapters merged";
    Error::field(folder, "checkpoint", found, expected)
}
