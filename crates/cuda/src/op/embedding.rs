//! Embedding of tokens, with learned positions or without.

use super::elementwise::ctype;
use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use crate::scatter::{ScatterMemory, SortedScatter};
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};
use ironhorse_core::{DType, Slot};

/// Warps of a forward block, a token each.
const WARPS: usize = 8;

fn fwd_spec(act: DType) -> Result<Spec> {
    Ok(Spec::new("embedding/fwd.cu").define("ACT", ctype(act)?))
}

fn bwd_spec(act: DType, grad: DType, vectors: bool) -> Result<Spec> {
    let spec = Spec::new("embedding/bwd.cu").define("ACT", ctype(act)?).define("GRAD", ctype(grad)?);
    Ok(if vectors { spec.define("VECTORS", 1) } else { spec })
}

pub(crate) fn embedding_fwd(cx: &mut Lower<'_>, op: &EmbeddingFwd) -> Result<()> {
    let (rows, seq, width) = (op.tokens.numel(), op.tokens.shape.cols(), op.wte.shape.cols());
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let mut args = cx
        .pointers(&[op.out, op.tokens, op.wte])?
        .ptr(cx.opt(op.wpe)?.unwrap_or(0))
        .ptr(cx.scalars)
        .ptr(cx.fault);
    for size in [rows, seq, width, op.vocab, op.wpe.map_or(0, |wpe| wpe.shape.rows())] {
        args = args.u32(size as u32);
    }
    let grid = Grid::linear(rows.div_ceil(WARPS), 32 * WARPS as u32);
    cx.launch(&fwd_spec(op.out.dtype)?, "embedding_fwd", grid, args.u32(op.at_position.into()))
}

pub(crate) fn embedding_bwd(cx: &mut Lower<'_>, op: &EmbeddingBwd) -> Result<()> {
    let (n, width) = (op.tokens.numel(), op.d_wte.shape.cols());
    if width == 0 {
        return Ok(());
    }
    let whole = 16 / op.d_out.dtype.size();
    let vectors = width.is_multiple_of(whole);
    let spec = bwd_spec(op.d_out.dtype, op.d_wte.dtype, vectors)?;
    let unit = if vectors { whole } else { 1 };
    if let Some(d_wpe) = op.d_wpe {
        positions(cx, op, d_wpe, &spec, unit)?;
    }
    let table = cx.ptr(op.d_wte)?;
    if !cx.adds(op.accum_wte) {
        cx.zero(table, op.d_wte.bytes());
    }
    if n == 0 {
        return Ok(());
    }
    let scatter = SortedScatter { n, width, limit: op.d_wte.shape.rows() as u32, unit };
    let (indices, rows, scratch) = (cx.ptr(op.tokens)?, cx.ptr(op.d_out)?, cx.scratch(scatter.scratch())?);
    for (name, grid, args) in scatter.steps(&ScatterMemory { indices, rows, table, fault: cx.fault, scratch })
    {
        cx.launch(&spec, name, grid, args)?;
    }
    Ok(())
}

/// `d_wpe`.
fn positions(cx: &mut Lower<'_>, op: &EmbeddingBwd, d_wpe: Slot, spec: &Spec, unit: usize) -> Result<()> {
    let (seq, context, width) = (op.tokens.shape.cols(), d_wpe.shape.rows(), d_wpe.shape.cols());
    let batch = op.tokens.numel().checked_div(seq).unwrap_or(0);
    let mut args = cx.pointers(&[d_wpe, op.d_out])?;
    for size in [batch, seq, context, width] {
        args = args.u32(size as u32);
    }
    let args = args.u32(cx.adds(op.accum).into());
    let function = cx.kernel(spec, "embedding_bwd_positions")?;
    let grid = Grid::linear((context * width).div_ceil(128 * unit), 128);
    cx.launch_function("embedding_bwd_positions", function, grid, args);
    Ok(())
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let mut specs: Vec<Spec> = [F32, BF16].into_iter().filter_map(|act| fwd_spec(act).ok()).collect();
    for (act, grad) in [(F32, F32), (BF16, BF16), (BF16, F32)] {
        specs.extend([false, true].into_iter().filter_map(|vectors| bwd_spec(act, grad, vectors).ok()));
    }
    specs
}
