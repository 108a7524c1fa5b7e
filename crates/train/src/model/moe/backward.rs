//! The backward, written out op by op in the reverse order of the forward.

use super::{Dense, Experts, Moe, Routes, Rows, Saved, SavedDense, SavedExperts, SavedLayer, SavedMlp};
use crate::Result;
use crate::model::Recompute;
use ironhorse_core::op::{
    Accum, CombineBwd, GroupedLinearBwdInput, GroupedLinearBwdWeight, PermuteBwd, Rope, RouterBwd, SwigluBwd,
    SwigluFwd,
};
use ironhorse_core::{DType, Error, Slot};

impl Moe {
    pub(super) fn backward(&mut self, saved: &Saved, recompute: Recompute) -> Result<()> {
        let d_res = self.net.head_bwd("norm", &saved.head, self.head)?;
        for (l, layer) in saved.layers.iter().enumerate().rev() {
            self.net.b.name_grad(format!("layers.{l}.residual_2"), d_res);
            let d_norm_2 = match &layer.mlp {
                SavedMlp::Dense(weights, mlp) => {
                    self.dense_bwd(l, (layer, *weights, *mlp), d_res, recompute)?
                }
                SavedMlp::Experts(weights, mlp) => {
                    self.experts_bwd(l, (layer, *weights, **mlp), d_res, recompute)?
                }
            };
            let name = format!("layers.{l}.post_attention_layernorm");
            self.net.b.name_grad(&name, d_norm_2);
            self.net.norm_bwd(&name, &layer.norm_2, [d_res, d_norm_2], Accum::Add)?;
            self.net.b.name_grad(format!("layers.{l}.residual_1"), d_res);
            self.attention_bwd(l, layer, d_res, recompute)?;
        }
        self.net.embed_bwd(self.embed, None, d_res, false)
    }

    /// Gives the gradient of the normalised input.
    fn dense_bwd(
        &mut self,
        l: usize,
        (saved, weights, mlp): (&SavedLayer, Dense, SavedDense),
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let SavedDense { gate_up, act } = mlp;
        let name = format!("layers.{l}.mlp");
        self.net.b.name_grad(&name, d_res);
        let act = if recompute == Recompute::None {
            act
        } else {
            let out = self.net.tokens_by(self.config.ffn);
            self.net.b.at(format!("layers.{l}.mlp_act"));
            self.net.b.push(SwigluFwd { out, inp: gate_up })?;
            out
        };
        let d_act = self.net.tokens_by(self.config.ffn);
        self.net.linear_bwd(&name, weights.down, [d_act, d_res, act], None)?;
        self.net.b.name_grad(format!("layers.{l}.mlp_act"), d_act);
        self.net.b.at(format!("layers.{l}.mlp_act"));
        // in place: nothing reads the forward's value any more
        self.net.b.push(SwigluBwd { d_inp: gate_up, act: None, d_out: d_act, inp: gate_up })?;
        let inp = self.norm_2_again(l, saved, recompute)?;
        let d_norm = self.net.hidden();
        let name = format!("layers.{l}.mlp.gate_up");
        self.net.linear_bwd(&name, weights.gate_up, [d_norm, gate_up, inp], None)?;
        Ok(d_norm)
    }

    /// Gives the gradient of the normalised input: through the experts, and through the router that chose and weighed
    /// them.
    fn experts_bwd(
        &mut self,
        l: usize,
        (saved, p, mlp): (&SavedLayer, Experts, SavedExperts),
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let Experts { gate, w13, w2 } = p;
        let SavedExperts { routes, rows, spread } = mlp;
        let name = |part: &str| format!("layers.{l}.{part}");
        let Routes { probs, weights, experts, order, places, offsets } = routes;
        self.net.b.name_grad(name("moe"), d_res);
        let norm = self.norm_2_again(l, saved, recompute)?;
        let rows = match recompute {
            Recompute::None | Recompute::Gelu => rows,
            Recompute::Full => Rows { inp: self.permuted(l, norm, order)?, ..rows },
            Recompute::Experts => self.experts(l, norm, &routes, p)?,
        };
        let d_weights = self.table(self.config.top_k, DType::F32);
        self.net.b.at(name("moe"));
        let d_rows = rows.out; // in place, as below: nothing reads the forward's value any more
        self.net.b.push(CombineBwd { d_rows, d_weights, d_out: d_res, rows: rows.out, places, weights })?;
        self.net.b.name_grad(name("weights"), d_weights);

        let d_act = self.routes_by(self.config.ffn);
        // The backward of SwiGLU reads all that its forward needs, so it also recomputes the result if that was not kept.
        let again = matches!(recompute, Recompute::Gelu | Recompute::Full);
        if !again {
            self.grouped_bwd_weight(&name("experts.w2"), w2, [d_rows, rows.act], offsets)?;
        }
        self.grouped_bwd_input(&name("experts.w2"), w2, [d_act, d_rows], offsets)?;
        self.net.b.at(name("experts.act"));
        let act = again.then_some(d_act);
        self.net.b.push(SwigluBwd { d_inp: rows.w13, act, d_out: d_act, inp: rows.w13 })?;
        if let Some(act) = act {
            self.grouped_bwd_weight(&name("experts.w2"), w2, [d_rows, act], offsets)?;
        }
        let d_inp = self.routes_by(self.config.hidden);
        self.grouped_bwd_weight(&name("experts.w1_w3"), w13, [rows.w13, rows.inp], offsets)?;
        self.grouped_bwd_input(&name("experts.w1_w3"), w13, [d_inp, rows.w13], offsets)?;

        let dtype = self.net.dtype();
        let d_logits = self.table(self.config.n_experts, dtype);
        let load = spread.map(|spread| spread.load);
        let load = load.ok_or_else(|| Error::Program("a backward without the load of its experts".into()))?;
        let alpha = self.aux_alpha();
        self.net.b.at(name("router"));
        self.net.b.push(RouterBwd { d_logits, d_weights, probs, weights, experts, load, alpha })?;
        self.net.b.name_grad(name("router_logits"), d_logits);
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&name("router_logits"), gate, [d_norm, d_logits, norm], None)?;
        self.net.b.at(name("experts.rows"));
        self.net.b.push(PermuteBwd { d_inp: d_norm, d_out: d_inp, places, accum: Accum::Add })?;
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
        self.net.b.name_grad(name("o_proj"), d_res);
        let SavedLayer { norm_1, attn, .. } = saved;
        let d_attn = self.net.tokens_by(attn.out.shape.cols());
        self.net.linear_bwd(&name("o_proj"), p.o_proj, [d_attn, d_res, attn.out], None)?;
        self.net.b.name_grad(name("attn"), d_attn);
        let d_qkv = self.net.attention_bwd(&name("attn"), attn, d_attn)?;
        self.net.b.name_grad(name("qkv_rope"), d_qkv);
        let back = Rope { back: true, ..self.rope(d_qkv) };
        self.net.b.at(name("qkv_rope"));
        self.net.b.push(back)?;
        self.net.b.name_grad(name("qkv"), d_qkv);
        let inp = self.net.norm_again(&name("input_layernorm"), norm_1, recompute)?;
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&name("qkv"), p.qkv, [d_norm, d_qkv, inp], None)?;
        self.net.b.name_grad(name("input_layernorm"), d_norm);
        self.net.norm_bwd(&name("input_layernorm"), norm_1, [d_res, d_norm], Accum::Add)
    }

    /// The gradient of the weights of the experts' layers.
    fn grouped_bwd_weight(
        &mut self,
        name: &str,
        weight: Slot,
        [d_out, inp]: [Slot; 2],
        offsets: Slot,
    ) -> Result<()> {
        let (d_weight, accum) = (self.net.b.grad(weight), Accum::FirstWrites);
        self.net.b.at(name);
        Ok(self.net.b.push(GroupedLinearBwdWeight { d_weight, d_out, inp, offsets, accum })?)
    }

    /// The gradient of what the experts' layers were given.
    fn grouped_bwd_input(
        &mut self,
        name: &str,
        weight: Slot,
        [d_inp, d_out]: [Slot; 2],
        offsets: Slot,
    ) -> Result<()> {
        self.net.b.at(name);
        Ok(self.net.b.push(GroupedLinearBwdInput { d_inp, d_out, weight, offsets })?)
    }

    fn norm_2_again(&mut self, l: usize, saved: &SavedLayer, recompute: Recompute) -> Result<Slot> {
        let name = format!("layers.{l}.post_attention_layernorm");
        self.net.norm_again(&name, &saved.norm_2, recompute)
    }
}
