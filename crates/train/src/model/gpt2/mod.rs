//! GPT-2 as programs: the parameter table, the forward and the backward written out op by op.
//!
//! The names given to activations are those of the reference model in Python, so an answer key can be compared with
//! each of them; B, T, C, V, L, NH are defined in `docs/names.md`.

mod backward;
mod config;

pub use super::Recompute;
pub(crate) use config::EMBED;
pub use config::Gpt2Config;

use super::program::{check_batch, declare_halt, push_update};
use crate::Result;
use ironhorse_core::op::{
    Accum, Act, AttentionCached, AttentionFwd, CrossEntropy, EmbeddingFwd, LayerNormFwd, LinearFwd, LossMean,
    PreAct, ResidualLayerNormFwd,
};
use ironhorse_core::{Builder, DType, Error, Precision, Program, Shape, Slot};
use std::collections::HashMap;

/// LayerNorm's epsilon in every GPT-2.
pub const LAYERNORM_EPS: f32 = 1e-5;

/// A training step: forward with loss, backward, update. Io: `x`, `y`, `losses`, `loss`, `norm`, `halt`.
pub fn training(
    config: &Gpt2Config,
    (batch, seq): (usize, usize),
    recompute: Recompute,
    precision: Precision,
) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, (batch, seq), precision)?;
    let saved = gpt2.forward(true)?;
    gpt2.backward(&saved, recompute)?;
    push_update(&mut gpt2.b)?;
    Ok(gpt2.b.finish()?)
}

/// The loss of a batch, nothing kept for a backward. Io: `x`, `y`, `losses`, `loss`.
pub fn evaluation(
    config: &Gpt2Config,
    (batch, seq): (usize, usize),
    precision: Precision,
) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, (batch, seq), precision)?;
    gpt2.forward(false)?;
    Ok(gpt2.b.finish()?)
}

/// One token for each of `batch` sequences at the scalar `position`, over a key/value cache. Io: `x`, `logits`.
pub fn decoding(config: &Gpt2Config, batch: usize, precision: Precision) -> Result<Program> {
    let mut gpt2 = Gpt2::new(config, (batch, 1), precision)?;
    gpt2.decode()?;
    Ok(gpt2.b.finish()?)
}

/// Weight and bias.
#[derive(Clone, Copy)]
struct Affine {
    weight: Slot,
    bias: Slot,
}

#[derive(Clone, Copy)]
struct Layer {
    ln_1: Affine,
    c_attn: Affine,
    attn_proj: Affine,
    ln_2: Affine,
    c_fc: Affine,
    mlp_proj: Affine,
}

struct Gpt2 {
    b: Builder,
    config: Gpt2Config,
    batch: usize,
    seq: usize,
    x: Slot,
    wte: Slot,
    wpe: Slot,
    layers: Vec<Layer>,
    ln_f: Affine,
}

/// A normalised activation with what its backward needs.
#[derive(Clone, Copy)]
struct Norm {
    /// (B,T,C), the residual stream that went in
    inp: Slot,
    out: Slot,
    mean: Slot,
    rstd: Slot,
}

/// What the forward leaves for the backward.
struct Saved {
    layers: Vec<SavedLayer>,
    ln_f: Norm,
    /// (B,T,Vp), its gradient after the loss
    logits: Slot,
}

#[derive(Clone, Copy)]
struct SavedLayer {
    ln_1: Norm,
    qkv: Slot,
    sdpa: Slot,
    lse: Slot,
    ln_2: Norm,
    fc: Slot,
    gelu: Slot,
}

/// Refuses batches whose bytes or operations 64 bits cannot count. Sizes and addresses rely on it.
fn check_countable(config: &Gpt2Config, batch: usize, seq: usize) -> Result<()> {
    let tokens = batch as f64 * seq as f64;
    let (layers, width) = (config.n_layer as f64, config.n_embd as f64);
    // upper bounds: the buffers of a layer are less than 64 (C + 1) floats per token, of logits there are less than 4
    let floats = 64.0 * (width + 1.0) * (layers + 1.0) + 4.0 * config.padded_vocab_size as f64;
    let flops = tokens * (16.0 * config.num_params() as f64 + 32.0 * seq as f64 * width * layers);
    if 4.0 * tokens * floats < usize::MAX as f64 / 4.0 && flops < u64::MAX as f64 / 4.0 {
        return Ok(());
    }
    Err(crate::Error::Config(format!(
        "batch {batch} × sequence {seq} is beyond what any machine can hold; use a smaller batch or sequence"
    )))
}

impl Gpt2 {
    fn new(config: &Gpt2Config, (batch, seq): (usize, usize), precision: Precision) -> Result<Self> {
        config.validate()?;
        check_batch((batch, seq), config.max_seq_len)?;
        check_countable(config, batch, seq)?;
        let mut b = Builder::with_precision(precision);
        declare_halt(&mut b);
        let slots: HashMap<String, Slot> = config
            .tensors()
            .into_iter()
            .map(|t| {
                let slot = b.param(t.name.clone(), t.shape, t.decay);
                (t.name, slot)
            })
            .collect();
        let find = |name: &str| {
            slots
                .get(name)
                .copied()
                .ok_or_else(|| Error::Program(format!("the parameter table has no {name}")))
        };
        let affine = |name: String| -> Result<Affine> {
            Ok(Affine { weight: find(&format!("{name}.weight"))?, bias: find(&format!("{name}.bias"))? })
        };
        let layers = (0..config.n_layer)
            .map(|l| {
                Ok(Layer {
                    ln_1: affine(format!("h.{l}.ln_1"))?,
                    c_attn: affine(format!("h.{l}.attn.c_attn"))?,
                    attn_proj: affine(format!("h.{l}.attn.c_proj"))?,
                    ln_2: affine(format!("h.{l}.ln_2"))?,
                    c_fc: affine(format!("h.{l}.mlp.c_fc"))?,
                    mlp_proj: affine(format!("h.{l}.mlp.c_proj"))?,
                })
            })
            .collect::<Result<_>>()?;
        let (wte, wpe, ln_f) = (find("wte.weight")?, find("wpe.weight")?, affine("ln_f".into())?);
        let x = b.io("x", [batch, seq], DType::I32);
        Ok(Self { b, config: *config, batch, seq, x, wte, wpe, layers, ln_f })
    }

    /// A fresh (B,T,cols) activation.
    fn tokens_by(&mut self, cols: usize) -> Slot {
        let dtype = self.dtype();
        self.b.activation([self.batch, self.seq, cols], dtype)
    }

    /// The element type of activations.
    fn dtype(&self) -> DType {
        self.b.precision().weights
    }

    /// Where the gradient of a parameter goes.
    fn grad(&self, weight: Slot) -> Slot {
        self.b.grad(weight)
    }

    /// One f32 for each token.
    fn per_token(&mut self) -> Slot {
        self.b.activation([self.batch, self.seq], DType::F32)
    }

    fn layernorm(&mut self, name: &str, inp: Slot, p: Affine) -> Result<Norm> {
        let norm = Norm {
            inp,
            out: self.tokens_by(self.config.n_embd),
            mean: self.per_token(),
            rstd: self.per_token(),
        };
        let Norm { out, mean, rstd, .. } = norm;
        self.b.at(name);
        self.b.push(LayerNormFwd {
            out,
            mean,
            rstd,
            inp,
            weight: p.weight,
            bias: p.bias,
            eps: LAYERNORM_EPS,
        })?;
        self.b.name(name, out);
        Ok(norm)
    }

    /// The residual add that ends one block and the layernorm that begins the next, in one op.
    fn residual_layernorm(&mut self, names: [&str; 2], [a, b]: [Slot; 2], p: Affine) -> Result<Norm> {
        let residual = self.tokens_by(self.config.n_embd);
        let norm = Norm {
            inp: residual,
            out: self.tokens_by(self.config.n_embd),
            mean: self.per_token(),
            rstd: self.per_token(),
        };
        let Norm { out, mean, rstd, .. } = norm;
        self.b.at(names[1]);
        self.b.push(ResidualLayerNormFwd {
            residual,
            out,
            mean,
            rstd,
            a,
            b,
            weight: p.weight,
            bias: p.bias,
            eps: LAYERNORM_EPS,
        })?;
        self.b.name(names[0], residual);
        self.b.name(names[1], out);
        Ok(norm)
    }

    fn linear(&mut self, name: &str, inp: Slot, p: Affine) -> Result<Slot> {
        let out = self.tokens_by(p.weight.shape.rows());
        self.b.at(name);
        self.b.push(LinearFwd { out, pre: None, inp, weight: p.weight, bias: Some(p.bias) })?;
        self.b.name(name, out);
        Ok(out)
    }

    /// c_fc with GELU fused: (before, after).
    fn linear_gelu(&mut self, l: usize, inp: Slot) -> Result<(Slot, Slot)> {
        let p = self.layers[l].c_fc;
        let (pre, out) = (self.tokens_by(4 * self.config.n_embd), self.tokens_by(4 * self.config.n_embd));
        self.b.at(format!("h.{l}.mlp.c_fc"));
        self.b.push(LinearFwd {
            out,
            pre: Some(PreAct { act: Act::Gelu, slot: pre }),
            inp,
            weight: p.weight,
            bias: Some(p.bias),
        })?;
        self.b.name(format!("h.{l}.mlp.c_fc"), pre);
        self.b.name(format!("h.{l}.mlp.gelu"), out);
        Ok((pre, out))
    }

    fn embed(&mut self, at_position: bool) -> Result<Slot> {
        let out = self.tokens_by(self.config.n_embd);
        self.b.at("embed");
        self.b.push(EmbeddingFwd {
            out,
            tokens: self.x,
            wte: self.wte,
            wpe: Some(self.wpe),
            vocab: self.config.vocab_size,
            at_position,
        })?;
        self.b.name("embed", out);
        Ok(out)
    }

    /// Everything between the embedding and the logits, with `attend` making (out, lse) of (layer, qkv).
    fn blocks(
        &mut self,
        embed: Slot,
        attend: fn(&mut Self, usize, Slot) -> Result<(Slot, Slot)>,
    ) -> Result<(Vec<SavedLayer>, Norm)> {
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut ln_1 = self.layernorm("h.0.ln_1", embed, self.layers[0].ln_1)?;
        for l in 0..self.layers.len() {
            let p = self.layers[l];
            let qkv = self.linear(&format!("h.{l}.attn.c_attn"), ln_1.out, p.c_attn)?;
            let (sdpa, lse) = attend(self, l, qkv)?;
            let attn = self.linear(&format!("h.{l}.attn.c_proj"), sdpa, p.attn_proj)?;
            let names = [format!("h.{l}.residual_1"), format!("h.{l}.ln_2")];
            let ln_2 =
                self.residual_layernorm(names.each_ref().map(|n| n.as_str()), [ln_1.inp, attn], p.ln_2)?;
            let (fc, gelu) = self.linear_gelu(l, ln_2.out)?;
            let mlp = self.linear(&format!("h.{l}.mlp.c_proj"), gelu, p.mlp_proj)?;
            let (next, p_next) = match self.layers.get(l + 1) {
                Some(next) => (format!("h.{}.ln_1", l + 1), next.ln_1),
                None => ("ln_f".into(), self.ln_f),
            };
            let residual = format!("h.{l}.residual_2");
            layers.push(SavedLayer { ln_1, qkv, sdpa, lse, ln_2, fc, gelu });
            ln_1 = self.residual_layernorm([&residual, &next], [ln_2.inp, mlp], p_next)?;
        }
        Ok((layers, ln_1))
    }

    fn attention(&mut self, l: usize, qkv: Slot) -> Result<(Slot, Slot)> {
        let out = self.tokens_by(self.config.n_embd);
        let lse = self.b.activation([self.batch, self.config.n_head, self.seq], DType::F32);
        self.b.at(format!("h.{l}.attn.sdpa"));
        let heads = self.config.n_head;
        self.b.push(AttentionFwd { out, lse, qkv, heads, kv_heads: heads })?;
        self.b.name(format!("h.{l}.attn.sdpa"), out);
        Ok((out, lse))
    }

    /// The output head, tied to the token embedding.
    fn head(&mut self, inp: Slot, logits: Slot) -> Result<()> {
        self.b.at("lm_head");
        self.b.push(LinearFwd { out: logits, pre: None, inp, weight: self.wte, bias: None })?;
        self.b.name("logits", logits);
        Ok(())
    }

    fn forward(&mut self, grad: bool) -> Result<Saved> {
        let targets = self.b.io("y", [self.batch, self.seq], DType::I32);
        let losses = self.b.io("losses", [self.batch, self.seq], DType::F32);
        let loss = self.b.io("loss", Shape::new([]), DType::F32);
        let embed = self.embed(false)?;
        let (layers, ln_f) = self.blocks(embed, Self::attention)?;
        let logits = self.tokens_by(self.config.padded_vocab_size);
        self.head(ln_f.out, logits)?;
        self.b.at("loss");
        self.b.push(CrossEntropy { losses, logits, targets, vocab: self.config.vocab_size, grad })?;
        self.b.push(LossMean { loss, losses, accum: Accum::FirstWrites })?;
        Ok(Saved { layers, ln_f, logits })
    }

    fn decode(&mut self) -> Result<()> {
        let dtype = self.dtype();
        let logits = self.b.io("logits", [self.batch, 1, self.config.padded_vocab_size], dtype);
        let embed = self.embed(true)?;
        let (_, ln_f) = self.blocks(embed, |gpt2, l, qkv| {
            let (width, context, dtype) = (gpt2.config.n_embd, gpt2.config.max_seq_len, gpt2.dtype());
            let [keys, values] = [(); 2].map(|()| gpt2.b.cache([gpt2.batch, context, width], dtype));
            let out = gpt2.tokens_by(width);
            gpt2.b.at(format!("h.{l}.attn.sdpa"));
            let heads = gpt2.config.n_head;
            gpt2.b.push(AttentionCached { out, keys, values, qkv, heads, kv_heads: heads })?;
            Ok((out, out))
        })?;
        self.head(ln_f.out, logits)
    }
}
