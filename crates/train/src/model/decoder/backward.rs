//! The backward, written out op by op in the reverse order of the forward.

use super::dropout::Place;
use super::{Decoder, Mlp, Saved, SavedLayer, SavedMlp};
use crate::Result;
use crate::model::Recompute;
use crate::model::blocks::Linear;
use ironhorse_core::op::{Accum, ActFwd, Gate, PreAct, Rope, SwigluBwd, SwigluFwd};
use ironhorse_core::{Error, Slot};

impl Decoder {
    pub(super) fn backward(&mut self, saved: &Saved, recompute: Recompute) -> Result<()> {
        let names = self.plan.names;
        let d_res = self.net.head_bwd(names.last_norm[1], &saved.head, self.head)?;
        for (l, layer) in saved.layers.iter().enumerate().rev() {
            self.net.b.name_grad(self.name(l, "residual_2"), d_res);
            let d_mlp = self.post_norm_bwd(l, names.post_mlp, layer.post_mlp.as_ref(), d_res)?;
            let d_mlp = self.drop_bwd(Place::Mlp(l), d_mlp, false)?;
            let d_norm_2 = self.mlp_bwd(l, layer, d_mlp, recompute)?;
            let norm_2 = self.name(l, names.norm_2);
            self.net.b.name_grad(&norm_2, d_norm_2);
            self.net.norm_bwd(&norm_2, &layer.norm_2, [d_res, d_norm_2], Accum::Add)?;
            self.net.b.name_grad(self.name(l, "residual_1"), d_res);
            self.attention_bwd(l, layer, d_res, recompute)?;
        }
        let tied = names.head == names.embed;
        let d_embed = self.drop_bwd(Place::Embedding, d_res, true)?;
        self.net.embed_bwd(self.tables(), d_embed, tied)
    }

    /// Gives the gradient of the normalised input.
    fn mlp_bwd(&mut self, l: usize, saved: &SavedLayer, d_res: Slot, recompute: Recompute) -> Result<Slot> {
        match (self.layers[l].mlp, &saved.mlp) {
            (Mlp::Plain { act: f, fc, proj }, &SavedMlp::Dense { pre, act }) => {
                let pre = PreAct { act: f, slot: pre };
                self.plain_bwd(l, (saved, pre, act), [fc, proj], d_res, recompute)
            }
            (Mlp::Swiglu { gate, gate_up, down }, &SavedMlp::Dense { pre, act }) => {
                self.swiglu_bwd(l, saved, (gate, gate_up, down), [d_res, pre, act], recompute)
            }
            (Mlp::Experts(weights), SavedMlp::Experts(experts)) => {
                self.experts_bwd(l, (saved, weights, experts), d_res, recompute)
            }
            _ => Err(Error::Program(format!("layer {l}: a forward of another kind")).into()),
        }
    }

    fn plain_bwd(
        &mut self,
        l: usize,
        (saved, pre, act): (&SavedLayer, PreAct, Slot),
        [fc, proj]: [Linear; 2],
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<Slot> {
        let [proj_name, fc_name] = ["mlp.c_proj", "mlp.c_fc"].map(|part| self.name(l, part));
        self.net.b.name_grad(&proj_name, d_res);
        if self.net.is_fp8(&fc_name, &fc) && self.net.is_fp8(&proj_name, &proj) {
            let d_norm = self.net.hidden();
            self.net.mlp_bwd_fp8([&fc_name, &proj_name], [d_norm, d_res], pre, [fc, proj])?;
            return Ok(d_norm);
        }
        let act = if recompute == Recompute::None {
            act
        } else {
            let out = self.net.tokens_by(self.plan.ffn);
            self.net.b.at(self.name(l, &format!("mlp.{}", pre.act)));
            self.net.b.push(ActFwd { out, inp: pre.slot, act: pre.act })?;
            out
        };
        let d_fc = self.net.tokens_by(self.plan.ffn);
        self.net.linear_bwd(&proj_name, proj, [d_fc, d_res, act], Some(pre))?;
        self.net.b.name_grad(&fc_name, d_fc);
        let inp = self.norm_2_again(l, saved, recompute)?;
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&fc_name, fc, [d_norm, d_fc, inp], None)?;
        Ok(d_norm)
    }

    fn swiglu_bwd(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        (gate, gate_up, down): (Gate, Linear, Linear),
        [d_res, pre, act]: [Slot; 3],
        recompute: Recompute,
    ) -> Result<Slot> {
        let [mlp, act_name] = ["mlp", "mlp_act"].map(|part| self.name(l, part));
        self.net.b.name_grad(&mlp, d_res);
        let act = if self.unless_fp8(&mlp, &down, recompute) == Recompute::None {
            act
        } else {
            let out = self.net.tokens_by(self.plan.ffn);
            self.net.b.at(&act_name);
            self.net.b.push(SwigluFwd { out, inp: pre, gate })?;
            out
        };
        let d_act = self.net.tokens_by(self.plan.ffn);
        self.net.linear_bwd(&mlp, down, [d_act, d_res, act], None)?;
        self.net.b.name_grad(&act_name, d_act);
        self.net.b.at(&act_name);
        // in place: nothing reads the forward's value any more
        self.net.b.push(SwigluBwd { d_inp: pre, act: None, d_out: d_act, inp: pre, gate })?;
        let name = self.name(l, "mlp.gate_up");
        let recompute = self.unless_fp8(&name, &gate_up, recompute);
        let inp = self.norm_2_again(l, saved, recompute)?;
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&name, gate_up, [d_norm, pre, inp], None)?;
        Ok(d_norm)
    }

    fn attention_bwd(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<()> {
        let (p, names) = (self.layers[l], self.plan.names);
        let [proj, attn, qkv, norm_1] =
            [names.proj[1], names.attn, names.qkv[1], names.norm_1].map(|part| self.name(l, part));
        let d_proj = self.post_norm_bwd(l, names.post_attn, saved.post_attn.as_ref(), d_res)?;
        let d_proj = self.drop_bwd(Place::Attention(l), d_proj, false)?;
        self.net.b.name_grad(&proj, d_proj);
        let d_attn = self.net.tokens_by(saved.attn.out.shape.cols());
        self.net.linear_bwd(&proj, p.proj, [d_attn, d_proj, saved.attn.out], None)?;
        self.net.b.name_grad(&attn, d_attn);
        let d_qkv = self.net.attention_bwd(&attn, &saved.attn, d_attn)?;
        if let Some(rope) = self.rope(l, d_qkv) {
            let name = self.name(l, "qkv_rope");
            self.net.b.name_grad(&name, d_qkv);
            self.net.b.at(name);
            self.net.b.push(Rope { back: true, ..rope })?;
        }
        self.qk_norm_bwd(l, saved.qk_norm, d_qkv)?;
        self.net.b.name_grad(&qkv, d_qkv);
        let recompute = self.unless_fp8(&qkv, &p.qkv, recompute);
        let inp = self.net.norm_again(&norm_1, &saved.norm_1, recompute)?;
        let d_norm = self.net.hidden();
        self.net.linear_bwd(&qkv, p.qkv, [d_norm, d_qkv, inp], None)?;
        self.net.b.name_grad(&norm_1, d_norm);
        self.net.norm_bwd(&norm_1, &saved.norm_1, [d_res, d_norm], Accum::Add)
    }

    /// What to compute again of a layer's input: nothing where the forward has left it in 8 bits.
    fn unless_fp8(&self, name: &str, layer: &Linear, recompute: Recompute) -> Recompute {
        if self.net.is_fp8(name, layer) { Recompute::None } else { recompute }
    }

    pub(super) fn norm_2_again(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        recompute: Recompute,
    ) -> Result<Slot> {
        self.net.norm_again(&self.name(l, self.plan.names.norm_2), &saved.norm_2, recompute)
    }
}
