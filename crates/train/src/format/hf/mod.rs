//! Hugging Face GPT-2 folders: `model.safetensors` and `config.json`, such that `transformers` loads them as they are.
//!
//! Their names carry the prefix `transformer.`, their linear layers are stored (in, out), and the token table has V
//! rows without padding.

mod config_json;
mod reader;
mod writer;

pub use config_json::{HF_CONFIG, config_json, parse_config_json};
pub use reader::{HF_WEIGHTS, HfFolder};
pub use writer::{HfOptions, write_hf};
pub(super) use writer::{write_config_json, write_weights};

use crate::model::TensorSpec;

/// The prefix of `GPT2LMHeadModel`; files of the bare `GPT2Model` lack it.
const PREFIX: &str = "transformer.";

/// Whether this tensor is stored (in, out) there and (out, in) here.
fn is_transposed(spec: &TensorSpec) -> bool {
    spec.name.starts_with("h.") && spec.shape.dims().len() == 2
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
mod tests;
