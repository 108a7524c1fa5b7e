//! Which parameters make up a tensor of a file, and in what order of rows.

use std::collections::HashMap;
use std::path::Path;

use super::header::TensorInfo;
use super::numbers::GgufType;
use super::sizes::{architecture, rope_factors};
use crate::model::{ModelConfig, TensorSpec};
use crate::{Error, Result};

/// Names of parameters outside of layers.
const WHOLE: [(&str, &str); 7] = [
    ("wte.weight", "token_embd.weight"),
    ("wpe.weight", "position_embd.weight"),
    ("ln_f.weight", "output_norm.weight"),
    ("ln_f.bias", "output_norm.bias"),
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Names of parts of a layer, without `weight` or `bias`.
const PARTS: [(&str, &str); 19] = [
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", ROUTER),
    ("block_sparse_moe.gate", ROUTER),
];

/// Names of the matrices of experts, all of which are one tensor (E, rows, columns).
const EXPERTS: [(&str, &str); 6] = [
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
];

const ROUTER: &str = "ffn_gate_inp";
const POSITIONS: &str = "position_embd";

/// One tensor of a file.
pub struct Stored {
    /// Its name, shape and type.
    pub info: TensorInfo,
    /// Where its numbers come from.
    pub content: Content,
}

/// Where numbers come from.
pub enum Content {
    /// Parameters, one after the other.
    Parameters {
        /// Their rows in the table.
        specs: Vec<TensorSpec>,
        /// The width of a head whose rows go in pairs, see [`pair_rows`].
        paired: Option<usize>,
    },
    /// Constants of the model.
    Values(Vec<f32>),
}

/// All tensors of a model in a file whose matrices are of type `kind`.
pub fn tensors(config: &ModelConfig, kind: GgufType, path: &Path) -> Result<Vec<Stored>> {
    let (mut found, mut places) = (Vec::<Stored>::new(), HashMap::<String, usize>::new());
    if let Some(values) = rope_factors(config) {
        let info =
            TensorInfo { name: "rope_freqs.weight".into(), dims: vec![values.len()], kind: GgufType::F32 };
        found.push(Stored { info, content: Content::Values(values) });
    }
    for spec in config.tensors() {
        let Some((name, is_expert)) = stored_name(&spec.name) else {
            return Err(Error::field(
                path,
                "parameter",
                format!("`{}`", spec.name),
                "one that GGUF has a name for",
            ));
        };
        if let Some(&at) = places.get(&name)
            && let Stored { info, content: Content::Parameters { specs, .. } } = &mut found[at]
        {
            info.dims[0] += 1; // one more expert
            specs.push(spec);
            continue;
        }
        let mut dims = config.unpadded_shape(&spec);
        let kind = if is_single(&name, &dims) { GgufType::F32 } else { kind };
        check_width(&name, &dims, kind, path)?;
        if is_expert {
            dims.insert(0, 1);
        }
        let paired = head_to_pair(config, &name);
        places.insert(name.clone(), found.len());
        let content = Content::Parameters { specs: vec![spec], paired };
        found.push(Stored { info: TensorInfo { name, dims, kind }, content });
    }
    Ok(found)
}

/// The name in the file, and whether the parameter is one expert's.
fn stored_name(name: &str) -> Option<(String, bool)> {
    let by_name = |table: &[(&str, &'static str)], name: &str| {
        table.iter().find(|(ours, _)| *ours == name).map(|(_, theirs)| *theirs)
    };
    if let Some(theirs) = by_name(&WHOLE, name) {
        return Some((theirs.to_owned(), false));
    }
    let in_layer = name.strip_prefix("model.layers.").or_else(|| name.strip_prefix("h."))?;
    let (layer, rest) = in_layer.split_once('.')?;
    let (part, what) = rest.rsplit_once('.')?;
    if let Some((_, expert)) = part.split_once("experts.") {
        let (_, matrix) = expert.split_once('.')?;
        return Some((format!("blk.{layer}.{}.{what}", by_name(&EXPERTS, matrix)?), true));
    }
    Some((format!("blk.{layer}.{}.{what}", by_name(&PARTS, part)?), false))
}

/// Vectors, routers and tables of positions stay in f32, as llama.cpp's own files have them.
fn is_single(name: &str, dims: &[usize]) -> bool {
    dims.len() == 1 || name.contains(ROUTER) || name.starts_with(POSITIONS)
}

/// Blocks do not cross rows.
fn check_width(name: &str, dims: &[usize], kind: GgufType, path: &Path) -> Result<()> {
    let width = dims.last().copied().unwrap_or(0);
    if width.is_multiple_of(kind.multiple()) {
        return Ok(());
    }
    let expected = format!("a multiple of {} for {kind}, or another type", kind.multiple());
    Err(Error::field(path, format!("width of `{name}`"), width, expected))
}

/// The architecture `llama` turns neighbouring rows of q and k by RoPE; the others turn rows half a head apart, as we do.
fn head_to_pair(config: &ModelConfig, name: &str) -> Option<usize> {
    let ModelConfig::Moe(moe) = config else { return None };
    let turned = name.contains(".attn_q.") || name.contains(".attn_k.");
    (turned && architecture(config) == "llama").then_some(moe.head_dim)
}

/// Moves row i of the first half of each head to row 2i and row i of the second half to row 2i + 1. `rows` is (heads·dim, width).
pub fn pair_rows(rows: &mut [f32], dim: usize, width: usize) {
    let mut before = vec![0.0; dim * width];
    for head in rows.chunks_exact_mut(dim * width) {
        before.copy_from_slice(head);
        let (first, second) = before.split_at(dim / 2 * width);
        let halves = first.chunks_exact(width).zip(second.chunks_exact(width));
        for (pair, (a, b)) in head.chunks_exact_mut(2 * width).zip(halves) {
            pair[..width].copy_from_slice(a);
            pair[width..].copy_from_slice(b);
        }
    }
}
