//! Hugging Face folders of GPT-2, Llama, Mistral, Mixtral, Qwen and Gemma 3: `config.json` and `model.safetensors`, or several files with an
//! index, which `transformers` can load unchanged.
//!
//! Token tables and heads have V rows without padding. The names of GPT-2 have the prefix `transformer.`, and its
//! linear layers are stored (in, out).

mod config_json;
mod family;
mod files;
mod gemma3;
mod gpt2;
mod llama;
mod metadata;
mod mistral;
mod mixtral;
mod qwen;
mod reader;
mod rope;
mod text_tokens;
mod window;
mod writer;

pub use config_json::{HF_CONFIG, config_json, parse_config_json};
pub use files::{HF_INDEX, HF_WEIGHTS, WeightFiles, is_weights_part, parse_index};
pub(super) use files::{MODEL, is_part_name, part_name, split};
pub use reader::HfFolder;
pub use text_tokens::TextTokens;
pub use writer::{DEFAULT_SHARD, HfOptions, write_hf};
pub(super) use writer::{WeightsFile, WeightsLayout, stored_values, write_config_json, write_weights};

use crate::model::{ModelConfig, TensorSpec};

/// Removes a byte-order mark, which some editors write and JSON does not allow.
fn without_bom(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// The prefix of `GPT2LMHeadModel`; files of the bare `GPT2Model` lack it.
const PREFIX: &str = "transformer.";

/// Whether this tensor is stored (in, out) there and (out, in) here.
fn is_transposed(config: &ModelConfig, spec: &TensorSpec) -> bool {
    matches!(config, ModelConfig::Gpt2(_)) && spec.name.starts_with("h.") && spec.shape.dims().len() == 2
}

/// `out` (cols, rows) becomes the transpose of `values` (rows, cols).
fn transpose(values: &[f32], rows: usize, cols: usize, out: &mut [f32]) {
    const TILE: usize = 32; // 4 KiB of each: both stay in the cache
    for row in (0..rows).step_by(TILE) {
        for col in (0..cols).step_by(TILE) {
            for r in row..(row + TILE).min(rows) {
                for c in col..(col + TILE).min(cols) {
                    out[c * rows + r] = values[r * cols + c];
                }
            }
        }
    }
}

#[cfg(test)]
mod family_tests;
#[cfg(test)]
mod tests;
