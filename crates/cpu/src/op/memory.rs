//! Fills and copies.

use super::Ctx;
use crate::memory::{Span, Word};
use ironhorse_core::op::{CopySlot, Fill};
use ironhorse_core::{DType, Result};

const CHUNK: usize = 65536;

pub fn fill(ctx: &mut Ctx<'_>, op: &Fill) -> Result<()> {
    let (out, value) = (ctx.f32(op.out)?, op.value);
    // SAFETY: tasks have disjoint ranges of the only slot.
    ctx.chunks(out.len(), CHUNK, |r, _| unsafe { out.get_mut(r).fill(value) })
}

pub fn copy(ctx: &mut Ctx<'_>, op: &CopySlot) -> Result<()> {
    match op.out.dtype {
        DType::I32 => copy_all(ctx, ctx.i32(op.out)?, ctx.i32(op.inp)?),
        _ => copy_all(ctx, ctx.f32(op.out)?, ctx.f32(op.inp)?),
    }
}

fn copy_all<T: Word>(ctx: &Ctx<'_>, out: Span<T>, inp: Span<T>) -> Result<()> {
    // SAFETY: tasks have disjoint ranges; the two slots share no memory (`Op::check`).
    ctx.chunks(out.len(), CHUNK, |r, _| unsafe { out.get_mut(r.clone()).copy_from_slice(inp.get(r)) })
}
