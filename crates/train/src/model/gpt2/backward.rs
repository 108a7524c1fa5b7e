//! The backward of GPT-2 and the update, written out op by op in the reverse order of the forward.

use super::{Affine, Gpt2, Norm, Recompute, Saved, SavedLayer};
use crate::Result;
use ironhorse_core::op::{
    Accum, Act, ActFwd, AttentionBwd, EmbeddingBwd, LayerNormApply, LayerNormBwd, LinearBwdInput,
    LinearBwdWeight, PreAct,
};
use ironhorse_core::{Section, Slot};

impl Gpt2 {
    pub(super) fn backward(&mut self, saved: &Saved, recompute: Recompute) -> Result<()> {
        let width = self.config.n_embd;
        self.b.section(Section::Backward);
        self.b.at("lm_head");
        let d_ln_f = self.tokens_by(width);
        self.b.push(LinearBwdWeight {
            d_weight: self.grad(self.wte),
            d_bias: None,
            d_out: saved.logits,
            inp: saved.ln_f.out,
            accum: Accum::FirstWrites,
        })?;
        self.b.push(LinearBwdInput { d_inp: d_ln_f, d_out: saved.logits, weight: self.wte, pre: None })?;
        self.b.name_grad("ln_f", d_ln_f);

        // The gradient of the residual stream: one buffer that every block adds to on the way down.
        let d_res = self.tokens_by(width);
        self.layernorm_bwd("ln_f", &saved.ln_f, self.ln_f, [d_res, d_ln_f], Accum::Write)?;
        for l in (0..self.layers.len()).rev() {
            self.b.name_grad(format!("h.{l}.residual_2"), d_res);
            self.mlp_bwd(l, &saved.layers[l], d_res, recompute)?;
            self.b.name_grad(format!("h.{l}.residual_1"), d_res);
            self.attention_bwd(l, &saved.layers[l], d_res, recompute)?;
        }
        self.b.name_grad("embed", d_res);
        self.b.at("embed");
        self.b.push(EmbeddingBwd {
            d_wte: self.grad(self.wte),
            d_wpe: Some(self.grad(self.wpe)),
            d_out: d_res,
            tokens: self.x,
            accum_wte: Accum::Add, // the head has written it
            accum: Accum::FirstWrites,
        })?;
        Ok(())
    }

    fn mlp_bwd(&mut self, l: usize, saved: &SavedLayer, d_res: Slot, recompute: Recompute) -> Result<()> {
        let (p, width) = (self.layers[l], self.config.n_embd);
        let [proj, fc, ln_2] = ["mlp.c_proj", "mlp.c_fc", "ln_2"].map(|part| format!("h.{l}.{part}"));
        self.b.name_grad(&proj, d_res);
        let gelu = match recompute {
            Recompute::None => saved.gelu,
            Recompute::Gelu | Recompute::Full | Recompute::Experts => {
                let out = self.tokens_by(4 * width);
                self.b.at(format!("h.{l}.mlp.gelu"));
                self.b.push(ActFwd { out, inp: saved.fc, act: Act::Gelu })?;
                out
            }
        };
        let d_fc = self.tokens_by(4 * width);
        self.linear_bwd(
            &proj,
            p.mlp_proj,
            [d_fc, d_res, gelu],
            Some(PreAct { act: Act::Gelu, slot: saved.fc }),
        )?;
        self.b.name_grad(&fc, d_fc);
        let norm = self.norm_again(&ln_2, saved.ln_2, p.ln_2, recompute)?;
        let d_ln_2 = self.tokens_by(width);
        self.linear_bwd(&fc, p.c_fc, [d_ln_2, d_fc, norm.out], None)?;
        self.b.name_grad(&ln_2, d_ln_2);
        self.layernorm_bwd(&ln_2, &norm, p.ln_2, [d_res, d_ln_2], Accum::Add)
    }

    fn attention_bwd(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<()> {
        let (p, width) = (self.layers[l], self.config.n_embd);
        let [proj, sdpa, c_attn, ln_1] =
            ["attn.c_proj", "attn.sdpa", "attn.c_attn", "ln_1"].map(|part| format!("h.{l}.{part}"));
        self.b.name_grad(&proj, d_res);
        let d_sdpa = self.tokens_by(width);
        self.linear_bwd(&proj, p.attn_proj, [d_sdpa, d_res, saved.sdpa], None)?;
        self.b.name_grad(&sdpa, d_sdpa);
        let d_qkv = self.tokens_by(3 * width);
        self.b.at(&sdpa);
        self.b.push(AttentionBwd {
            d_qkv,
            d_out: d_sdpa,
            qkv: saved.qkv,
            out: saved.sdpa,
            lse: saved.lse,
            heads: self.config.n_head,
            kv_heads: self.config.n_head,
        })?;
        self.b.name_grad(&c_attn, d_qkv);
        let norm = self.norm_again(&ln_1, saved.ln_1, p.ln_1, recompute)?;
        let d_ln_1 = self.tokens_by(width);
        self.linear_bwd(&c_attn, p.c_attn, [d_ln_1, d_qkv, norm.out], None)?;
        self.b.name_grad(&ln_1, d_ln_1);
        self.layernorm_bwd(&ln_1, &norm, p.ln_1, [d_res, d_ln_1], Accum::Add)
    }

    /// Both gradients of a linear layer; `[d_inp, d_out, inp]`.
    fn linear_bwd(
        &mut self,
        name: &str,
        p: Affine,
        [d_inp, d_out, inp]: [Slot; 3],
        pre: Option<PreAct>,
    ) -> Result<()> {
        self.b.at(name);
        self.b.push(LinearBwdWeight {
            d_weight: self.grad(p.weight),
            d_bias: Some(self.grad(p.bias)),
            d_out,
            inp,
            accum: Accum::FirstWrites,
        })?;
        self.b.push(LinearBwdInput { d_inp, d_out, weight: p.weight, pre })?;
        Ok(())
    }

    fn layernorm_bwd(
        &mut self,
        name: &str,
        norm: &Norm,
        p: Affine,
        [d_inp, d_out]: [Slot; 2],
        accum_inp: Accum,
    ) -> Result<()> {
        self.b.at(name);
        self.b.push(LayerNormBwd {
            d_inp,
            d_weight: self.grad(p.weight),
            d_bias: self.grad(p.bias),
            d_out,
            inp: norm.inp,
            mean: norm.mean,
            rstd: norm.rstd,
            weight: p.weight,
            accum_inp,
            accum: Accum::FirstWrites,
        })?;
        Ok(())
    }

    /// The normalised activation: kept, or computed again from its input and statistics.
    fn norm_again(&mut self, name: &str, saved: Norm, p: Affine, recompute: Recompute) -> Result<Norm> {
        if !recompute.norms() {
            return Ok(saved);
        }
        let Norm { inp, mean, rstd, .. } = saved;
        let out = self.tokens_by(self.config.n_embd);
        self.b.at(name);
        self.b.push(LayerNormApply { out, inp, mean, rstd, weight: p.weight, bias: p.bias })?;
        Ok(Norm { out, ..saved })
    }
}
