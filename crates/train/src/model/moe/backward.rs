//! The backward, written out op by op in the reverse order of the forward.

use super::{Moe, Norm, Routes, Rows, Saved, SavedDense, SavedExperts, SavedLayer, SavedMlp};
use crate::Result;
use crate::model::Recompute;
use ironhorse_core::op::{
    Accum, AttentionBwd, CombineBwd, EmbeddingBwd, GroupedLinearBwdInput, GroupedLinearBwdWeight,
    LinearBwdInput, LinearBwdWeight, PermuteBwd, RmsNormApply, RmsNormBwd, Rope, RouterBwd, SwigluBwd,
    SwigluFwd,
};
use ironhorse_core::{DType, Error, Section, Slot};

impl Moe {
    pub(super) fn backward(&mut self, saved: &Saved, recompute: Recompute) -> Result<()> {
        let width = self.config.hidden;
        self.b.section(Section::Backward);
        let d_norm = self.tokens_by(width);
        self.linear_bwd("lm_head", self.head, [d_norm, saved.logits, saved.norm.out])?;
        self.b.name_grad("norm", d_norm);

        // The gradient of the residual stream: one buffer that every block adds to on the way down.
        let d_res = self.tokens_by(width);
        self.rmsnorm_bwd("norm", &saved.norm, self.norm, [d_res, d_norm], Accum::Write)?;
        for l in (0..self.layers.len()).rev() {
            let layer = &saved.layers[l];
            self.b.name_grad(format!("layers.{l}.residual_2"), d_res);
            let d_norm_2 = match &layer.mlp {
                SavedMlp::Dense(mlp) => self.dense_bwd(l, (layer, **mlp), d_res, recompute)?,
                SavedMlp::Experts(mlp) => self.experts_bwd(l, (layer, **mlp), d_res, recompute)?,
            };
            let name = format!("layers.{l}.post_attention_layernorm");
            self.b.name_grad(&name, d_norm_2);
            let weight = self.layers[l].post_attention_layernorm;
            self.rmsnorm_bwd(&name, &layer.norm_2, weight, [d_res, d_norm_2], Accum::Add)?;
            self.b.name_grad(format!("layers.{l}.residual_1"), d_res);
            self.attention_bwd(l, layer, d_res, recompute)?;
        }
        self.b.name_grad("embed", d_res);
        self.b.at("embed");
        self.b.push(EmbeddingBwd {
            d_wte: self.b.grad(self.embed),
            d_wpe: None,
            d_out: d_res,
            tokens: self.x,
            accum_wte: Accum::FirstWrites,
            accum: Accum::FirstWrites,
        })?;
        Ok(())
    }

    /// Gives the gradient of the normalised input.
    fn dense_bwd(
        &mut self,
        l: usize,
        (saved, mlp): (&SavedLayer, SavedDense),
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let SavedDense { weights: [weight, down], gate_up, act } = mlp;
        let name = format!("layers.{l}.mlp");
        self.b.name_grad(&name, d_res);
        let act = if recompute == Recompute::None {
            act
        } else {
            let out = self.tokens_by(self.config.ffn);
            self.b.at(format!("layers.{l}.mlp_act"));
            self.b.push(SwigluFwd { out, inp: gate_up })?;
            out
        };
        let d_act = self.tokens_by(self.config.ffn);
        self.linear_bwd(&name, down, [d_act, d_res, act])?;
        self.b.name_grad(format!("layers.{l}.mlp_act"), d_act);
        self.b.at(format!("layers.{l}.mlp_act"));
        // in place: nothing reads the forward's value any more
        self.b.push(SwigluBwd { d_inp: gate_up, act: None, d_out: d_act, inp: gate_up })?;
        let inp = self.norm_2_again(l, saved, recompute)?;
        let d_norm = self.tokens_by(self.config.hidden);
        self.linear_bwd(&format!("layers.{l}.mlp.gate_up"), weight, [d_norm, gate_up, inp])?;
        Ok(d_norm)
    }

    /// Gives the gradient of the normalised input: through the experts, and through the router that chose and weighed
    /// them.
    fn experts_bwd(
        &mut self,
        l: usize,
        (saved, mlp): (&SavedLayer, SavedExperts),
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let SavedExperts { weights: [gate, w13, w2], routes, rows, spread } = mlp;
        let name = |part: &str| format!("layers.{l}.{part}");
        let Routes { probs, weights, experts, order, places, offsets } = routes;
        self.b.name_grad(name("moe"), d_res);
        let norm = self.norm_2_again(l, saved, recompute)?;
        let rows = match recompute {
            Recompute::None | Recompute::Gelu => rows,
            Recompute::Full => Rows { inp: self.permuted(l, norm, order)?, ..rows },
            Recompute::Experts => self.experts(l, norm, &routes, [w13, w2])?,
        };
        let d_weights = self.table(self.config.top_k, DType::F32);
        self.b.at(name("moe"));
        let d_rows = rows.out; // in place, as below: nothing reads the forward's value any more
        self.b.push(CombineBwd { d_rows, d_weights, d_out: d_res, rows: rows.out, places, weights })?;
        self.b.name_grad(name("weights"), d_weights);

        let d_act = self.routes_by(self.config.ffn);
        // SwiGLU's gradient has all that SwiGLU itself needs at hand: what was not kept is had in its place.
        let again = matches!(recompute, Recompute::Gelu | Recompute::Full);
        if !again {
            self.grouped_bwd_weight(&name("experts.w2"), w2, [d_rows, rows.act], offsets)?;
        }
        self.grouped_bwd_input(&name("experts.w2"), w2, [d_act, d_rows], offsets)?;
        self.b.at(name("experts.act"));
        let act = again.then_some(d_act);
        self.b.push(SwigluBwd { d_inp: rows.w13, act, d_out: d_act, inp: rows.w13 })?;
        if let Some(act) = act {
            self.grouped_bwd_weight(&name("experts.w2"), w2, [d_rows, act], offsets)?;
        }
        let d_inp = self.routes_by(self.config.hidden);
        self.grouped_bwd_weight(&name("experts.w1_w3"), w13, [rows.w13, rows.inp], offsets)?;
        self.grouped_bwd_input(&name("experts.w1_w3"), w13, [d_inp, rows.w13], offsets)?;

        let dtype = self.dtype();
        let d_logits = self.table(self.config.n_experts, dtype);
        let load = spread.map(|spread| spread.load);
        let load = load.ok_or_else(|| Error::Program("a backward without the load of its experts".into()))?;
        let alpha = self.aux_alpha();
        self.b.at(name("router"));
        self.b.push(RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha })?;
        self.b.name_grad(name("router_logits"), d_logits);
        let d_norm = self.tokens_by(self.config.hidden);
        self.linear_bwd(&name("router_logits"), gate, [d_norm, d_logits, norm])?;
        self.b.at(name("experts.rows"));
        self.b.push(PermuteBwd { d_inp: d_norm, d_out: d_inp, places, accum: Accum::Add })?;
        Ok(d_norm)
    }

    fn attention_bwd(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<()> {
        let p = self.layers[l];
        let name = |part: &str| format!("layers.{l}.{part}");
        self.b.name_grad(name("o_proj"), d_res);
        let &SavedLayer { norm_1, qkv, attn: out, lse, .. } = saved;
        let d_attn = self.tokens_by(out.shape.cols());
        self.linear_bwd(&name("o_proj"), p.o_proj, [d_attn, d_res, out])?;
        self.b.name_grad(name("attn"), d_attn);
        let d_qkv = self.tokens_by(qkv.shape.cols());
        let (heads, kv_heads) = (self.config.n_head, self.config.n_kv_head);
        self.b.at(name("attn"));
        self.b.push(AttentionBwd { d_qkv, d_out: d_attn, qkv, out, lse, heads, kv_heads })?;
        self.b.name_grad(name("qkv_rope"), d_qkv);
        let back = Rope { back: true, ..self.rope(d_qkv) };
        self.b.at(name("qkv_rope"));
        self.b.push(back)?;
        self.b.name_grad(name("qkv"), d_qkv);
        let inp = self.norm_again(&name("input_layernorm"), norm_1, p.input_layernorm, recompute)?;
        let d_norm = self.tokens_by(self.config.hidden);
        self.linear_bwd(&name("qkv"), p.qkv, [d_norm, d_qkv, inp])?;
        self.b.name_grad(name("input_layernorm"), d_norm);
        self.rmsnorm_bwd(&name("input_layernorm"), &norm_1, p.input_layernorm, [d_res, d_norm], Accum::Add)
    }

    /// Both gradients of a linear layer; `[d_inp, d_out, inp]`.
    fn linear_bwd(&mut self, name: &str, weight: Slot, [d_inp, d_out, inp]: [Slot; 3]) -> Result<()> {
        let (d_weight, accum) = (self.b.grad(weight), Accum::FirstWrites);
        self.b.at(name);
        self.b.push(LinearBwdWeight { d_weight, d_bias: None, d_out, inp, accum })?;
        self.b.push(LinearBwdInput { d_inp, d_out, weight, pre: None })?;
        Ok(())
    }

    /// The gradient of the weights of the experts' layers.
    fn grouped_bwd_weight(
        &mut self,
        name: &str,
        weight: Slot,
        [d_out, inp]: [Slot; 2],
        offsets: Slot,
    ) -> Result<()> {
        let (d_weight, accum) = (self.b.grad(weight), Accum::FirstWrites);
        self.b.at(name);
        Ok(self.b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum })?)
    }

    /// The gradient of what the experts' layers were given.
    fn grouped_bwd_input(
        &mut self,
        name: &str,
        weight: Slot,
        [d_inp, d_out]: [Slot; 2],
        offsets: Slot,
    ) -> Result<()> {
        self.b.at(name);
        Ok(self.b.push(GroupedLinearBwdInput { d_inp, d_out, weight, offsets })?)
    }

    fn rmsnorm_bwd(
        &mut self,
        name: &str,
        norm: &Norm,
        weight: Slot,
        [d_inp, d_out]: [Slot; 2],
        accum_inp: Accum,
    ) -> Result<()> {
        let Norm { inp, rstd, .. } = *norm;
        let (d_weight, accum) = (self.b.grad(weight), Accum::FirstWrites);
        self.b.at(name);
        self.b.push(RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum })?;
        Ok(())
    }

    fn norm_2_again(&mut self, l: usize, saved: &SavedLayer, recompute: Recompute) -> Result<Slot> {
        let name = format!("layers.{l}.post_attention_layernorm");
        self.norm_again(&name, saved.norm_2, self.layers[l].post_attention_layernorm, recompute)
    }

    /// The normalised activation: kept, or computed again from its input and statistic.
    fn norm_again(&mut self, name: &str, saved: Norm, weight: Slot, recompute: Recompute) -> Result<Slot> {
        if !recompute.norms() {
            return Ok(saved.out);
        }
        let Norm { inp, rstd, .. } = saved;
        let out = self.tokens_by(self.config.hidden);
        self.b.at(name);
        self.b.push(RmsNormApply { out, inp, rstd, weight })?;
        Ok(out)
    }
}
