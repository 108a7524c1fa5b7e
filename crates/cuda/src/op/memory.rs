//! Fills and copies.

use super::elementwise::per_vector;
use super::lower::Lower;
use crate::Result;
use crate::args::Args;
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::{CopySlot, Fill};

fn spec(dtype: DType) -> Result<Spec> {
    Spec::act("common/fill.cu", dtype)
}

pub(crate) fn fill(cx: &mut Lower<'_>, op: &Fill) -> Result<()> {
    let (n, bytes) = (op.out.numel(), op.out.bytes());
    if n == 0 {
        return Ok(());
    }
    let out = cx.ptr(op.out)?;
    if op.value.to_bits() == 0 {
        cx.zero(out, bytes);
        return Ok(());
    }
    let grid = per_vector(&op.out);
    cx.launch(&spec(op.out.dtype)?, "fill", grid, Args::new().ptr(out).u64(n as u64).f32(op.value))
}

pub(crate) fn copy(cx: &mut Lower<'_>, op: &CopySlot) -> Result<()> {
    if op.out.numel() > 0 {
        let (to, from) = (cx.ptr(op.out)?, cx.ptr(op.inp)?);
        cx.copy(to, from, op.out.bytes());
    }
    Ok(())
}

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_types(spec)
}
