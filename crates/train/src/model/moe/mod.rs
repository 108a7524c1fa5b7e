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
use super::blocks::{Attention, Blocks, Head, Linear, Norm, NormWeights, Purpose, Setup};
use crate::Result;
use ironhorse_core::{DType, Precision, Program, Slot};

/// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `cross_entropy`, `loss`, `norm`, `halt`; with
/// experts, for each layer N `layers.N.load` (E), `layers.N.aux` and `layers.N.entropy`. `loss` is the cross-entropy and
/// every layer's `aux`.
pub fn training(
    config: &MoeConfig,
    batch: (usize, usize),
    recompute: Recompute,
    precision: Precision,
) -> Result<Program> {
    let mut moe = Moe::new(config, batch, precision)?;
    let saved = moe.forward()?;
    moe.backward(&saved, recompute)?;
    moe.net.update()?;
    moe.net.finish()
}

/// The cross-entropy of a batch as `loss`, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
pub fn evaluation(config: &MoeConfig, batch: (usize, usize), precision: Precision) -> Result<Program> {
    let mut moe = Moe::new(config, batch, precision)?;
    let loss = moe.net.scalar("loss");
    moe.loss_fwd(loss, Purpose::Evaluation)?;
    moe.net.finish()
}

/// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
pub fn decoding(config: &MoeConfig, batch: usize, precision: Precision) -> Result<Program> {
    let mut moe = Moe::new(config, (batch, 1), precision)?;
    let logits = moe.net.logits_io(moe.head);
    let (_, norm) = moe.blocks(Purpose::Decoding)?;
    moe.net.logits(norm.out, logits, moe.head)?;
    moe.net.finish()
}

/// The part of a layer after the attention.
#[derive(Clone, Copy)]
enum Mlp {
    Dense(Dense),
    Experts(Experts),
}

#[derive(Clone, Copy)]
struct Dense {
    /// (2F,C), gate above up
    gate_up: Linear,
    /// (C,F)
    down: Linear,
}

#[derive(Clone, Copy)]
struct Experts {
    /// (E,C), the router
    gate: Linear,
    /// (E,2F,C), w1 above w3
    w13: Slot,
    /// (E,C,F)
    w2: Slot,
}

#[derive(Clone, Copy)]
struct Layer {
    input_layernorm: NormWeights,
    /// (W,C)
    qkv: Linear,
    o_proj: Linear,
    post_attention_layernorm: NormWeights,
    mlp: Mlp,
}

struct Moe {
    net: Blocks,
    config: MoeConfig,
    embed: Slot,
    layers: Vec<Layer>,
    norm: NormWeights,
    head: Slot,
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

/// What a layer's MLP or experts leave for the backward.
enum SavedMlp {
    Dense(Dense, SavedDense),
    Experts(Experts, Box<SavedExperts>),
}

#[derive(Clone, Copy)]
struct SavedDense {
    /// (B,T,2F)
    gate_up: Slot,
    /// (B,T,F)
    act: Slot,
}

#[derive(Clone, Copy)]
struct SavedExperts {
    routes: Routes,
    rows: Rows,
    /// In training only.
    spread: Option<Spread>,
}

struct SavedLayer {
    norm_1: Norm,
    /// Of the rotated q, k and v.
    attn: Attention,
    norm_2: Norm,
    mlp: SavedMlp,
}

/// What the forward leaves for the backward.
struct Saved {
    layers: Vec<SavedLayer>,
    head: Head,
}

fn setup(config: &MoeConfig) -> Setup {
    let (layers, rows) = (config.n_layer as f64 + 1.0, config.top_k.max(1) as f64);
    let width = config.hidden + config.qkv_width() + config.ffn * config.top_k.max(1) + config.n_experts;
    Setup {
        groups: config.groups(),
        width: config.hidden,
        context: config.max_seq_len,
        floats: 64.0 * (width as f64 + rows * config.hidden as f64 + 1.0) * layers
            + 4.0 * config.padded_vocab_size() as f64,
        flops: 16.0 * config.num_params() as f64,
        attention_flops: 32.0 * config.qkv_width() as f64 * layers,
        routes: rows,
    }
}

impl Moe {
    fn new(config: &MoeConfig, batch: (usize, usize), precision: Precision) -> Result<Self> {
        config.validate()?;
        let net = Blocks::new(setup(config), batch, precision)?;
        let (c, f, e) = (config.hidden, config.ffn, config.n_experts);
        let q = config.n_head * config.head_dim;
        let norm = |name: &str| -> Result<NormWeights> {
            Ok(NormWeights { weight: net.weight(name, [c])?, bias: None, eps: config.rms_eps as f32 })
        };
        let layer = |l: usize| -> Result<Layer> {
            // a group is called by its first tensor
            let name = |part: &str| format!("model.layers.{l}.{part}.weight");
            let linear = |part: &str, dims: [usize; 2]| -> Result<Linear> {
                Ok(Linear { weight: net.weight(&name(part), dims)?, bias: None })
            };
            let mlp = if e == 0 {
                Mlp::Dense(Dense {
                    gate_up: linear("mlp.gate_proj", [2 * f, c])?,
                    down: linear("mlp.down_proj", [c, f])?,
                })
            } else {
                let experts = |part: &str, dims: [usize; 3]| {
                    net.weight(&name(&format!("block_sparse_moe.experts.0.{part}")), dims)
                };
                Mlp::Experts(Experts {
                    gate: linear("block_sparse_moe.gate", [e, c])?,
                    w13: experts("w1", [e, 2 * f, c])?,
                    w2: experts("w2", [e, c, f])?,
                })
            };
            Ok(Layer {
                input_layernorm: norm(&name("input_layernorm"))?,
                qkv: linear("self_attn.q_proj", [config.qkv_width(), c])?,
                o_proj: linear("self_attn.o_proj", [c, q])?,
                post_attention_layernorm: norm(&name("post_attention_layernorm"))?,
                mlp,
            })
        };
        let layers = (0..config.n_layer).map(layer).collect::<Result<_>>()?;
        let vocab = config.padded_vocab_size();
        let (embed, head) = (net.weight(EMBED, [vocab, c])?, net.weight(HEAD, [vocab, c])?);
        let norm = norm("model.norm.weight")?;
        Ok(Self { net, config: *config, embed, layers, norm, head })
    }

    /// A new (N·K,cols) activation.
    fn routes_by(&mut self, cols: usize) -> Slot {
        let (rows, dtype) = (self.net.tokens() * self.config.top_k, self.net.dtype());
        self.net.b.activation([rows, cols], dtype)
    }

    /// A new (N,cols) buffer of this type.
    fn table(&mut self, cols: usize, dtype: DType) -> Slot {
        self.net.b.activation([self.net.tokens(), cols], dtype)
    }

    fn aux_alpha(&self) -> f32 {
        self.config.aux_alpha as f32
    }
}
