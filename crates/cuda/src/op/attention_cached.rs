//! Attention of one new position over a cache.

use super::elementwise::ctype;
use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::AttentionCached;

/// `THREADS` of attention/cached.cu.
const THREADS: usize = 512;

fn spec(act: DType, vectors: bool) -> Result<Spec> {
    let spec = Spec::new("attention/cached.cu").define("ACT", ctype(act)?);
    Ok(if vectors { spec.define("VECTORS", 1) } else { spec })
}

pub(crate) fn attention_cached(cx: &mut Lower<'_>, op: &AttentionCached) -> Result<()> {
    let [batch, context, width] = *op.keys.shape.dims() else { return Ok(()) };
    if batch * context * width == 0 {
        return Ok(());
    }
    let head_dim = width / op.kv_heads;
    let whole = 16 / op.out.dtype.size();
    // Heads are contiguous, so all of them are aligned if one head is a multiple of a vector.
    let vectors = head_dim.is_multiple_of(whole);
    let per_thread = if vectors { whole } else { 1 };
    let scores = cx.scratch(batch * op.heads * context * size_of::<f32>())?;
    let mut args = cx.pointers(&[op.out, op.keys, op.values, op.qkv])?.ptr(scores).ptr(cx.scalars);
    for size in [op.heads, op.kv_heads, head_dim, context] {
        args = args.u32(size as u32);
    }
    let shared = (head_dim.next_multiple_of(4) + THREADS * per_thread) * size_of::<f32>();
    let grid = Grid::linear(batch * op.heads, THREADS as u32).shared(shared);
    cx.launch(&spec(op.out.dtype, vectors)?, "attention_cached", grid, args)
}

pub(super) fn specs() -> Vec<Spec> {
    let types = [DType::F32, DType::BF16];
    types
        .into_iter()
        .flat_map(|act| [false, true].into_iter().filter_map(move |v| spec(act, v).ok()))
        .collect()
}
