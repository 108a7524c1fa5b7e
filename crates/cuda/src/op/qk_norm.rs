//! The norm of each head of queries and keys.

use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{Gain, QkHeads, QkNormBwd, QkNormFwd};
use ironhorse_core::{DType, Slot};

/// `THREADS` of norm/qk.cu.
const THREADS: usize = 256;
/// Lanes that may share a head, one vector each.
const LANES: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// The most partial rows of column sums for heads of any width.
const MOST_PARTIALS: usize = 512;

/// Lanes that hold a head of `dim`; `None` where a warp takes it element by element.
fn lanes(act: DType, dim: usize) -> Option<usize> {
    let whole = 16 / act.size();
    LANES.into_iter().find(|lanes| dim.is_multiple_of(whole) && dim <= lanes * whole)
}

fn spec([act, weight, grad]: [DType; 3], lanes: Option<usize>, (gain, q_scale): (Gain, f32)) -> Result<Spec> {
    let spec = Spec::act("norm/qk.cu", act)?.typed("WEIGHT", weight)?.typed("GRAD", grad)?;
    let spec = spec.gain(gain).factor("Q_SCALE", q_scale);
    Ok(lanes.into_iter().fold(spec, |spec, lanes| spec.define("HEAD_LANES", lanes as u32)))
}

/// Lanes of a head if all these slots can be read in vectors.
fn chosen(cx: &Lower<'_>, parts: &QkHeads, slots: &[Slot]) -> Result<Option<usize>> {
    let aligned = cx.are_aligned(slots)?;
    Ok(lanes(parts.qkv.dtype, parts.dim()).filter(|_| aligned))
}

pub(crate) fn qk_norm_fwd(cx: &mut Lower<'_>, op: &QkNormFwd) -> Result<()> {
    let parts = op.parts();
    // values stay where they are
    let per_token = if op.out == op.inp { parts.normed_heads() } else { parts.all_heads() };
    let count = parts.tokens() * per_token;
    if count == 0 {
        return Ok(());
    }
    let lanes = chosen(cx, &parts, &[op.out, op.inp, op.q_weight, op.k_weight])?;
    let args = cx.pointers(&[op.out, op.rstd, op.inp, op.q_weight, op.k_weight])?;
    let args = args.f32(op.eps).u64(count as u64).u32s([per_token, op.heads, op.kv_heads, parts.dim()]);
    let grid = Grid::linear(count.div_ceil(THREADS / lanes.unwrap_or(32)), THREADS as u32);
    let types = [op.inp.dtype, op.q_weight.dtype, DType::F32]; // writes no gradient
    cx.launch(&spec(types, lanes, (op.gain, op.q_scale))?, "qk_norm_fwd", grid, args)
}

pub(crate) fn qk_norm_bwd(cx: &mut Lower<'_>, op: &QkNormBwd) -> Result<()> {
    let parts = op.parts();
    let lanes = chosen(cx, &parts, &[op.d_qkv, op.inp, op.q_weight, op.k_weight])?;
    let spec = spec([op.inp.dtype, op.q_weight.dtype, op.d_q_weight.dtype], lanes, (op.gain, op.q_scale))?;
    let (partials, count) = match lanes {
        _ if parts.tokens() == 0 => (0, 0),
        Some(lanes) => in_vectors(cx, op, &spec, lanes)?,
        None => any(cx, op, &spec)?,
    };
    let args = cx.pointers(&[op.d_q_weight, op.d_k_weight])?.ptr(partials);
    let args = args.u32s([count, parts.dim()]).u32(cx.adds(op.accum).into());
    cx.launch(&spec, "qk_norm_bwd_sums", Grid::linear((2 * parts.dim()).div_ceil(32), 1024), args)
}

/// Memory for `count` partial rows, and the arguments of the kernels that work on heads.
fn partials(cx: &mut Lower<'_>, op: &QkNormBwd, count: usize) -> Result<(u64, Args)> {
    let parts = op.parts();
    let partials = cx.scratch(count * 2 * parts.dim() * size_of::<f32>())?;
    let args = cx.pointers(&[op.d_qkv])?.ptr(partials);
    let args = cx.append(args, &[op.inp, op.rstd, op.q_weight, op.k_weight].map(Some))?;
    Ok((partials, args.u32s([parts.tokens(), op.heads, op.kv_heads, parts.dim()])))
}

/// Returns address and number of the partial rows.
fn in_vectors(cx: &mut Lower<'_>, op: &QkNormBwd, spec: &Spec, lanes: usize) -> Result<(u64, usize)> {
    let function = cx.kernel(spec, "qk_norm_bwd")?;
    // A block without heads would only write zeros.
    let most = (op.parts().tokens() * op.heads).div_ceil(THREADS / lanes);
    let count = most.min(function.resident(THREADS as u32, 0)?);
    let (partials, args) = partials(cx, op, count)?;
    cx.launch_function("qk_norm_bwd", function, Grid::linear(count, THREADS as u32), args);
    Ok((partials, count))
}

/// Returns address and number of the partial rows.
fn any(cx: &mut Lower<'_>, op: &QkNormBwd, spec: &Spec) -> Result<(u64, usize)> {
    let parts = op.parts();
    let chunk = parts.tokens().div_ceil(MOST_PARTIALS).max(16);
    let count = parts.tokens().div_ceil(chunk);
    let (partials, args) = partials(cx, op, count)?;
    let grid = Grid::plane(parts.dim().div_ceil(32), count, THREADS as u32);
    cx.launch(spec, "qk_norm_bwd_columns", grid, args.clone().u32(chunk as u32))?;
    let heads = parts.tokens() * parts.normed_heads();
    cx.launch(spec, "qk_norm_bwd_rows", Grid::linear(heads.div_ceil(THREADS / 32), THREADS as u32), args)?;
    Ok((partials, count))
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let types = [[F32; 3], [BF16; 3], [BF16, BF16, F32]];
    let mut specs = Vec::new();
    for factors in [(Gain::Weight, 1.0), (Gain::OnePlusWeight, 1.0), (Gain::OnePlusWeight, 0.875)] {
        for lanes in LANES.map(Some).into_iter().chain([None]) {
            specs.extend(types.into_iter().filter_map(|types| spec(types, lanes, factors).ok()));
        }
    }
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_whole_vectors_have_as_few_lanes_as_hold_them() {
        let bf16 = [8, 64, 80, 96, 128, 256].map(|dim| lanes(DType::BF16, dim));
        assert_eq!(bf16, [Some(1), Some(8), Some(16), Some(16), Some(16), Some(32)]);
        assert_eq!([4, 64, 128].map(|dim| lanes(DType::F32, dim)), [Some(1), Some(16), Some(32)]);
        assert_eq!([lanes(DType::BF16, 60), lanes(DType::BF16, 264), lanes(DType::F32, 132)], [None; 3]);
    }
}
