//! The forward: for training, for a loss alone, and token by token.

use super::{Mlp, Moe, Norm, Routes, Rows, Saved, SavedDense, SavedExperts, SavedLayer, SavedMlp, Spread};
use crate::Result;
use ironhorse_core::op::{
    Accum, Add, AttentionCached, AttentionFwd, Combine, CrossEntropy, EmbeddingFwd, GroupedLinearFwd,
    LinearFwd, LossMean, Permute, ResidualRmsNormFwd, RmsNormFwd, Rope, RouteSort, RouterFwd, RouterLoad,
    SwigluFwd,
};
use ironhorse_core::{DType, Shape, Slot};

/// What a forward is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Training,
    Evaluation,
    Decoding,
}

impl Moe {
    /// Tokens to the loss, which includes every layer's auxiliary loss.
    pub(super) fn forward(&mut self) -> Result<Saved> {
        let loss = self.b.io("loss", Shape::new([]), DType::F32);
        let experts = self.config.n_experts > 0;
        let mean = if experts { self.b.io("cross_entropy", Shape::new([]), DType::F32) } else { loss };
        let saved = self.loss_fwd(mean, Purpose::Training)?;
        let mut sum = mean;
        for layer in &saved.layers {
            let SavedMlp::Experts(experts) = &layer.mlp else { continue };
            if let Some(Spread { aux, .. }) = experts.spread {
                self.b.push(Add { out: loss, a: sum, b: aux })?;
                sum = loss;
            }
        }
        Ok(saved)
    }

    /// Tokens to the mean cross-entropy.
    pub(super) fn evaluate(&mut self) -> Result<()> {
        let loss = self.b.io("loss", Shape::new([]), DType::F32);
        self.loss_fwd(loss, Purpose::Evaluation).map(drop)
    }

    fn loss_fwd(&mut self, loss: Slot, purpose: Purpose) -> Result<Saved> {
        let targets = self.b.io("y", [self.batch, self.seq], DType::I32);
        let losses = self.b.io("losses", [self.batch, self.seq], DType::F32);
        let (layers, norm) = self.blocks(purpose)?;
        let logits = self.tokens_by(self.config.padded_vocab_size());
        self.head_fwd(norm.out, logits)?;
        let (vocab, grad) = (self.config.vocab_size, purpose == Purpose::Training);
        self.b.at("loss");
        self.b.push(CrossEntropy { losses, logits, targets, vocab, grad })?;
        self.b.push(LossMean { loss, losses, accum: Accum::FirstWrites })?;
        Ok(Saved { layers, norm, logits })
    }

    /// One token to its logits.
    pub(super) fn decode(&mut self) -> Result<()> {
        let dtype = self.dtype();
        let logits = self.b.io("logits", [self.batch, 1, self.config.padded_vocab_size()], dtype);
        let (_, norm) = self.blocks(Purpose::Decoding)?;
        self.head_fwd(norm.out, logits)
    }

    fn head_fwd(&mut self, inp: Slot, logits: Slot) -> Result<()> {
        self.b.at("lm_head");
        self.b.push(LinearFwd { out: logits, pre: None, inp, weight: self.head, bias: None })?;
        self.b.name("logits", logits);
        Ok(())
    }

    /// Everything between the tokens and the head.
    fn blocks(&mut self, purpose: Purpose) -> Result<(Vec<SavedLayer>, Norm)> {
        let embed = self.embedding()?;
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut norm_1 = self.rmsnorm("layers.0.input_layernorm", embed, self.layers[0].input_layernorm)?;
        for l in 0..self.layers.len() {
            let p = self.layers[l];
            let qkv = self.qkv(l, norm_1.out, purpose == Purpose::Decoding)?;
            let (attn, lse) = match purpose {
                Purpose::Decoding => self.attention_cached(l, qkv)?,
                Purpose::Training | Purpose::Evaluation => self.attention(l, qkv)?,
            };
            let o_proj = self.linear(&format!("layers.{l}.o_proj"), attn, p.o_proj)?;
            let names = ["residual_1", "post_attention_layernorm"].map(|part| format!("layers.{l}.{part}"));
            let norm_2 = self.residual_rmsnorm(&names, [norm_1.inp, o_proj], p.post_attention_layernorm)?;
            let (out, mlp) = self.mlp(l, norm_2.out, purpose)?;
            let (next, weight) = match self.layers.get(l + 1) {
                Some(next) => (format!("layers.{}.input_layernorm", l + 1), next.input_layernorm),
                None => ("norm".into(), self.norm),
            };
            layers.push(SavedLayer { norm_1, qkv, attn, lse, norm_2, mlp });
            let names = [format!("layers.{l}.residual_2"), next];
            norm_1 = self.residual_rmsnorm(&names, [norm_2.inp, out], weight)?;
        }
        Ok((layers, norm_1))
    }

    fn embedding(&mut self) -> Result<Slot> {
        let out = self.tokens_by(self.config.hidden);
        let (tokens, wte, vocab) = (self.x, self.embed, self.config.vocab_size);
        self.b.at("embed");
        self.b.push(EmbeddingFwd { out, tokens, wte, wpe: None, vocab, at_position: false })?;
        self.b.name("embed", out);
        Ok(out)
    }

    fn norm_slots(&mut self, inp: Slot) -> Norm {
        let out = self.tokens_by(self.config.hidden);
        Norm { inp, out, rstd: self.b.activation([self.batch, self.seq], DType::F32) }
    }

    fn rmsnorm(&mut self, name: &str, inp: Slot, weight: Slot) -> Result<Norm> {
        let norm @ Norm { out, rstd, .. } = self.norm_slots(inp);
        let eps = self.eps();
        self.b.at(name);
        self.b.push(RmsNormFwd { out, rstd, inp, weight, eps })?;
        self.b.name(name, out);
        Ok(norm)
    }

    /// The residual add that ends one block and the norm that begins the next, in one op.
    fn residual_rmsnorm(&mut self, names: &[String; 2], [a, b]: [Slot; 2], weight: Slot) -> Result<Norm> {
        let residual = self.tokens_by(self.config.hidden);
        let norm @ Norm { out, rstd, .. } = self.norm_slots(residual);
        let eps = self.eps();
        self.b.at(&names[1]);
        self.b.push(ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps })?;
        self.b.name(&names[0], residual);
        self.b.name(&names[1], out);
        Ok(norm)
    }

    fn linear(&mut self, name: &str, inp: Slot, weight: Slot) -> Result<Slot> {
        let out = self.tokens_by(weight.shape.rows());
        self.b.at(name);
        self.b.push(LinearFwd { out, pre: None, inp, weight, bias: None })?;
        self.b.name(name, out);
        Ok(out)
    }

    /// q, k and v, turned by their positions.
    fn qkv(&mut self, l: usize, inp: Slot, at_position: bool) -> Result<Slot> {
        let qkv = self.linear(&format!("layers.{l}.qkv"), inp, self.layers[l].qkv)?;
        let rope = Rope { at_position, ..self.rope(qkv) };
        self.b.at(format!("layers.{l}.qkv_rope"));
        self.b.push(rope)?;
        self.b.name(format!("layers.{l}.qkv_rope"), qkv);
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

    fn attention(&mut self, l: usize, qkv: Slot) -> Result<(Slot, Slot)> {
        let (heads, kv_heads) = (self.config.n_head, self.config.n_kv_head);
        let out = self.tokens_by(heads * self.config.head_dim);
        let lse = self.b.activation([self.batch, heads, self.seq], DType::F32);
        self.b.at(format!("layers.{l}.attn"));
        self.b.push(AttentionFwd { out, lse, qkv, heads, kv_heads })?;
        self.b.name(format!("layers.{l}.attn"), out);
        Ok((out, lse))
    }

    fn attention_cached(&mut self, l: usize, qkv: Slot) -> Result<(Slot, Slot)> {
        let (heads, kv_heads, dtype) = (self.config.n_head, self.config.n_kv_head, self.dtype());
        let cache = [self.batch, self.config.max_seq_len, kv_heads * self.config.head_dim];
        let [keys, values] = [(); 2].map(|()| self.b.cache(cache, dtype));
        let out = self.tokens_by(heads * self.config.head_dim);
        self.b.at(format!("layers.{l}.attn"));
        self.b.push(AttentionCached { out, keys, values, qkv, heads, kv_heads })?;
        Ok((out, out))
    }

    fn mlp(&mut self, l: usize, inp: Slot, purpose: Purpose) -> Result<(Slot, SavedMlp)> {
        match self.layers[l].mlp {
            Mlp::Dense { gate_up: weight, down } => {
                let gate_up = self.tokens_by(2 * self.config.ffn);
                self.b.at(format!("layers.{l}.mlp.gate_up"));
                self.b.push(LinearFwd { out: gate_up, pre: None, inp, weight, bias: None })?;
                let act = self.tokens_by(self.config.ffn);
                self.b.at(format!("layers.{l}.mlp_act"));
                self.b.push(SwigluFwd { out: act, inp: gate_up })?;
                self.b.name(format!("layers.{l}.mlp_act"), act);
                let out = self.linear(&format!("layers.{l}.mlp"), act, down)?;
                let weights = [weight, down];
                Ok((out, SavedMlp::Dense(Box::new(SavedDense { weights, gate_up, act }))))
            }
            Mlp::Experts { gate, w13, w2 } => {
                let routes = self.router(l, inp, gate)?;
                let training = purpose == Purpose::Training;
                let spread = training.then(|| self.router_load(l, &routes)).transpose()?;
                let rows = self.experts(l, inp, &routes, [w13, w2])?;
                let out = self.tokens_by(self.config.hidden);
                self.b.at(format!("layers.{l}.moe"));
                let Routes { places, weights, .. } = routes;
                self.b.push(Combine { out, rows: rows.out, places, weights })?;
                self.b.name(format!("layers.{l}.moe"), out);
                let weights = [gate, w13, w2];
                let saved = SavedExperts { weights, routes, rows, spread };
                Ok((out, SavedMlp::Experts(Box::new(saved))))
            }
        }
    }

    /// Chooses each token's experts and sorts the tokens by them.
    fn router(&mut self, l: usize, inp: Slot, gate: Slot) -> Result<Routes> {
        let (e, k, dtype) = (self.config.n_experts, self.config.top_k, self.dtype());
        let logits = self.table(e, dtype);
        let name = format!("layers.{l}.router_logits");
        self.b.at(&name);
        self.b.push(LinearFwd { out: logits, pre: None, inp, weight: gate, bias: None })?;
        self.b.name(&name, logits);
        let (probs, weights) = (self.table(e, DType::F32), self.table(k, DType::F32));
        let [experts, places] = [(); 2].map(|()| self.table(k, DType::I32));
        let order = self.b.activation([self.batch * self.seq * k], DType::I32);
        let offsets = self.b.activation([e + 1], DType::I32);
        self.b.at(format!("layers.{l}.router"));
        self.b.push(RouterFwd { probs, weights, experts, logits })?;
        for (part, slot) in [("probs", probs), ("weights", weights), ("experts", experts)] {
            self.b.name(format!("layers.{l}.{part}"), slot);
        }
        self.b.push(RouteSort { order, places, offsets, experts })?;
        Ok(Routes { probs, weights, experts, order, places, offsets })
    }

    /// Shares of the experts, auxiliary loss and entropy of a layer.
    fn router_load(&mut self, l: usize, routes: &Routes) -> Result<Spread> {
        let load = self.b.io(format!("layers.{l}.load"), [self.config.n_experts], DType::F32);
        let aux = self.b.io(format!("layers.{l}.aux"), Shape::new([]), DType::F32);
        let entropy = Some(self.b.io(format!("layers.{l}.entropy"), Shape::new([]), DType::F32));
        let Routes { probs, offsets, .. } = *routes;
        let alpha = self.aux_alpha();
        self.b.push(RouterLoad { load, aux, entropy, probs, offsets, alpha, accum: Accum::FirstWrites })?;
        Ok(Spread { load, aux })
    }

    /// The rows of all experts; also what a backward that kept none computes again.
    pub(super) fn experts(
        &mut self,
        l: usize,
        tokens: Slot,
        routes: &Routes,
        [w13, w2]: [Slot; 2],
    ) -> Result<Rows> {
        let Routes { order, offsets, .. } = *routes;
        let inp = self.permuted(l, tokens, order)?;
        let [wide, act] = [2, 1].map(|times| self.routes_by(times * self.config.ffn));
        self.b.at(format!("layers.{l}.experts.w1_w3"));
        self.b.push(GroupedLinearFwd { out: wide, act: Some(act), inp, weight: w13, offsets })?;
        let out = self.routes_by(self.config.hidden);
        self.b.at(format!("layers.{l}.experts.w2"));
        self.b.push(GroupedLinearFwd { out, act: None, inp: act, weight: w2, offsets })?;
        Ok(Rows { inp, w13: wide, act, out })
    }

    pub(super) fn permuted(&mut self, l: usize, inp: Slot, order: Slot) -> Result<Slot> {
        let out = self.routes_by(self.config.hidden);
        self.b.at(format!("layers.{l}.experts.rows"));
        self.b.push(Permute { out, inp, order })?;
        Ok(out)
    }
}
