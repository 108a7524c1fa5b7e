//! RMS normalisation of every head of packed queries and keys. Seen as rows of HD, a token is NH rows of queries, NKV of keys
//! and NKV of values.

use super::Ctx;
use super::columns::column_sums;
use super::norm::shifted;
use crate::element::Whole;
use crate::kernel::norm::{column_sums as add_row, rms_apply, rms_d_x, rms_statistic};
use crate::memory::Span;
use ironhorse_core::Result;
use ironhorse_core::op::{Gain, QkHeads, QkNormBwd, QkNormFwd};

/// What the heads of queries and of keys are multiplied by: the weights where they are, or what `gain` and `q_scale` make of them
/// in memory that is valid until the next call.
fn factors(ctx: &mut Ctx<'_>, parts: &QkHeads, gain: Gain, q_scale: f32) -> Result<[Span<f32>; 2]> {
    let weights = [ctx.f32(parts.q_weight)?, ctx.f32(parts.k_weight)?];
    if gain == Gain::Weight && q_scale == 1.0 {
        return Ok(weights);
    }
    let both = ctx.floats(2 * parts.dim());
    let factors = [both.row(0, parts.dim()), both.row(1, parts.dim())];
    for ((factors, weight), scale) in factors.iter().zip(weights).zip([q_scale, 1.0]) {
        // SAFETY: nothing else uses this memory, and nothing writes the weights while the op runs.
        unsafe {
            shifted(factors.all_mut(), gain.offset(), weight.all());
            factors.all_mut().iter_mut().for_each(|factor| *factor *= scale);
        }
    }
    Ok(factors)
}

pub fn qk_norm_fwd(ctx: &mut Ctx<'_>, op: &QkNormFwd) -> Result<()> {
    let (out, rstd, inp) = (ctx.f32(op.out)?, ctx.f32(op.rstd)?, ctx.f32(op.inp)?);
    let weights = factors(ctx, &op.parts(), op.gain, op.q_scale)?;
    let (parts, isa, in_place) = (op.parts(), ctx.isa, op.out == op.inp);
    let (dim, normed, all) = (parts.dim(), parts.normed_heads(), parts.all_heads());
    ctx.rows(parts.tokens(), all * dim, |token| {
        for head in 0..normed {
            let [x, y] = [inp, out].map(|x| x.row(token * all + head, dim));
            // SAFETY: tokens have one task each, and `out` shares memory with nothing but an equal `inp` (`Op::check`); the
            // slice ends before `y` is written.
            let stat = unsafe { rms_statistic::<f32, Whole>(isa, x.all(), op.eps) };
            // SAFETY: tokens have one task each, and nothing else uses their statistics.
            unsafe { rstd.set(token * normed + head, stat) };
            rms_apply(isa, [x, weights[usize::from(head >= parts.heads)]], y, stat);
        }
        if !in_place {
            let values = (token * all + normed) * dim..(token + 1) * all * dim;
            // SAFETY: tokens have one task each, and `out` is not `inp`, so it shares no memory with it (`Op::check`).
            unsafe { out.get_mut(values.clone()).copy_from_slice(inp.get(values)) };
        }
    })
}

/// What the sums of one weight's gradient are made of.
struct Terms {
    d: Span<f32>,
    x: Span<f32>,
    rstd: Span<f32>,
}

impl Terms {
    /// Writes or adds `Σ d·x̂·scale` over `count` heads of every token, of which `first` is the first.
    fn sum(
        &self,
        ctx: &Ctx<'_>,
        d_weight: Span<f32>,
        parts: &QkHeads,
        (first, count, scale): (usize, usize, f32),
        adds: bool,
    ) -> Result<()> {
        let (isa, dim, normed, all) = (ctx.isa, parts.dim(), parts.normed_heads(), parts.all_heads());
        column_sums(ctx, [d_weight], parts.tokens() * count, adds, |row, part, [dots]| {
            let (token, head) = (row / count, first + row % count);
            // SAFETY: nothing writes the inputs before all sums are done.
            unsafe {
                let [d, x] = [self.d, self.x].map(|x| x.row(token * all + head, dim).get(part.clone()));
                let rstd = self.rstd.value(token * normed + head);
                add_row(isa, dots, &mut [], d, x, [0.0, rstd * scale]);
            }
        })
    }
}

pub fn qk_norm_bwd(ctx: &mut Ctx<'_>, op: &QkNormBwd) -> Result<()> {
    let terms = Terms { d: ctx.f32(op.d_qkv)?, x: ctx.f32(op.inp)?, rstd: ctx.f32(op.rstd)? };
    let weights = factors(ctx, &op.parts(), op.gain, op.q_scale)?;
    let (parts, isa, adds) = (op.parts(), ctx.isa, op.accum.adds(ctx.scalars.added()));
    let (dim, normed, all) = (parts.dim(), parts.normed_heads(), parts.all_heads());
    // before the gradient of the result is replaced by that of the input
    terms.sum(ctx, ctx.f32(op.d_q_weight)?, &parts, (0, parts.heads, op.q_scale), adds)?;
    terms.sum(ctx, ctx.f32(op.d_k_weight)?, &parts, (parts.heads, parts.kv_heads, 1.0), adds)?;
    ctx.rows(parts.tokens(), all * dim, |token| {
        for head in 0..normed {
            let [d, x] = [terms.d, terms.x].map(|x| x.row(token * all + head, dim));
            // SAFETY: nothing writes the statistics.
            let rstd = unsafe { terms.rstd.value(token * normed + head) };
            let weight = weights[usize::from(head >= parts.heads)];
            rms_d_x::<f32, Whole>(isa, [d, x, weight], d, rstd, false);
        }
    })
}
