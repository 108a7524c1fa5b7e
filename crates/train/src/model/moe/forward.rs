//! The forward: for training, for a loss alone, and token by token.

use super::{
    Dense, Experts, Mlp, Moe, Routes, Rows, Saved, SavedDense, SavedExperts, SavedLayer, SavedMlp, Spread,
};
use crate::Result;
use crate::model::blocks::{Heads, Linear, Norm, Purpose};
use ironhorse_core::op::{
    Accum, Add, Combine, GroupedLinearFwd, Permute, Rope, RouteSort, RouterFwd, RouterLoad, SwigluFwd,
};
use ironhorse_core::{DType, Slot};

impl Moe {
    /// Tokens to the loss, which includes every layer's auxiliary loss.
    pub(super) fn forward(&mut self) -> Result<Saved> {
        let loss = self.net.scalar("loss");
        let mean = if self.config.n_experts > 0 { self.net.scalar("cross_entropy") } else { loss };
        let saved = self.loss_fwd(mean, Purpose::Training)?;
        let mut sum = mean;
        for layer in &saved.layers {
            let SavedMlp::Experts(_, experts) = &layer.mlp else { continue };
            if let Some(Spread { aux, .. }) = experts.spread {
                self.net.b.push(Add { out: loss, a: sum, b: aux })?;
                sum = loss;
            }
        }
        Ok(saved)
    }

    /// Tokens to the mean cross-entropy.
    pub(super) fn loss_fwd(&mut self, loss: Slot, purpose: Purpose) -> Result<Saved> {
        let [targets, losses] = self.net.loss_io();
        let (layers, norm) = self.blocks(purpose)?;
        let vocab = self.config.vocab_size;
        let head = self.net.loss((norm, self.head), [targets, losses, loss], vocab, purpose)?;
        Ok(Saved { layers, head })
    }

    /// Everything between the tokens and the head.
    pub(super) fn blocks(&mut self, purpose: Purpose) -> Result<(Vec<SavedLayer>, Norm)> {
        let decoding = purpose == Purpose::Decoding;
        let (query, kv, dim) = (self.config.n_head, self.config.n_kv_head, self.config.head_dim);
        let embed = self.net.embed(self.embed, None, self.config.vocab_size, false)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut norm_1 = self.net.norm("layers.0.input_layernorm", embed, self.layers[0].input_layernorm)?;
        for l in 0..self.layers.len() {
            let p = self.layers[l];
            let name = |part: &str| format!("layers.{l}.{part}");
            let qkv = self.qkv(l, norm_1.out, decoding)?;
            let cached = decoding.then_some(self.config.max_seq_len);
            let attn = self.net.attention(&name("attn"), qkv, Heads { query, kv, dim }, cached)?;
            let o_proj = self.net.linear(&name("o_proj"), attn.out, p.o_proj)?;
            let names = [name("residual_1"), name("post_attention_layernorm")];
            let norm_2 = self.net.residual_norm(names, [norm_1.inp, o_proj], p.post_attention_layernorm)?;
            let (out, mlp) = self.mlp(l, norm_2.out, purpose)?;
            let (next, weights) = match self.layers.get(l + 1) {
                Some(next) => (format!("layers.{}.input_layernorm", l + 1), next.input_layernorm),
                None => ("norm".into(), self.norm),
            };
            layers.push(SavedLayer { norm_1, attn, norm_2, mlp });
            norm_1 = self.net.residual_norm([name("residual_2"), next], [norm_2.inp, out], weights)?;
        }
        Ok((layers, norm_1))
    }

    /// q, k and v, rotated by their positions.
    fn qkv(&mut self, l: usize, inp: Slot, at_position: bool) -> Result<Slot> {
        let qkv = self.net.linear(&format!("layers.{l}.qkv"), inp, self.layers[l].qkv)?;
        let rope = Rope { at_position, ..self.rope(qkv) };
        self.net.b.at(format!("layers.{l}.qkv_rope"));
        self.net.b.push(rope)?;
        self.net.b.name(format!("layers.{l}.qkv_rope"), qkv);
        Ok(qkv)
    }

    /// The rotation from position 0 on.
    pub(super) fn rope(&self, qkv: Slot) -> Rope {
        Rope {
            qkv,
            heads: self.config.n_head,
            kv_heads: self.config.n_kv_head,
            base: self.config.rope_base as f32,
            alpha: self.config.rope_alpha as f32,
            back: false,
            at_position: false,
            context: self.config.max_seq_len,
        }
    }

    fn mlp(&mut self, l: usize, inp: Slot, purpose: Purpose) -> Result<(Slot, SavedMlp)> {
        match self.layers[l].mlp {
            Mlp::Dense(weights @ Dense { down, .. }) => {
                let gate_up = self.net.tokens_by(2 * self.config.ffn);
                self.net.linear_into(&format!("layers.{l}.mlp.gate_up"), gate_up, inp, weights.gate_up)?;
                let act = self.net.tokens_by(self.config.ffn);
                self.net.b.at(format!("layers.{l}.mlp_act"));
                self.net.b.push(SwigluFwd { out: act, inp: gate_up })?;
                self.net.b.name(format!("layers.{l}.mlp_act"), act);
                let out = self.net.linear(&format!("layers.{l}.mlp"), act, down)?;
                Ok((out, SavedMlp::Dense(weights, SavedDense { gate_up, act })))
            }
            Mlp::Experts(weights) => {
                let routes = self.router(l, inp, weights.gate)?;
                let training = purpose == Purpose::Training;
                let spread = training.then(|| self.router_load(l, &routes)).transpose()?;
                let rows = self.experts(l, inp, &routes, weights)?;
                let out = self.net.hidden();
                self.net.b.at(format!("layers.{l}.moe"));
                let Routes { places, weights: shares, .. } = routes;
                self.net.b.push(Combine { out, rows: rows.out, places, weights: shares })?;
                self.net.b.name(format!("layers.{l}.moe"), out);
                Ok((out, SavedMlp::Experts(weights, Box::new(SavedExperts { routes, rows, spread }))))
            }
        }
    }

    /// Chooses each token's experts and sorts the tokens by them.
    fn router(&mut self, l: usize, inp: Slot, gate: Linear) -> Result<Routes> {
        let (e, k, dtype) = (self.config.n_experts, self.config.top_k, self.net.dtype());
        let logits = self.table(e, dtype);
        let name = format!("layers.{l}.router_logits");
        self.net.linear_into(&name, logits, inp, gate)?;
        self.net.b.name(&name, logits);
        let (probs, weights) = (self.table(e, DType::F32), self.table(k, DType::F32));
        let [experts, places] = [(); 2].map(|()| self.table(k, DType::I32));
        let order = self.net.b.activation([self.net.tokens() * k], DType::I32);
        let offsets = self.net.b.activation([e + 1], DType::I32);
        self.net.b.at(format!("layers.{l}.router"));
        self.net.b.push(RouterFwd { probs, weights, experts, logits })?;
        for (part, slot) in [("probs", probs), ("weights", weights), ("experts", experts)] {
            self.net.b.name(format!("layers.{l}.{part}"), slot);
        }
        self.net.b.push(RouteSort { order, places, offsets, experts })?;
        Ok(Routes { probs, weights, experts, order, places, offsets })
    }

    /// Shares of the experts, auxiliary loss and entropy of a layer.
    fn router_load(&mut self, l: usize, routes: &Routes) -> Result<Spread> {
        let load = self.net.b.io(format!("layers.{l}.load"), [self.config.n_experts], DType::F32);
        let aux = self.net.scalar(format!("layers.{l}.aux"));
        let entropy = Some(self.net.scalar(format!("layers.{l}.entropy")));
        let Routes { probs, offsets, .. } = *routes;
        let alpha = self.aux_alpha();
        self.net.b.push(RouterLoad {
            load,
            aux,
            entropy,
            probs,
            offsets,
            alpha,
            accum: Accum::FirstWrites,
        })?;
        Ok(Spread { load, aux })
    }

    /// The rows of all experts. A backward that kept none of them computes them again.
    pub(super) fn experts(
        &mut self,
        l: usize,
        tokens: Slot,
        routes: &Routes,
        weights: Experts,
    ) -> Result<Rows> {
        let Experts { w13, w2, .. } = weights;
        let Routes { order, offsets, .. } = *routes;
        let inp = self.permuted(l, tokens, order)?;
        let [wide, act] = [2, 1].map(|times| self.routes_by(times * self.config.ffn));
        self.net.b.at(format!("layers.{l}.experts.w1_w3"));
        self.net.b.push(GroupedLinearFwd { out: wide, act: Some(act), inp, weight: w13, offsets })?;
        let out = self.routes_by(self.config.hidden);
        self.net.b.at(format!("layers.{l}.experts.w2"));
        self.net.b.push(GroupedLinearFwd { out, act: None, inp: act, weight: w2, offsets })?;
        Ok(Rows { inp, w13: wide, act, out })
    }

    pub(super) fn permuted(&mut self, l: usize, inp: Slot, order: Slot) -> Result<Slot> {
        let out = self.routes_by(self.config.hidden);
        self.net.b.at(format!("layers.{l}.experts.rows"));
        self.net.b.push(Permute { out, inp, order })?;
        Ok(out)
    }
}
