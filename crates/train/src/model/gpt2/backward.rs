//! The backward of GPT-2, written out op by op in the reverse order of the forward.

use super::{Gpt2, Recompute, Saved, SavedLayer};
use crate::Result;
use ironhorse_core::Slot;
use ironhorse_core::op::{Accum, Act, ActFwd, PreAct};

impl Gpt2 {
    pub(super) fn backward(&mut self, saved: &Saved, recompute: Recompute) -> Result<()> {
        let d_res = self.net.head_bwd("ln_f", &saved.head, self.wte)?;
        for (l, layer) in saved.layers.iter().enumerate().rev() {
            self.net.b.name_grad(format!("h.{l}.residual_2"), d_res);
            self.mlp_bwd(l, layer, d_res, recompute)?;
            self.net.b.name_grad(format!("h.{l}.residual_1"), d_res);
            self.attention_bwd(l, layer, d_res, recompute)?;
        }
        self.net.embed_bwd(self.wte, Some(self.wpe), d_res, true)
    }

    fn mlp_bwd(&mut self, l: usize, saved: &SavedLayer, d_res: Slot, recompute: Recompute) -> Result<()> {
        let (p, width) = (self.layers[l], self.config.n_embd);
        let [proj, fc, ln_2] = ["mlp.c_proj", "mlp.c_fc", "ln_2"].map(|part| format!("h.{l}.{part}"));
        self.net.b.name_grad(&proj, d_res);
        let gelu = if recompute == Recompute::None {
            saved.gelu
        } else {
            let out = self.net.tokens_by(4 * width);
            self.net.b.at(format!("h.{l}.mlp.gelu"));
            self.net.b.push(ActFwd { out, inp: saved.fc, act: Act::Gelu })?;
            out
        };
        let d_fc = self.net.tokens_by(4 * width);
        self.net.linear_bwd(
            &proj,
            p.mlp_proj,
            [d_fc, d_res, gelu],
            Some(PreAct { act: Act::Gelu, slot: saved.fc }),
        )?;
        self.net.b.name_grad(&fc, d_fc);
        let inp = self.net.norm_again(&ln_2, &saved.ln_2, recompute)?;
        let d_ln_2 = self.net.hidden();
        self.net.linear_bwd(&fc, p.c_fc, [d_ln_2, d_fc, inp], None)?;
        self.net.b.name_grad(&ln_2, d_ln_2);
        self.net.norm_bwd(&ln_2, &saved.ln_2, [d_res, d_ln_2], Accum::Add)
    }

    fn attention_bwd(
        &mut self,
        l: usize,
        saved: &SavedLayer,
        d_res: Slot,
        recompute: Recompute,
    ) -> Result<()> {
        let p = self.layers[l];
        let [proj, sdpa, c_attn, ln_1] =
            ["attn.c_proj", "attn.sdpa", "attn.c_attn", "ln_1"].map(|part| format!("h.{l}.{part}"));
        self.net.b.name_grad(&proj, d_res);
        let d_sdpa = self.net.hidden();
        self.net.linear_bwd(&proj, p.attn_proj, [d_sdpa, d_res, saved.attn.out], None)?;
        self.net.b.name_grad(&sdpa, d_sdpa);
        let d_qkv = self.net.attention_bwd(&sdpa, &saved.attn, d_sdpa)?;
        self.net.b.name_grad(&c_attn, d_qkv);
        let inp = self.net.norm_again(&ln_1, &saved.ln_1, recompute)?;
        let d_ln_1 = self.net.hidden();
        self.net.linear_bwd(&c_attn, p.c_attn, [d_ln_1, d_qkv, inp], None)?;
        self.net.b.name_grad(&ln_1, d_ln_1);
        self.net.norm_bwd(&ln_1, &saved.ln_1, [d_res, d_ln_1], Accum::Add)
    }
}
