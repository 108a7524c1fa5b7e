//! Fills and copies.

use super::Ctx;
use ironhorse_core::op::{CopySlot, Fill};
use ironhorse_core::{DType, Result};

const CHUNK: usize = 65536;

pub fn fill(ctx: &mut Ctx<'_>, op: &Fill) -> Result<()> {
    let (out, value) = (ctx.f32(op.out)?, op.value);
    // SAFETY: tasks have disjoint ranges of the only slot.
    ctx.chunks(out.len(), CHUNK, |r, _| unsafe { out.get_mut(r).fill(value) })
}

pub fn copy(ctx: &mut Ctx<'_>, op: &CopySlot) -> Result<()> {
    if op.out.dtype == DType::I32 {
        let (out, inp) = (ctx.i32(op.out)?, ctx.i32(op.inp)?);
        // SAFETY: tasks have disjoint ranges; the two slots share no memory.
        return ctx.chunks(out.len(), CHUNK, |r, _| unsafe {
            out.get_mut(r.clone()).copy_from_slice(inp.get(r));
        });
    }
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    // SAFETY: as above.
    ctx.chunks(out.len(), CHUNK, |r, _| unsafe {
        out.get_mut(r.clone()).copy_from_slice(inp.get(r));
    })
}
