//! The forward: for training, for a loss alone, and token by token.

use super::dropout::Place;
use super::{Decoder, Mlp, MlpKind, Rotation, Saved, SavedLayer, SavedMlp};
use crate::Result;
use crate::model::blocks::{Attending, Linear, Norm, Purpose, Tables};
use ironhorse_core::Slot;
use ironhorse_core::op::{Add, LinearFwd, PreAct, Rope, SwigluFwd};

impl Decoder {
    /// Tokens to the loss, which in training includes every layer's auxiliary loss.
    pub(super) fn forward(&mut self, purpose: Purpose) -> Result<Saved> {
        let with_aux = purpose == Purpose::Training && matches!(self.plan.mlp, MlpKind::Experts { .. });
        let mut io = self.net.loss_io(self.plan.names.io, with_aux)?;
        io.pairs = self.preference.map(|beta| self.net.pair_io(beta));
        let (layers, norm) = self.blocks(purpose)?;
        let head = self.net.loss((norm, self.head), &io, self.plan.vocab[0], (purpose, self.head_chunks))?;
        let mut sum = io.mean;
        for layer in &layers {
            if let SavedMlp::Experts(experts) = &layer.mlp
                && let Some(aux) = experts.aux()
            {
                self.net.b.push(Add { out: io.loss, a: sum, b: aux })?;
                sum = io.loss;
            }
        }
        Ok(Saved { layers, head })
    }

    /// Everything between the tokens and the head.
    pub(super) fn blocks(&mut self, purpose: Purpose) -> Result<(Vec<SavedLayer>, Norm)> {
        let decoding = purpose == Purpose::Decoding;
        let (names, heads) = (self.plan.names, self.plan.heads);
        let cached = decoding.then_some(self.cached);
        let embed = self.net.embed(self.tables(), self.plan.vocab[0], decoding)?;
        self.drop_fwd(Place::Embedding, embed)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut norm_1 = self.net.norm(&self.name(0, names.norm_1), embed, self.layers[0].norm_1)?;
        for l in 0..self.layers.len() {
            let p = self.layers[l];
            let qkv = self.net.linear(&self.name(l, names.qkv[1]), norm_1.out, p.qkv)?;
            let (qkv, qk_norm) = self.qk_norm(l, qkv, purpose)?;
            self.rotate(l, qkv, decoding)?;
            let drop = self.drop_site(Place::Probabilities(l));
            let attending = Attending { cached, drop, window: self.plan.windows.get(l).copied().flatten() };
            let attn = self.net.attention(&self.name(l, names.attn), qkv, heads, attending)?;
            let [stream, attended] = match self.picks.filter(|_| l + 1 == self.layers.len()) {
                Some(count) => self.net.pick([norm_1.inp, attn.out], count)?,
                None => [norm_1.inp, attn.out],
            };
            let proj = self.net.linear(&self.name(l, names.proj[1]), attended, p.proj)?;
            self.drop_fwd(Place::Attention(l), proj)?;
            let (added, post_attn) = self.post_norm(l, names.post_attn.zip(p.post_attn), proj)?;
            let called = ["residual_1", names.norm_2].map(|part| self.name(l, part));
            let norm_2 = self.net.residual_norm(called, [stream, added], p.norm_2)?;
            let (out, mlp) = self.mlp(l, norm_2.out, purpose)?;
            self.drop_fwd(Place::Mlp(l), out)?;
            let (added, post_mlp) = self.post_norm(l, names.post_mlp.zip(p.post_mlp), out)?;
            let (next, weights) = match self.layers.get(l + 1) {
                Some(next) => (self.name(l + 1, names.norm_1), next.norm_1),
                None => (names.last_norm[1].into(), self.norm),
            };
            layers.push(SavedLayer { norm_1, qk_norm, attn, post_attn, norm_2, mlp, post_mlp });
            let called = [self.name(l, "residual_2"), next];
            norm_1 = self.net.residual_norm(called, [norm_2.inp, added], weights)?;
        }
        Ok((layers, norm_1))
    }

    /// Rotates q and k by their positions, in place.
    fn rotate(&mut self, l: usize, qkv: Slot, at_position: bool) -> Result<()> {
        let Some(rope) = self.rope(l, qkv) else { return Ok(()) };
        let name = self.name(l, "qkv_rope");
        self.net.b.at(&name);
        self.net.b.push(Rope { at_position, ..rope })?;
        self.net.b.name(name, qkv);
        Ok(())
    }

    /// The tables of tokens and positions.
    pub(super) fn tables(&self) -> Tables {
        Tables { wte: self.embed, wpe: self.positions, factor: self.plan.embed_factor }
    }

    /// The rotation of a layer from position 0 on, where positions are rotations.
    pub(super) fn rope(&self, l: usize, qkv: Slot) -> Option<Rope> {
        let windowed = self.plan.windows.get(l).copied().flatten().and(self.plan.windowed_rope);
        let Rotation { base, alpha, scaling } = windowed.or(self.plan.rope)?;
        let (heads, context) = (self.plan.heads, self.plan.setup.context);
        let (heads, kv_heads) = (heads.query, heads.kv);
        let (back, at_position, positions) = (false, false, self.net.positions());
        Some(Rope { qkv, heads, kv_heads, base, alpha, scaling, back, at_position, positions, context })
    }

    fn mlp(&mut self, l: usize, inp: Slot, purpose: Purpose) -> Result<(Slot, SavedMlp)> {
        let ffn = self.plan.ffn;
        match self.layers[l].mlp {
            Mlp::Plain { act: f, fc: layer @ Linear { weight, bias, .. }, proj } => {
                let [fc, after, last] =
                    ["mlp.c_fc", &format!("mlp.{f}"), "mlp.c_proj"].map(|part| self.name(l, part));
                if let Some([out, pre]) = self.net.mlp_fp8([&fc, &last], inp, f, [layer, proj])? {
                    // the activation is there in 8 bits only
                    return Ok((out, SavedMlp::Dense { pre, act: pre }));
                }
                let [pre, act] = [(); 2].map(|()| self.net.tokens_by(ffn));
                self.net.b.at(&fc);
                self.net.b.push(LinearFwd {
                    out: act,
                    pre: Some(PreAct { act: f, slot: pre }),
                    inp,
                    weight,
                    bias,
                })?;
                self.net.b.name(fc, pre);
                self.net.b.name(after, act);
                let out = self.net.linear(&last, act, proj)?;
                Ok((out, SavedMlp::Dense { pre, act }))
            }
            Mlp::Swiglu { gate, gate_up, down } => {
                let pre = self.net.tokens_by(2 * ffn);
                self.net.linear_into(&self.name(l, "mlp.gate_up"), pre, inp, gate_up)?;
                let act = self.net.tokens_by(ffn);
                let name = self.name(l, "mlp_act");
                self.net.b.at(&name);
                self.net.b.push(SwigluFwd { out: act, inp: pre, gate })?;
                self.net.b.name(name, act);
                let out = self.net.linear(&self.name(l, "mlp"), act, down)?;
                Ok((out, SavedMlp::Dense { pre, act }))
            }
            Mlp::Experts(weights) => {
                let (out, saved) = self.experts_fwd(l, inp, weights, purpose)?;
                Ok((out, SavedMlp::Experts(Box::new(saved))))
            }
        }
    }
}
