//! Attention of one new position to keys and values that are kept: generation.

use super::{Heads, Part};
use crate::math::{dot, exp_flush, fma, max_inline, sum_inline};
use crate::multiversion;
use crate::op::Ctx;
use ironhorse_core::op::AttentionCached;
use ironhorse_core::{Error, Result};

multiversion! {
    /// s = exp(s·scale - max); returns the sum.
    fn softmax_row<const FMA: bool>(s: &mut [f32], scale: f32) -> f32 {
        let max = max_inline(s) * scale;
        for s in s.iter_mut() {
            *s = exp_flush::<FMA>(fma::<FMA>(*s, scale, -max));
        }
        sum_inline(s)
    }

    /// out += factor·x
    fn axpy<const FMA: bool>(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = fma::<FMA>(factor, *x, *out);
        }
    }
}

pub fn attention_cached(ctx: &mut Ctx<'_>, op: &AttentionCached) -> Result<()> {
    let (out, qkv) = (ctx.f32(op.out)?, ctx.f32(op.qkv)?);
    let (keys, values) = (ctx.f32(op.keys)?, ctx.f32(op.values)?);
    let (&[batch, context, width], &[_, _, out_width]) = (op.keys.shape.dims(), op.out.shape.dims()) else {
        return Ok(());
    };
    let position = ctx.scalars.position as usize;
    if position >= context {
        return Err(Error::Input(format!("position {position} is beyond the context of {context}")));
    }
    let (g, isa) = (Heads::new(1, out_width, op.heads, op.kv_heads), ctx.isa);
    ctx.reserve_scratch(context, 0);
    let scratch = &*ctx.scratch;
    // A task is a head of keys and values with all heads of queries it serves.
    ctx.chunks(batch * op.kv_heads, 1, |task, worker| {
        let (b, h, hd) = (task.start / g.kv_heads, task.start % g.kv_heads, g.head_dim);
        let row = |position: usize| {
            let first = (b * context + position) * width + h * hd;
            first..first + hd
        };
        let part = |part, head| {
            let first = g.qkv_at(part, head, 0);
            first..first + hd
        };
        // SAFETY: the team runs one task at a time per worker; a task owns its head of the cache and its heads of `out`,
        // and the mutable pieces of the cache are gone before it is read.
        unsafe {
            let first = g.group(task.start).start;
            keys.get_mut(row(position)).copy_from_slice(qkv.get(part(Part::K, first)));
            values.get_mut(row(position)).copy_from_slice(qkv.get(part(Part::V, first)));
            let scores = &mut scratch.get(worker).tiles[..=position];
            for head in g.group(task.start) {
                let q = qkv.get(part(Part::Q, head));
                for (t, score) in scores.iter_mut().enumerate() {
                    *score = dot(isa, q, keys.get(row(t)));
                }
                let sum = softmax_row(isa, scores, g.scale);
                let at = g.out_at(head, 0);
                let o = out.get_mut(at..at + hd);
                o.fill(0.0);
                for (t, score) in scores.iter().enumerate() {
                    axpy(isa, o, *score / sum, values.get(row(t)));
                }
            }
        }
    })
}
