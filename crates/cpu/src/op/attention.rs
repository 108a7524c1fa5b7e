//! Causal attention on packed queries, keys and values: (B, T, W) with W = (NH + 2·NKV)·HD.

use super::Ctx;
use crate::kernel::attention::{Backward, Drops, Forward, Heads, Kept, Reach};
use crate::memory::Span;
use ironhorse_core::eager::{AttentionShape, Strides};
use ironhorse_core::op::{
    AttentionBwd, AttentionCached, AttentionDropoutBwd, AttentionDropoutFwd, AttentionFwd, AttentionMask,
    check_cache_rows, check_positions,
};
use ironhorse_core::{DropMask, DropSite, Error, Operands, Result, Slot};

/// Tokens whose keys and values a task stores in the cache.
const STORED: usize = 16;
/// Heads of tokens in a task, at most.
const MOST_UNITS: usize = 16;

/// Sizes and strides of an attention whose output is `out` (B, T, C).
fn shape(out: Slot, heads: usize, kv_heads: usize, operands: Operands) -> Heads {
    let &[batch, seq, width] = out.shape.dims() else {
        unreachable!("`Op::check` asks for three dimensions")
    };
    let head_dim = width / heads;
    let packed = (heads + 2 * kv_heads) * head_dim;
    let [qkv, out] =
        [packed, width].map(|position| Strides { batch: seq * position, head: head_dim, position });
    let sizes = AttentionShape {
        batch,
        heads,
        kv_heads,
        q_len: seq,
        kv_len: seq,
        head_dim,
        scale: f64::from(1.0 / (head_dim as f32).sqrt()),
        causal: true,
        q: qkv,
        k: qkv,
        v: qkv,
        out,
    };
    Heads(sizes, operands)
}

/// What products round their operands to. Where a text is read in pieces its bits depend on nothing else, so nothing is rounded there.
fn operands(ctx: &Ctx<'_>) -> Operands {
    if ctx.apart { Operands::F32 } else { ctx.operands }
}

/// Queries, keys and values in a packed tensor.
fn unpacked(qkv: Span<f32>, s: &Heads) -> [Span<f32>; 3] {
    let AttentionShape { heads, kv_heads, head_dim, .. } = s.0;
    [0, heads, heads + kv_heads].map(|before| qkv.part((before * head_dim).min(qkv.len())..qkv.len()))
}

pub fn attention_fwd(ctx: &mut Ctx<'_>, op: &AttentionFwd) -> Result<()> {
    forward(ctx, op, None)
}

pub fn attention_bwd(ctx: &mut Ctx<'_>, op: &AttentionBwd) -> Result<()> {
    backward(ctx, op, None)
}

pub fn attention_dropout_fwd(ctx: &mut Ctx<'_>, op: &AttentionDropoutFwd) -> Result<()> {
    let drops = drops(ctx, op.drop, op.out);
    forward(ctx, &op.attention(), Some(drops))
}

pub fn attention_dropout_bwd(ctx: &mut Ctx<'_>, op: &AttentionDropoutBwd) -> Result<()> {
    let drops = drops(ctx, op.drop, op.out);
    backward(ctx, &op.attention(), Some(drops))
}

/// The dropout of the probabilities (B, NH, T, T) in this step.
fn drops(ctx: &Ctx<'_>, drop: DropSite, out: Slot) -> Drops {
    let seq = out.shape.dims().get(1).copied().unwrap_or(0);
    let mask = DropMask::new(drop, ctx.scalars, seq);
    Drops { mask, threshold: drop.rate.threshold(), scale: drop.rate.scale() }
}

/// The keys that queries reach in this step.
fn reach(ctx: &Ctx<'_>, mask: &AttentionMask) -> Result<Reach> {
    let positions = mask.positions.map(|slot| ctx.i32(slot)).transpose()?;
    if let (Some(positions), Some(slot)) = (positions, mask.positions) {
        // SAFETY: nothing writes the positions while the op runs.
        check_positions(unsafe { positions.all() }, slot.shape.cols())?;
    }
    // SAFETY: checked, and nothing writes them while the op runs.
    Ok(unsafe { Reach::new(positions, mask) })
}

fn forward(ctx: &mut Ctx<'_>, op: &AttentionFwd, drops: Option<Drops>) -> Result<()> {
    let (out, lse, qkv) = (ctx.f32(op.out)?, ctx.f32(op.lse)?, ctx.f32(op.qkv)?);
    let (shape, isa) = (shape(op.out, op.heads, op.kv_heads, operands(ctx)), ctx.isa);
    let ([q, k, v], reach) = (unpacked(qkv, &shape), reach(ctx, &op.mask)?);
    ctx.reserve_scratch(&shape);
    let (call, scratch) = (Forward { shape, q, k, v, out, lse, drops, reach }, &*ctx.scratch);
    ctx.chunks(shape.0.batch * op.heads * shape.tiles(), 1, |task, worker| {
        // SAFETY: the team runs one task at a time per worker; tasks own disjoint rows of `out` and `lse`, which share no
        // memory with `qkv` (`Op::check`).
        unsafe { call.tile(isa, &mut scratch.get(worker).attention, task.start) }
    })
}

fn backward(ctx: &mut Ctx<'_>, op: &AttentionBwd, drops: Option<Drops>) -> Result<()> {
    let (d_qkv, d_out, qkv) = (ctx.f32(op.d_qkv)?, ctx.f32(op.d_out)?, ctx.f32(op.qkv)?);
    let (out, lse) = (ctx.f32(op.out)?, ctx.f32(op.lse)?);
    let (shape, isa) = (shape(op.out, op.heads, op.kv_heads, operands(ctx)), ctx.isa);
    let ([q, k, v], [d_q, d_k, d_v]) = (unpacked(qkv, &shape), unpacked(d_qkv, &shape));
    let reach = reach(ctx, &op.mask)?;
    ctx.reserve_scratch(&shape);
    let call = Backward { from: Forward { shape, q, k, v, out, lse, drops, reach }, d_out, d_q, d_k, d_v };
    let own = ctx.floats(call.own_elements());
    let scratch = &*ctx.scratch;
    ctx.chunks(shape.0.batch * op.heads, 1, |task, worker| {
        // SAFETY: the team runs one task at a time per worker; a task owns its head of the gradients and of `own`, which
        // share no memory with anything read (`Op::check`).
        unsafe { call.head(isa, &mut scratch.get(worker).attention, own, task.start) }
    })?;
    if own.is_empty() {
        return Ok(());
    }
    // SAFETY: all heads are done.
    ctx.done(unsafe { call.gather(&ctx.split(), own) })
}

/// New tokens against keys and values that are kept: generation.
pub fn attention_cached(ctx: &mut Ctx<'_>, op: &AttentionCached) -> Result<()> {
    let (out, qkv) = (ctx.f32(op.out)?, ctx.f32(op.qkv)?);
    let (keys, values) = (ctx.f32(op.keys)?, ctx.f32(op.values)?);
    let &[_, context, width] = op.keys.shape.dims() else { return Ok(()) };
    let tokens = op.out.shape.rows();
    let places = Places::new(ctx, op)?;
    let (packed, isa) = (shape(op.out, op.heads, op.kv_heads, Operands::F32), ctx.isa);
    let [q, k, v] = unpacked(qkv, &packed);
    let cache = Strides { batch: context * width, head: packed.0.head_dim, position: width };
    for scratch in ctx.scratch.iter_mut() {
        let scores = Kept::most_scores([context, op.heads], packed.share());
        scratch.query.reserve(scores, op.heads * packed.0.head_dim);
    }
    let (scratch, hd, share) = (&*ctx.scratch, packed.0.head_dim, packed.share());
    // All keys and values are there before the first query: a token may attend to another of its step.
    ctx.chunks(tokens, STORED, |tokens, _| {
        for token in tokens {
            let Some([row, position]) = places.of(token) else { continue };
            let to = (row * context + position) * width;
            for (kept, new, strides) in [(keys, k, packed.0.k), (values, v, packed.0.v)] {
                let from = packed.key(strides, token * op.heads, 0);
                // SAFETY: tokens have different places in the cache (`Places::new`), which shares no memory with `qkv`.
                unsafe { kept.get_mut(to..to + width).copy_from_slice(new.get(from..from + width)) };
            }
        }
    })?;
    let reached =
        |position: usize| (position + 1).saturating_sub(op.window.unwrap_or(usize::MAX))..position + 1;
    let kept = |token: usize| {
        let [row, position] = places.of(token)?;
        // A token before this one has the same keys: they are in the cache of the processor.
        let known = token > 0 && places.of(token - 1).is_some_and(|[before, _]| before == row);
        let [keys, values] = [keys, values].map(|kept| {
            let rows = reached(position);
            kept.part(row * cache.batch + rows.start * width..row * cache.batch + rows.end * width)
        });
        let [own_q, own_out] = [packed.0.q.batch, packed.0.out.batch].map(|step| token * step);
        Some(Kept {
            q: q.part(own_q..own_q + op.heads * hd),
            out: out.part(own_out..own_out + op.heads * hd),
            keys,
            values,
            width,
            head_dim: hd,
            share,
            scale: packed.0.scale as f32,
            fetches: !known,
        })
    };
    // A unit of work is a head of keys and values with all heads of queries it serves; one is less than a microsecond. Tasks of whole tokens, where there
    // are enough of them, read whole rows.
    let (units, threads) = (tokens * op.kv_heads, ctx.team.threads());
    let size = match units / (8 * threads) {
        _ if tokens >= 4 * threads => {
            op.kv_heads * (MOST_UNITS / op.kv_heads.max(1)).clamp(1, tokens / (4 * threads))
        }
        few => few.clamp(1, MOST_UNITS),
    };
    ctx.chunks(units, size, |task, worker| {
        let mut unit = task.start;
        while unit < task.end {
            let (token, first) = (unit / op.kv_heads, unit % op.kv_heads);
            let heads = first..op.kv_heads.min(first + task.end - unit);
            unit += heads.len();
            // The next token of this worker, also in its next task, as far as one can tell.
            let next = unit / op.kv_heads;
            let next =
                (next > token && next < tokens).then(|| kept(next)).flatten().filter(|next| next.fetches);
            // SAFETY: the team runs one task at a time per worker; a task owns its heads of `out`, and nothing writes the cache any more.
            unsafe {
                match kept(token) {
                    Some(kept) => {
                        let room = &mut scratch.get(worker).query;
                        kept.attend(isa, room, heads, next.map(|next| next.first_rows()));
                    }
                    None => {
                        let own = token * packed.0.out.batch;
                        out.get_mut(own + heads.start * share * hd..own + heads.end * share * hd).fill(0.0);
                    }
                }
            }
        }
    })
}

/// The places of a step's tokens in a cache.
enum Places<'a> {
    /// Each token is of the sequence of its number, all at one position.
    One(usize),
    /// The sequence and the position of each token.
    Each([&'a [i32]; 2]),
}

impl<'a> Places<'a> {
    /// Refuses positions that are not in the cache, and two tokens in one place.
    fn new(ctx: &Ctx<'a>, op: &AttentionCached) -> Result<Self> {
        let [sequences, context] = [0, 1].map(|i| op.keys.shape.dims()[i]);
        if let (Some(rows), Some(positions)) = (op.rows, op.positions) {
            // SAFETY: nothing writes them while the op runs.
            let [rows, positions] = unsafe { [ctx.i32(rows)?.all(), ctx.i32(positions)?.all()] };
            check_cache_rows(rows, positions, [sequences, context])?;
            return Ok(Self::Each([rows, positions]));
        }
        let position = ctx.scalars.position as usize;
        if position >= context {
            return Err(Error::Input(format!("position {position} is beyond the context of {context}")));
        }
        Ok(Self::One(position))
    }

    /// The sequence and the position of a token; `None` if it is not used.
    fn of(&self, token: usize) -> Option<[usize; 2]> {
        match self {
            Self::One(position) => Some([token, *position]),
            Self::Each([rows, positions]) => {
                (positions[token] >= 0).then(|| [rows[token] as usize, positions[token] as usize])
            }
        }
    }
}
