//! Embedding of tokens, with learned positions or without.

use super::lower::Lower;
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use crate::scatter::{ScatterMemory, SortedScatter};
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};
use ironhorse_core::{DType, Slot};

/// Warps of a forward block, a token each.
const WARPS: usize = 8;

fn fwd_spec(act: DType, factor: f32) -> Result<Spec> {
    Ok(Spec::act("embedding/fwd.cu", act)?.factor("FACTOR", factor))
}

fn bwd_spec([act, grad]: [DType; 2], vectors: bool, factor: f32) -> Result<Spec> {
    let spec = Spec::act_vectors("embedding/bwd.cu", act, vectors)?.typed("GRAD", grad)?;
    Ok(spec.factor("FACTOR", factor))
}

pub(crate) fn embedding_fwd(cx: &mut Lower<'_>, op: &EmbeddingFwd) -> Result<()> {
    let (rows, seq, width) = (op.tokens.numel(), op.tokens.shape.cols(), op.wte.shape.cols());
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let args = cx.optional_pointers(&[Some(op.out), Some(op.tokens), Some(op.wte), op.wpe, op.positions])?;
    let args = args.ptr(cx.scalars).ptr(cx.fault);
    let args = args.u32s([rows, seq, width, op.vocab, op.wpe.map_or(0, |wpe| wpe.shape.rows())]);
    let grid = Grid::linear(rows.div_ceil(WARPS), 32 * WARPS as u32);
    cx.launch(&fwd_spec(op.out.dtype, op.factor)?, "embedding_fwd", grid, args.u32(op.at_position.into()))
}

pub(crate) fn embedding_bwd(cx: &mut Lower<'_>, op: &EmbeddingBwd) -> Result<()> {
    let (n, width) = (op.tokens.numel(), op.d_wte.shape.cols());
    if width == 0 {
        return Ok(());
    }
    let whole = 16 / op.d_out.dtype.size();
    let vectors = width.is_multiple_of(whole);
    let spec = bwd_spec([op.d_out.dtype, op.d_wte.dtype], vectors, op.factor)?;
    let unit = if vectors { whole } else { 1 };
    let scatter = |cx: &mut Lower<'_>, indices: Slot, table: Slot, adds: bool| {
        let at = cx.ptr(table)?;
        if !adds {
            cx.zero(at, table.bytes());
        }
        if n == 0 {
            return Ok(());
        }
        let scatter = SortedScatter { n, width, limit: table.shape.rows() as u32, unit };
        let (indices, rows, scratch) = (cx.ptr(indices)?, cx.ptr(op.d_out)?, cx.scratch(scatter.scratch())?);
        let memory = ScatterMemory { indices, rows, table: at, fault: cx.fault, scratch };
        let mut steps = scatter.steps(&memory).into_iter();
        steps.try_for_each(|(name, grid, args)| cx.launch(&spec, name, grid, args))
    };
    match (op.d_wpe, op.positions) {
        (Some(d_wpe), Some(places)) => {
            let adds = cx.adds(op.accum);
            scatter(cx, places, d_wpe, adds)?;
        }
        (Some(d_wpe), None) => positions(cx, op, d_wpe, &spec, unit)?,
        (None, _) => {}
    }
    let adds = cx.adds(op.accum_wte);
    scatter(cx, op.tokens, op.d_wte, adds)
}

/// `d_wpe`.
fn positions(cx: &mut Lower<'_>, op: &EmbeddingBwd, d_wpe: Slot, spec: &Spec, unit: usize) -> Result<()> {
    let (seq, context, width) = (op.tokens.shape.cols(), d_wpe.shape.rows(), d_wpe.shape.cols());
    let batch = op.tokens.numel().checked_div(seq).unwrap_or(0);
    let args = cx.pointers(&[d_wpe, op.d_out])?.u32s([batch, seq, context, width]);
    let grid = Grid::linear((context * width).div_ceil(128 * unit), 128);
    cx.launch(spec, "embedding_bwd_positions", grid, args.u32(cx.adds(op.accum).into()))
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let mut specs = Vec::new();
    for factor in [1.0, 34.0] {
        specs.extend(Spec::all_types(|act| fwd_spec(act, factor)));
        for types in [[F32, F32], [BF16, BF16], [BF16, F32]] {
            specs.extend([false, true].into_iter().flat_map(|vectors| bwd_spec(types, vectors, factor)));
        }
    }
    specs
}
