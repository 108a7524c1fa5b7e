//! The norm of each head of q and k, between their projection and their rotation.

use super::{Decoder, SavedQkNorm};
use crate::Result;
use crate::model::blocks::{Heads, Purpose};
use ironhorse_core::op::{QkNormBwd, QkNormFwd};
use ironhorse_core::{DType, Slot};

impl Decoder {
    /// Gives the normalised q and k with v, and what the backward needs; in place where there is none.
    pub(super) fn qk_norm(
        &mut self,
        l: usize,
        qkv: Slot,
        purpose: Purpose,
    ) -> Result<(Slot, Option<SavedQkNorm>)> {
        let Some([q_weight, k_weight]) = self.layers[l].qk_norm else { return Ok((qkv, None)) };
        let Heads { query: heads, kv: kv_heads, .. } = self.plan.heads;
        let training = purpose == Purpose::Training;
        let out = if training { self.net.tokens_by(qkv.shape.cols()) } else { qkv };
        let rstd = self.net.b.activation([self.net.tokens(), heads + kv_heads], DType::F32);
        let (name, eps) = (self.name(l, "qk_norm"), self.plan.norm_eps);
        let (gain, q_scale) = (self.plan.gain, self.plan.qk_norm.unwrap_or(1.0));
        let op = QkNormFwd { out, rstd, inp: qkv, q_weight, k_weight, heads, kv_heads, eps, gain, q_scale };
        self.net.b.at(&name);
        self.net.b.push(op)?;
        self.net.b.name(name, out);
        Ok((out, training.then_some(SavedQkNorm { inp: qkv, rstd })))
    }

    /// The gradient of the normalised becomes that of what the projection gave, in place.
    pub(super) fn qk_norm_bwd(&mut self, l: usize, saved: Option<SavedQkNorm>, d_qkv: Slot) -> Result<()> {
        let (Some([q_weight, k_weight]), Some(SavedQkNorm { inp, rstd })) = (self.layers[l].qk_norm, saved)
        else {
            return Ok(());
        };
        let Heads { query: heads, kv: kv_heads, .. } = self.plan.heads;
        let [(d_q_weight, accum), (d_k_weight, _)] =
            [q_weight, k_weight].map(|weight| self.net.grad_of(weight));
        let name = self.name(l, "qk_norm");
        self.net.b.name_grad(&name, d_qkv);
        self.net.b.at(name);
        self.net.b.push(QkNormBwd {
            d_qkv,
            d_q_weight,
            d_k_weight,
            inp,
            rstd,
            q_weight,
            k_weight,
            heads,
            kv_heads,
            accum,
            gain: self.plan.gain,
            q_scale: self.plan.qk_norm.unwrap_or(1.0),
        })?;
        Ok(())
    }
}
