//! Checkpoints: a Hugging Face folder with everything that training needs to resume with the same bits.
//!
//! ```text
//! config.json, model.safetensors     the weights as the engine stores them (f32 or bf16), readable by `transformers`
//! adapter_config.json,               in their place in a run with adapters: those in f32, readable by PEFT. The base is not
//!   adapter_model.safetensors        kept: trainer.json has its path and digest
//! master.safetensors                 for bf16 weights: the f32 master weights, or their 16-bit residuals; of adapters also w.NAME,
//!                                    the bf16 weights
//! state.safetensors                  the optimizer's moments, m.NAME and v.NAME, as the engine stores them; Muon has no v
//! tokenizer.bin, tokenizer.json      optional, and what else belongs to the tokenizer
//! trainer.json                       written last: step, data position, settings, size and checksum of every other file
//! ```
//!
//! Weights, masters and state larger than [`PART_BYTES`] are split into several files,
//! `state-00001-of-00003.safetensors`. A folder is not a checkpoint if it has no `trainer.json`, or if a file has
//! another size or checksum than recorded there.

mod adapter;
mod latest;
mod manifest;
mod reader;
mod shared;
mod writer;

pub use adapter::CheckpointAdapter;
pub(super) use latest::has_checkpoints;
pub use latest::{
    BEST, CHECKPOINTS, best_checkpoint, checkpoints_of, is_run, named_checkpoint, newest_run, open_latest,
    step_name,
};
pub use manifest::{Best, TrainerJson, TrainerState};
pub use reader::Checkpoint;
pub use shared::{Report, Share, SharedLayout};
pub(crate) use writer::widen;
pub use writer::{CheckpointParts, Written, checkpoint_bytes, write_checkpoint};

use super::hf::{self, HF_CONFIG, HF_INDEX};
use super::peft::{ADAPTER_CONFIG, ADAPTER_MODEL};
use super::tokenizer::is_companion;
use crate::model::TensorSpec;
use ironhorse_core::Pool;

/// The manifest, which makes a folder a checkpoint.
pub const TRAINER: &str = "trainer.json";
/// The maximum number of bytes of tensors in one file. A tensor is never split.
pub const PART_BYTES: u64 = 4 << 30;

const MASTER: &str = "master";
const STATE: &str = "state";

/// Whether a file of this name can be part of a checkpoint.
pub(super) fn is_ours(name: &str) -> bool {
    [HF_CONFIG, HF_INDEX, TRAINER, ADAPTER_CONFIG, ADAPTER_MODEL].contains(&name)
        || is_companion(name)
        || [hf::MODEL, MASTER, STATE].iter().any(|stem| is_part_of(name, stem))
}

/// Whether a file holds the optimizer's state, which only training needs.
fn is_state(name: &str) -> bool {
    is_part_of(name, STATE)
}

/// `STEM.safetensors` or `STEM-00001-of-00003.safetensors`.
fn is_part_of(name: &str, stem: &str) -> bool {
    name == hf::part_name(stem, 1, 1) || hf::is_part_name(stem, name)
}

/// The name of a parameter's tensor in one of the pools beside the weights.
fn stored_name(pool: Pool, spec: &TensorSpec) -> String {
    match pool {
        Pool::Moment1 => format!("m.{}", spec.name),
        Pool::Moment2 => format!("v.{}", spec.name),
        Pool::Params => format!("w.{}", spec.name),
        _ => spec.name.clone(),
    }
}

#[cfg(test)]
mod tests;
