//! The router of a mixture of experts.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::{RouterBwd, RouterFwd, RouterLoad};

/// `WARPS` of experts/router.cu, a token each.
const WARPS: usize = 8;
/// `LOAD_THREADS` of experts/router.cu.
const LOAD_THREADS: usize = 256;
/// The most blocks that sum probabilities.
const MOST_PARTIALS: usize = 256;

fn spec(logit: DType) -> Result<Spec> {
    Spec::new("experts/router.cu").typed("LOGIT", logit)
}

fn per_token(tokens: usize) -> Grid {
    Grid::linear(tokens.div_ceil(WARPS), 32 * WARPS as u32)
}

pub(crate) fn router_fwd(cx: &mut Lower<'_>, op: &RouterFwd) -> Result<()> {
    let (tokens, all, k) = (op.probs.shape.rows(), op.probs.shape.cols(), op.experts.shape.cols());
    if tokens == 0 {
        return Ok(());
    }
    let args = cx.pointers(&[op.probs, op.weights, op.experts, op.logits])?;
    let args = args.ptr(cx.fault).u32s([tokens, all, k]);
    cx.launch(&spec(op.logits.dtype)?, "router_fwd", per_token(tokens), args)
}

pub(crate) fn router_bwd(cx: &mut Lower<'_>, op: &RouterBwd) -> Result<()> {
    let (tokens, all, k) = (op.probs.shape.rows(), op.probs.shape.cols(), op.experts.shape.cols());
    if tokens == 0 {
        return Ok(());
    }
    let args = cx.pointers(&[op.d_logits, op.d_weights, op.probs, op.weights, op.experts, op.load])?;
    let args = args.ptr(cx.scalars).ptr(cx.fault).f32(op.alpha).u32s([tokens, all, k]);
    cx.launch(&spec(op.d_logits.dtype)?, "router_bwd", per_token(tokens), args)
}

pub(crate) fn router_load(cx: &mut Lower<'_>, op: &RouterLoad) -> Result<()> {
    let (tokens, all) = (op.probs.shape.rows(), op.probs.shape.cols());
    let (probs, offsets) = (cx.ptr(op.probs)?, cx.ptr(op.offsets)?);
    let (chunk, blocks) = chunks(op.probs.numel());
    let partials = cx.scratch(2 * blocks.max(1) * size_of::<f64>())?;
    let spec = spec(DType::F32)?; // reads no logits
    if blocks > 0 {
        let args = Args::new().ptr(partials).ptr(probs).ptr(offsets);
        let args = args.u64s([op.probs.numel(), chunk]).u32s([tokens, all]).u32(op.entropy.is_some().into());
        cx.launch(&spec, "router_load_parts", Grid::linear(blocks, LOAD_THREADS as u32), args)?;
    }
    let args = cx.optional_pointers(&[Some(op.load), Some(op.aux), op.entropy])?;
    let args = args.ptr(partials).ptr(offsets).ptr(cx.scalars).u32(blocks as u32).f32(op.alpha);
    let args = args.u32s([tokens, all]).u32(cx.adds(op.accum).into());
    cx.launch(&spec, "router_load", Grid::linear(1, LOAD_THREADS as u32), args)
}

/// Elements of a block and how many blocks there are.
fn chunks(elements: usize) -> (usize, usize) {
    let chunk = elements.div_ceil(MOST_PARTIALS).next_multiple_of(LOAD_THREADS).max(4 * LOAD_THREADS);
    (chunk, elements.div_ceil(chunk))
}

pub(super) fn specs() -> Vec<Spec> {
    Spec::all_types(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_probabilities() {
        assert_eq!(chunks(0).1, 0);
        assert_eq!(chunks(1), (1024, 1));
        assert_eq!(chunks(16_384 * 16), (1024, 256));
        for elements in [1023, 1025, 262_145, 10_000_019] {
            let (chunk, blocks) = chunks(elements);
            assert!(blocks <= MOST_PARTIALS && (blocks - 1) * chunk < elements && blocks * chunk >= elements);
        }
    }
}
