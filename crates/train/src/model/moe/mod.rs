//! A mixture of experts as programs, and without experts a Llama: forward and backward written out op by op.
//!
//! The names given to activations are those of the reference model in Python, so an answer key can be compared with
//! each of them; B, T, C, V, L, NH, NKV, HD, E, K, F and N are defined in `docs/names.md`.
//!
//! | equation | op |
//! | --- | --- |
//! | x = embed_tokens\[tokens\] | `embedding_fwd` |
//! | h = x + o_proj(attention(rope(qkv(norm(x))))) | `linear_fwd`, `rope`, `attention_fwd`, `residual_rmsnorm_fwd` |
//! | p = softmax(gate norm(h)), the K largest, their weights | `linear_fwd`, `router_fwd` |
//! | aux = alpha · E · Σ_e f_e · P_e | `router_load` |
//! | y = h + Σ_j weights_j · w2_e(silu(w1_e x) · w3_e x) | `route_sort`, `permute`, `grouped_linear_fwd`, `swiglu_fwd`, `combine` |
//! | loss = mean cross-entropy + Σ_layers aux | `cross_entropy`, `loss_mean`, `add` |

mod backward;
mod config;
mod forward;

pub use config::MoeConfig;
pub(crate) use config::{EMBED, HEAD};

use super::Recompute;
use super::program::{check_batch, declare_halt, push_update};
use crate::{Error, Result};
use ironhorse_core::{Builder, DType, Precision, Program, Slot};

/// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `cross_entropy`, `loss`, `norm`, `halt`; with
/// experts, for each layer N `layers.N.load` (E), `layers.N.aux` and `layers.N.entropy`. `loss` is the cross-entropy and
/// every layer's `aux`.
pub fn training(
    config: &MoeConfig,
    (batch, seq): (usize, usize),
    recompute: Recompute,
    precision: Precision,
) -> Result<Program> {
    let mut moe = Moe::new(config, (batch, seq), precision)?;
    let saved = moe.forward()?;
    moe.backward(&saved, recompute)?;
    push_update(&mut moe.b)?;
    Ok(moe.b.finish()?)
}

/// The cross-entropy of a batch as `loss`, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
pub fn evaluation(config: &MoeConfig, (batch, seq): (usize, usize), precision: Precision) -> Result<Program> {
    let mut moe = Moe::new(config, (batch, seq), precision)?;
    moe.evaluate()?;
    Ok(moe.b.finish()?)
}

/// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
pub fn decoding(config: &MoeConfig, batch: usize, precision: Precision) -> Result<Program> {
    let mut moe = Moe::new(config, (batch, 1), precision)?;
    moe.decode()?;
    Ok(moe.b.finish()?)
}

/// What makes a row of C of a row of C between the two norms.
#[derive(Clone, Copy)]
enum Mlp {
    Dense {
        /// (2F,C), gate above up
        gate_up: Slot,
        /// (C,F)
        down: Slot,
    },
    Experts {
        /// (E,C)
        gate: Slot,
        /// (E,2F,C), w1 above w3
        w13: Slot,
        /// (E,C,F)
        w2: Slot,
    },
}

#[derive(Clone, Copy)]
struct Layer {
    input_layernorm: Slot,
    /// (W,C)
    qkv: Slot,
    o_proj: Slot,
    post_attention_layernorm: Slot,
    mlp: Mlp,
}

struct Moe {
    b: Builder,
    config: MoeConfig,
    batch: usize,
    seq: usize,
    x: Slot,
    embed: Slot,
    layers: Vec<Layer>,
    norm: Slot,
    head: Slot,
}

/// A normalised activation with what its backward needs.
#[derive(Clone, Copy)]
struct Norm {
    /// (B,T,C), the residual stream that went in
    inp: Slot,
    out: Slot,
    rstd: Slot,
}

/// Where the tokens went.
#[derive(Clone, Copy)]
struct Routes {
    /// (N,E) f32
    probs: Slot,
    /// (N,K) f32
    weights: Slot,
    /// (N,K) i32
    experts: Slot,
    /// (N·K) i32
    order: Slot,
    /// (N,K) i32
    places: Slot,
    /// (E+1) i32
    offsets: Slot,
}

/// What the experts made of their rows.
#[derive(Clone, Copy)]
struct Rows {
    /// (N·K,C)
    inp: Slot,
    /// (N·K,2F)
    w13: Slot,
    /// (N·K,F)
    act: Slot,
    /// (N·K,C)
    out: Slot,
}

/// How a layer's tokens spread.
#[derive(Clone, Copy)]
struct Spread {
    /// (E) f32
    load: Slot,
    /// one f32
    aux: Slot,
}

/// A layer's MLP or experts, with its weights.
enum SavedMlp {
    Dense(Box<SavedDense>),
    Experts(Box<SavedExperts>),
}

#[derive(Clone, Copy)]
struct SavedDense {
    /// gate_up, down
    weights: [Slot; 2],
    /// (B,T,2F)
    gate_up: Slot,
    /// (B,T,F)
    act: Slot,
}

#[derive(Clone, Copy)]
struct SavedExperts {
    /// gate, w13, w2
    weights: [Slot; 3],
    routes: Routes,
    rows: Rows,
    /// In training only.
    spread: Option<Spread>,
}

struct SavedLayer {
    norm_1: Norm,
    /// (B,T,W), turned
    qkv: Slot,
    attn: Slot,
    lse: Slot,
    norm_2: Norm,
    mlp: SavedMlp,
}

/// What the forward leaves for the backward.
struct Saved {
    layers: Vec<SavedLayer>,
    norm: Norm,
    /// (B,T,Vp), its gradient after the loss
    logits: Slot,
}

/// Refuses batches whose bytes or operations 64 bits cannot count, or whose routes 32 bits cannot.
fn check_countable(config: &MoeConfig, batch: usize, seq: usize) -> Result<()> {
    let tokens = batch as f64 * seq as f64;
    let width = config.hidden + config.qkv_width() + config.ffn * config.top_k.max(1) + config.n_experts;
    let (layers, rows) = (config.n_layer as f64 + 1.0, config.top_k.max(1) as f64);
    let floats = 64.0 * (width as f64 + rows * config.hidden as f64 + 1.0) * layers
        + 4.0 * config.padded_vocab_size() as f64;
    let flops =
        tokens * (16.0 * config.num_params() as f64 + 32.0 * seq as f64 * config.qkv_width() as f64 * layers);
    let routes = tokens * rows;
    if 4.0 * tokens * floats < usize::MAX as f64 / 4.0
        && flops < u64::MAX as f64 / 4.0
        && routes < f64::from(i32::MAX)
    {
        return Ok(());
    }
    Err(Error::Config(format!(
        "batch {batch} × sequence {seq} is beyond what any machine can hold; use a smaller batch or sequence"
    )))
}

impl Moe {
    fn new(config: &MoeConfig, (batch, seq): (usize, usize), precision: Precision) -> Result<Self> {
        config.validate()?;
        check_batch((batch, seq), config.max_seq_len)?;
        check_countable(config, batch, seq)?;
        let mut b = Builder::with_precision(precision);
        declare_halt(&mut b);
        let (c, f, e) = (config.hidden, config.ffn, config.n_experts);
        let mut groups = config.groups().into_iter().map(|group| {
            let decay = group.iter().any(|tensor| tensor.decay);
            b.param_group(group.into_iter().map(|tensor| (tensor.name, tensor.shape)), decay)
        });
        // the groups come in the order of the table
        let mut next = |shape: &[usize]| -> Result<Slot> {
            let group = groups.next().unwrap_or_default();
            Ok(match *shape {
                [rows] => Slot::joined(&group, [rows])?,
                [rows, cols] => Slot::joined(&group, [rows, cols])?,
                _ => Slot::joined(&group, [shape[0], shape[1], shape[2]])?,
            })
        };
        let q = config.n_head * config.head_dim;
        let embed = next(&[config.padded_vocab_size(), c])?;
        let mut layers = Vec::with_capacity(config.n_layer);
        for _ in 0..config.n_layer {
            layers.push(Layer {
                input_layernorm: next(&[c])?,
                qkv: next(&[config.qkv_width(), c])?,
                o_proj: next(&[c, q])?,
                post_attention_layernorm: next(&[c])?,
                mlp: if e == 0 {
                    Mlp::Dense { gate_up: next(&[2 * f, c])?, down: next(&[c, f])? }
                } else {
                    Mlp::Experts { gate: next(&[e, c])?, w13: next(&[e, 2 * f, c])?, w2: next(&[e, c, f])? }
                },
            });
        }
        let (norm, head) = (next(&[c])?, next(&[config.padded_vocab_size(), c])?);
        drop(groups);
        let x = b.io("x", [batch, seq], DType::I32);
        Ok(Self { b, config: *config, batch, seq, x, embed, layers, norm, head })
    }

    /// The element type of activations.
    fn dtype(&self) -> DType {
        self.b.precision().weights
    }

    /// A fresh (B,T,cols) activation.
    fn tokens_by(&mut self, cols: usize) -> Slot {
        let dtype = self.dtype();
        self.b.activation([self.batch, self.seq, cols], dtype)
    }

    /// A fresh (N·K,cols) activation.
    fn routes_by(&mut self, cols: usize) -> Slot {
        let dtype = self.dtype();
        self.b.activation([self.batch * self.seq * self.config.top_k, cols], dtype)
    }

    /// A fresh (N,cols) buffer of this type.
    fn table(&mut self, cols: usize, dtype: DType) -> Slot {
        self.b.activation([self.batch * self.seq, cols], dtype)
    }

    fn eps(&self) -> f32 {
        self.config.rms_eps as f32
    }

    fn aux_alpha(&self) -> f32 {
        self.config.aux_alpha as f32
    }
}
