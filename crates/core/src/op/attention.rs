//! Causal self-attention over packed queries, keys and values; softmax runs online, no T×T buffer exists.

use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

/// Per head: `out = softmax(q·kᵀ/√HD, causal)·v`. `qkv` packs q, k, v of all heads one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionFwd {
    /// (B,T,C), heads side by side
    pub out: Slot,
    /// (B,NH,T) f32, log of the sum of exponentials of each row: all the backward needs of the softmax
    pub lse: Slot,
    /// (B,T,3C)
    pub qkv: Slot,
    /// NH
    pub heads: usize,
}

impl OpSpec for AttentionFwd {
    const NAME: &'static str = "attention_fwd";
    slots!(Write out, Write lse, Read qkv);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("qkv", &self.qkv), ("out", &self.out)])?;
        check_packed(&c, ("qkv", &self.qkv), ("out", &self.out), self.heads)?;
        check_lse(&c, &self.lse, &self.out, self.heads)
    }

    fn flops(&self) -> u64 {
        2 * triangle_flops(&self.out)
    }
}

/// Gradients of [`AttentionFwd`], recomputing the probabilities from `lse`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionBwd {
    /// (B,T,3C)
    pub d_qkv: Slot,
    /// (B,T,C)
    pub d_out: Slot,
    /// (B,T,3C)
    pub qkv: Slot,
    /// (B,T,C), the forward's result
    pub out: Slot,
    /// (B,NH,T) f32
    pub lse: Slot,
    /// NH
    pub heads: usize,
}

impl OpSpec for AttentionBwd {
    const NAME: &'static str = "attention_bwd";
    slots!(Write d_qkv, Read d_out, Read qkv, Read out, Read lse);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        let all = [("qkv", &self.qkv), ("d_qkv", &self.d_qkv), ("d_out", &self.d_out), ("out", &self.out)];
        c.same_float(&all)?;
        check_packed(&c, ("qkv", &self.qkv), ("out", &self.out), self.heads)?;
        c.shape("d_qkv", &self.d_qkv, self.qkv.shape)?;
        c.shape("d_out", &self.d_out, self.out.shape)?;
        check_lse(&c, &self.lse, &self.out, self.heads)
    }

    fn flops(&self) -> u64 {
        5 * triangle_flops(&self.out)
    }
}

/// Attention of one new position (the scalar `position`) over a cache of all earlier ones, which it extends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionCached {
    /// (B,1,C)
    pub out: Slot,
    /// (B,maxT,C)
    pub keys: Slot,
    /// (B,maxT,C)
    pub values: Slot,
    /// (B,1,3C)
    pub qkv: Slot,
    /// NH
    pub heads: usize,
}

impl OpSpec for AttentionCached {
    const NAME: &'static str = "attention_cached";
    slots!(Write out, Update keys, Update values, Read qkv);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        let all = [("qkv", &self.qkv), ("keys", &self.keys), ("values", &self.values), ("out", &self.out)];
        c.same_float(&all)?;
        check_packed(&c, ("qkv", &self.qkv), ("out", &self.out), self.heads)?;
        let [batch, seq, width] = *self.out.shape.dims() else {
            return c.fail(format!("`out` is {}, expected [B, 1, C]", self.out.shape));
        };
        if seq != 1 {
            return c.fail(format!("`out` is {}, expected one position", self.out.shape));
        }
        let context = self.keys.shape.dims().get(1).copied().unwrap_or(0);
        c.shape("keys", &self.keys, [batch, context, width])?;
        c.shape("values", &self.values, [batch, context, width])
    }

    fn flops(&self) -> u64 {
        4 * self.keys.numel() as u64
    }
}

fn check_packed(c: &Checker, qkv: (&str, &Slot), out: (&str, &Slot), heads: usize) -> Result<()> {
    let [batch, seq, width] = *out.1.shape.dims() else {
        return c.fail(format!("`{}` is {}, expected [B, T, C]", out.0, out.1.shape));
    };
    if heads == 0 || width % heads != 0 {
        return c.fail(format!("{heads} heads do not divide the width {width}"));
    }
    c.shape(qkv.0, qkv.1, [batch, seq, 3 * width])
}

fn check_lse(c: &Checker, lse: &Slot, out: &Slot, heads: usize) -> Result<()> {
    c.all_f32(&[("lse", lse)])?;
    c.numel("lse", lse, out.shape.rows() * heads)
}

/// One product over the causal triangle of all heads.
fn triangle_flops(out: &Slot) -> u64 {
    let seq = out.shape.dims().get(1).copied().unwrap_or(1) as u64;
    out.numel() as u64 * (seq + 1)
}
