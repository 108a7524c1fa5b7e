//! Attention, over a batch or a cache.

use super::Blocks;
use crate::Result;
use ironhorse_core::op::{
    AttentionBwd, AttentionCached, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd, AttentionMask,
};
use ironhorse_core::{DType, DropSite, Slot};

/// An attention's result with what its backward needs.
#[derive(Clone, Copy)]
pub(in crate::model) struct Attention {
    /// (B,T,W)
    pub qkv: Slot,
    /// (B,T,NH·HD)
    pub out: Slot,
    /// (B,NH,T) f32; `None` when decoding.
    lse: Option<Slot>,
    heads: Heads,
    /// The dropout of the probabilities.
    drop: Option<DropSite>,
    mask: AttentionMask,
}

/// How a layer attends.
#[derive(Clone, Copy)]
pub(in crate::model) struct Attending {
    /// Over a cache of so many positions, when decoding.
    pub cached: Option<usize>,
    /// Dropout of the probabilities.
    pub drop: Option<DropSite>,
    /// How many keys a query reaches at most.
    pub window: Option<usize>,
}

/// Heads of queries and of keys and values, and how wide each is.
#[derive(Clone, Copy)]
pub(in crate::model) struct Heads {
    pub query: usize,
    pub kv: usize,
    pub dim: usize,
}

impl Blocks {
    /// Causal attention over the batch or, when decoding, over a cache. A window that all positions fit in is none.
    pub fn attention(
        &mut self,
        name: &str,
        qkv: Slot,
        heads: Heads,
        Attending { cached, drop, window }: Attending,
    ) -> Result<Attention> {
        let Heads { query, kv: kv_heads, dim } = heads;
        let Some(context) = cached else {
            let out = self.tokens_by(query * dim);
            let lse = self.b.activation([self.batch.0, query, self.batch.1], DType::F32);
            let window = window.filter(|&window| window < self.batch.1);
            let mask = AttentionMask { positions: self.positions, window };
            self.b.at(name);
            match drop {
                Some(drop) => {
                    self.b.push(AttentionDropoutFwd { out, lse, qkv, heads: query, kv_heads, mask, drop })?;
                }
                None => self.b.push(AttentionFwd { out, lse, qkv, heads: query, kv_heads, mask })?,
            }
            self.b.name(name, out);
            return Ok(Attention { qkv, out, lse: Some(lse), heads, drop, mask });
        };
        let (batch, dtype) = (self.sequences.map_or(self.batch.0, |(count, _)| count), self.dtype());
        let [keys, values] = [(); 2].map(|()| self.b.cache([batch, context, kv_heads * dim], dtype));
        let (rows, positions) = (self.sequences.map(|(_, rows)| rows), self.positions);
        let out = self.tokens_by(query * dim);
        self.b.at(name);
        let window = window.filter(|&window| window < context);
        self.b.push(AttentionCached {
            out,
            keys,
            values,
            qkv,
            rows,
            positions,
            heads: query,
            kv_heads,
            window,
        })?;
        Ok(Attention { qkv, out, lse: None, heads, drop: None, mask: AttentionMask::CAUSAL })
    }

    /// Gives the gradient of q, k and v.
    pub fn attention_bwd(&mut self, name: &str, saved: &Attention, d_out: Slot) -> Result<Slot> {
        let Attention { qkv, out, lse, heads, drop, mask } = *saved;
        let no_lse = || ironhorse_core::Error::Program(format!("{name}: a backward without a forward"));
        let (d_qkv, lse) = (self.tokens_by(qkv.shape.cols()), lse.ok_or_else(no_lse)?);
        self.b.at(name);
        let (heads, kv_heads) = (heads.query, heads.kv);
        match drop {
            Some(drop) => {
                let bwd = AttentionDropoutBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask, drop };
                self.b.push(bwd)?;
            }
            None => self.b.push(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask })?,
        }
        Ok(d_qkv)
    }
}
