//! GPT-2 as programs: the parameter table, the forward and the backward written out op by op.
//!
//! The names given to activations are those of the reference model in Python, so an answer key can be compared with
//! each of them; B, T, C, V, L, NH are defined in `docs/names.md`.

mod backward;
mod config;

pub use super::Recompute;
pub(crate) use config::EMBED;
pub use config::Gpt2Config;

use super::blocks::{Attention, Blocks, Head, Heads, Linear, Norm, NormWeights, Purpose, Setup};
use crate::Result;
use ironhorse_core::op::{Act, LinearFwd, PreAct};
use ironhorse_core::{Precision, Program, Slot};

/// LayerNorm's epsilon in every GPT-2.
pub const LAYERNORM_EPS: f32 = 1e-5;

/// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `loss`, `norm`, `halt`.
pub fn training(
    config: &Gpt2Config,
    batch: (usize, usize),
    recompute: Recompute,
    precision: Precision,
) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, batch, precision)?;
    let saved = gpt2.forward(Purpose::Training)?;
    gpt2.backward(&saved, recompute)?;
    gpt2.net.update()?;
    gpt2.net.finish()
}

/// The loss of a batch, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
pub fn evaluation(config: &Gpt2Config, batch: (usize, usize), precision: Precision) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, batch, precision)?;
    gpt2.forward(Purpose::Evaluation)?;
    gpt2.net.finish()
}

/// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
pub fn decoding(config: &Gpt2Config, batch: usize, precision: Precision) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, (batch, 1), precision)?;
    let logits = gpt2.net.logits_io(gpt2.wte);
    let (_, ln_f) = gpt2.blocks(Purpose::Decoding)?;
    gpt2.net.logits(ln_f.out, logits, gpt2.wte)?;
    gpt2.net.finish()
}

#[derive(Clone, Copy)]
struct Layer {
    ln_1: NormWeights,
    c_attn: Linear,
    attn_proj: Linear,
    ln_2: NormWeights,
    c_fc: Linear,
    mlp_proj: Linear,
}

struct Gpt2 {
    net: Blocks,
    config: Gpt2Config,
    wte: Slot,
    wpe: Slot,
    layers: Vec<Layer>,
    ln_f: NormWeights,
}

/// What the forward leaves for the backward.
struct Saved {
    layers: Vec<SavedLayer>,
    head: Head,
}

struct SavedLayer {
    ln_1: Norm,
    attn: Attention,
    ln_2: Norm,
    fc: Slot,
    gelu: Slot,
}

fn setup(config: &Gpt2Config) -> Setup {
    let (layers, width) = (config.n_layer as f64, config.n_embd as f64);
    Setup {
        groups: config.tensors().into_iter().map(|tensor| vec![tensor]).collect(),
        width: config.n_embd,
        context: config.max_seq_len,
        // the buffers of a layer are less than 64 (C + 1) numbers, of logits there are less than 4
        floats: 64.0 * (width + 1.0) * (layers + 1.0) + 4.0 * config.padded_vocab_size as f64,
        flops: 16.0 * config.num_params() as f64,
        attention_flops: 32.0 * width * layers,
        routes: 0.0,
    }
}

impl Gpt2 {
    fn new(config: &Gpt2Config, batch: (usize, usize), precision: Precision) -> Result<Self> {
        config.validate()?;
        let net = Blocks::new(setup(config), batch, precision)?;
        let c = config.n_embd;
        let linear = |name: String, [rows, cols]: [usize; 2]| -> Result<Linear> {
            let weight = net.weight(&format!("{name}.weight"), [rows, cols])?;
            Ok(Linear { weight, bias: Some(net.weight(&format!("{name}.bias"), [rows])?) })
        };
        let norm = |name: String| -> Result<NormWeights> {
            let [weight, bias] = ["weight", "bias"].map(|part| net.weight(&format!("{name}.{part}"), [c]));
            Ok(NormWeights { weight: weight?, bias: Some(bias?), eps: LAYERNORM_EPS })
        };
        let layers = (0..config.n_layer)
            .map(|l| {
                Ok(Layer {
                    ln_1: norm(format!("h.{l}.ln_1"))?,
                    c_attn: linear(format!("h.{l}.attn.c_attn"), [3 * c, c])?,
                    attn_proj: linear(format!("h.{l}.attn.c_proj"), [c, c])?,
                    ln_2: norm(format!("h.{l}.ln_2"))?,
                    c_fc: linear(format!("h.{l}.mlp.c_fc"), [4 * c, c])?,
                    mlp_proj: linear(format!("h.{l}.mlp.c_proj"), [c, 4 * c])?,
                })
            })
            .collect::<Result<_>>()?;
        let wte = net.weight(EMBED, [config.padded_vocab_size, c])?;
        let (wpe, ln_f) = (net.weight("wpe.weight", [config.max_seq_len, c])?, norm("ln_f".into())?);
        Ok(Self { net, config: *config, wte, wpe, layers, ln_f })
    }

    /// c_fc with GELU fused: (before, after).
    fn linear_gelu(&mut self, l: usize, inp: Slot) -> Result<(Slot, Slot)> {
        let Linear { weight, bias } = self.layers[l].c_fc;
        let [pre, out] = [(); 2].map(|()| self.net.tokens_by(4 * self.config.n_embd));
        let [fc, gelu] = ["c_fc", "gelu"].map(|part| format!("h.{l}.mlp.{part}"));
        self.net.b.at(&fc);
        self.net.b.push(LinearFwd {
            out,
            pre: Some(PreAct { act: Act::Gelu, slot: pre }),
            inp,
            weight,
            bias,
        })?;
        self.net.b.name(fc, pre);
        self.net.b.name(gelu, out);
        Ok((pre, out))
    }

    /// Everything between the tokens and the head.
    fn blocks(&mut self, purpose: Purpose) -> Result<(Vec<SavedLayer>, Norm)> {
        let decoding = purpose == Purpose::Decoding;
        let Gpt2Config { n_head, vocab_size, max_seq_len, .. } = self.config;
        let heads = Heads { query: n_head, kv: n_head, dim: self.config.head_dim() };
        let embed = self.net.embed(self.wte, Some(self.wpe), vocab_size, decoding)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut ln_1 = self.net.norm("h.0.ln_1", embed, self.layers[0].ln_1)?;
        for l in 0..self.layers.len() {
            let p = self.layers[l];
            let name = |part: &str| format!("h.{l}.{part}");
            let qkv = self.net.linear(&name("attn.c_attn"), ln_1.out, p.c_attn)?;
            let cached = decoding.then_some(max_seq_len);
            let attn = self.net.attention(&name("attn.sdpa"), qkv, heads, cached)?;
            let proj = self.net.linear(&name("attn.c_proj"), attn.out, p.attn_proj)?;
            let names = [name("residual_1"), name("ln_2")];
            let ln_2 = self.net.residual_norm(names, [ln_1.inp, proj], p.ln_2)?;
            let (fc, gelu) = self.linear_gelu(l, ln_2.out)?;
            let mlp = self.net.linear(&name("mlp.c_proj"), gelu, p.mlp_proj)?;
            let (next, weights) = match self.layers.get(l + 1) {
                Some(next) => (format!("h.{}.ln_1", l + 1), next.ln_1),
                None => ("ln_f".into(), self.ln_f),
            };
            layers.push(SavedLayer { ln_1, attn, ln_2, fc, gelu });
            ln_1 = self.net.residual_norm([name("residual_2"), next], [ln_2.inp, mlp], weights)?;
        }
        Ok((layers, ln_1))
    }

    fn forward(&mut self, purpose: Purpose) -> Result<Saved> {
        let [targets, losses] = self.net.loss_io();
        let loss = self.net.scalar("loss");
        let (layers, ln_f) = self.blocks(purpose)?;
        let vocab = self.config.vocab_size;
        let head = self.net.loss((ln_f, self.wte), [targets, losses, loss], vocab, purpose)?;
        Ok(Saved { layers, head })
    }
}
