//! Global gradient norm and AdamW over all parameters.

use super::collective::share_pieces;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::squares::Sums;
use ironhorse_core::op::{AdamW, GradNorm};
use ironhorse_core::ranks::PIECE_ELEMENTS;
use ironhorse_core::{DType, Param, Pool, Precision, Slot, Update};
use std::ops::Range;

/// `THREADS` of optimizer/grad_norm.cu.
const NORM_THREADS: u32 = 512;
/// Sums that a block of `grad_norm_left` adds up.
const LEFT_SUMS: usize = 8192;
/// Elements of a thread of optimizer/adamw.cu.
const ADAM_ELEMENTS: usize = 8;
/// Elements that share a bit of the decay map. Parameters start at multiples of this (64 bytes at most 4 wide).
const STRIDE: usize = 16;

fn norm_spec(grad: DType) -> Result<Spec> {
    Spec::new("optimizer/grad_norm.cu").typed("GRAD", grad)
}

fn adamw_spec(p: Precision) -> Result<Spec> {
    // The 16 bits that complete a bf16 weight are not a type that kernels compute with.
    let master = if p.has_residual() { "i16" } else { "float" };
    let spec = Spec::new("optimizer/adamw.cu").typed("PARAM", p.weights)?.typed("GRAD", p.grads)?;
    spec.define("MASTER", master).typed("MOMENT", p.moments)
}

/// Elements and threads of a block of optimizer/adamw.cu: fewer where state has 16 bits.
fn adamw_block(p: Precision) -> (usize, u32) {
    let threads = if p.has_residual() || p.moments.size() == 2 { 128 } else { 256 };
    (ADAM_ELEMENTS * threads, threads as u32)
}

/// The element types that an update meets.
fn precision_of(op: &AdamW) -> Precision {
    let master = op.master.map_or(DType::F32, |slot| slot.dtype);
    let (weights, grads, moments) = (op.params.dtype, op.grads.dtype, op.moment1.dtype);
    Precision { weights, grads, master, moments, ..Precision::F32 }
}

pub(crate) fn grad_norm(cx: &mut Lower<'_>, op: &GradNorm) -> Result<()> {
    if op.slices.is_none() {
        let summed = cx.summed_of(op.grads);
        if !summed.is_empty() {
            return norm_of_sums(cx, op, &summed);
        }
    }
    let (n, spec) = (op.grads.numel(), norm_spec(op.grads.dtype)?);
    let count = n.div_ceil(PIECE_ELEMENTS).max(1);
    let parts = cx.scratch(count * size_of::<f64>())?;
    let (grads, size) = (cx.ptr(op.grads)?, op.grads.dtype.size());
    let own = op.slices.map_or_else(|| std::iter::once(0..n).collect(), |slices| slices.parts(n));
    for part in own {
        let (first, pieces) = (part.start / PIECE_ELEMENTS, part.len().div_ceil(PIECE_ELEMENTS));
        if pieces == 0 && op.slices.is_some() {
            continue;
        }
        let args = Args::new()
            .ptr(parts + (first * size_of::<f64>()) as u64)
            .ptr(grads + (part.start * size) as u64)
            .u64(part.len() as u64);
        cx.launch(&spec, "grad_norm_parts", Grid::linear(pieces.max(1), NORM_THREADS), args)?;
    }
    if let Some(slices) = op.slices {
        share_pieces(cx, slices, n, parts)?;
    }
    norm_total(cx, op, parts, count)
}

/// The norm and `halt` from the sums of all pieces.
fn norm_total(cx: &mut Lower<'_>, op: &GradNorm, parts: u64, count: usize) -> Result<()> {
    let args = cx.pointers(&[op.norm, op.halt, op.loss])?;
    let args = args.ptr(cx.fault).ptr(parts).u32(count as u32);
    cx.launch(&norm_spec(op.grads.dtype)?, "grad_norm_total", Grid::linear(1, NORM_THREADS), args)
}

/// The norm where ops have left sums of squares of some gradients, which are not read again.
fn norm_of_sums(cx: &mut Lower<'_>, op: &GradNorm, summed: &[(Slot, Sums)]) -> Result<()> {
    let spec = norm_spec(op.grads.dtype)?;
    let size = op.grads.dtype.size();
    let places: Vec<Range<usize>> = summed
        .iter()
        .map(|(slot, _)| (slot.offset - op.grads.offset) / size..(slot.end() - op.grads.offset) / size)
        .collect();
    let gaps = between(op.grads.numel(), &places);
    let rest = gaps.into_iter().flat_map(|gap| stretches((gap.start as u64, 1), gap.len(), PIECE_ELEMENTS));
    let left = summed.iter().flat_map(|(_, sums)| stretches((sums.at, 8), sums.count, LEFT_SUMS));
    let (rest, left): (Vec<_>, Vec<_>) = (rest.collect(), left.collect());
    let count = rest.len() + left.len();
    let parts = cx.scratch(count * size_of::<f64>())?;
    if !rest.is_empty() {
        let args = Args::new().ptr(parts).ptr(cx.ptr(op.grads)?).ptr(cx.upload(&rest.concat())?);
        cx.launch(&spec, "grad_norm_rest", Grid::linear(rest.len(), NORM_THREADS), args)?;
    }
    let behind = parts + (rest.len() * size_of::<f64>()) as u64;
    let args = Args::new().ptr(behind).ptr(cx.upload(&left.concat())?);
    cx.launch(&spec, "grad_norm_left", Grid::linear(left.len(), NORM_THREADS), args)?;
    norm_total(cx, op, parts, count)
}

/// `Stretch` of optimizer/grad_norm.cu for each block: the first of at most `most` numbers, which are `step` apart, and how many there are.
fn stretches((first, step): (u64, u64), count: usize, most: usize) -> impl Iterator<Item = [u8; 16]> {
    (0..count).step_by(most).map(move |at| {
        let words = [first + at as u64 * step, most.min(count - at) as u64];
        let mut bytes = [0; 16];
        bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        bytes
    })
}

/// What lies between ranges of 0..n that ascend and do not overlap.
fn between(n: usize, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let ends = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    let starts = ranges.iter().map(|range| range.start).chain([n]);
    ends.zip(starts).map(|(end, start)| end..start).filter(|gap| !gap.is_empty()).collect()
}

pub(crate) fn adamw(cx: &mut Lower<'_>, op: &AdamW) -> Result<()> {
    let n = op.params.numel();
    if n == 0 {
        return Ok(());
    }
    if op.first > 0 || n < cx.program.flat(Pool::Params).numel() {
        return adamw_slice(cx, op);
    }
    let decays = cx.upload(&decay_map(cx.program.params(), op.params.offset, n))?;
    let master = op.master.unwrap_or(op.params);
    let slots = [op.params, master, op.grads, op.moment1, op.moment2, op.norm, op.halt];
    let args = cx.pointers(&slots)?.ptr(decays).ptr(cx.scalars);
    let p = precision_of(op);
    let (block, threads) = adamw_block(p);
    let tiles = tiles(cx.program.params(), block);
    if let Some(tiles) = tiles {
        let count = tiles.len() / 3;
        if count == 0 {
            return Ok(());
        }
        let bytes: Vec<u8> = tiles.iter().flat_map(|word| word.to_le_bytes()).collect();
        let args = args.ptr(cx.upload(&bytes)?);
        return cx.launch(&adamw_spec(p)?, "adamw_tiles", Grid::linear(count, threads), args);
    }
    let args = args.u64(n as u64);
    cx.launch(&adamw_spec(p)?, "adamw", Grid::linear(n.div_ceil(block), threads), args)
}

/// AdamW on a slice. Elements keep their numbers in the whole pools, which decide how they are rounded: the kernel gets the
/// addresses at which the pools would begin.
fn adamw_slice(cx: &mut Lower<'_>, op: &AdamW) -> Result<()> {
    let (first, n) = (op.first, op.params.numel());
    let decays = cx.upload(&decay_map(cx.program.params(), 0, first + n))?;
    let mut args = Args::new();
    for slot in [op.params, op.master.unwrap_or(op.params), op.grads, op.moment1, op.moment2] {
        args = args.ptr(cx.ptr(slot)?.wrapping_sub((first * slot.dtype.size()) as u64));
    }
    let args = cx.append(args, &[Some(op.norm), Some(op.halt)])?.ptr(decays).ptr(cx.scalars);
    let p = precision_of(op);
    let (block, threads) = adamw_block(p);
    let tiles = (first..first + n).step_by(block).flat_map(|at| [at, (at + block).min(first + n), 0]);
    let bytes: Vec<u8> = tiles.flat_map(|word| (word as u64).to_le_bytes()).collect();
    let args = args.ptr(cx.upload(&bytes)?);
    cx.launch(&adamw_spec(p)?, "adamw_tiles", Grid::linear(n.div_ceil(block), threads), args)
}

/// `Tile` of optimizer/adamw.cu for each `block` elements, if another optimizer has some of the parameters: first and last element,
/// and how many elements before it have no second moment. Neighbours make one stretch, gaps between them included.
fn tiles(params: &[Param], block: usize) -> Option<Vec<u64>> {
    let mut stretches: Vec<(std::ops::Range<usize>, usize)> = Vec::new();
    for param in params {
        let Update::AdamW { skipped } = param.update else { continue };
        let elements = param.elements();
        match stretches.last_mut().filter(|(_, of_last)| *of_last == skipped) {
            Some((stretch, _)) => stretch.end = elements.end,
            None => stretches.push((elements, skipped)),
        }
    }
    let alone = params.iter().all(|param| matches!(param.update, Update::AdamW { .. }));
    let blocks = |(stretch, skipped): (std::ops::Range<usize>, usize)| {
        let end = stretch.end;
        stretch.step_by(block).flat_map(move |first| [first, (first + block).min(end), skipped])
    };
    (!alone).then(|| stretches.into_iter().flat_map(blocks).map(|word| word as u64).collect())
}

/// A bit for each [`STRIDE`] elements of the flat pool, set where weight decay applies; whole 32-bit words.
fn decay_map(params: &[Param], offset: usize, n: usize) -> Vec<u8> {
    let mut map = vec![0_u8; n.div_ceil(32 * STRIDE) * 4];
    for param in params.iter().filter(|param| param.decay) {
        let size = param.weight.dtype.size();
        let first = param.weight.offset.saturating_sub(offset) / size;
        let end = (first + param.weight.numel()).min(n);
        for bit in first / STRIDE..end.div_ceil(STRIDE) {
            // Little endian: bit 32·w + b of the words is bit b % 8 of byte b / 8 of word w.
            if let Some(byte) = map.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
    }
    map
}

pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Spec::all_types(norm_spec);
    let (narrow, wide) = (Precision::BF16, Precision::BF16_F32_GRADS);
    let mut all = vec![Precision::F32, Precision { grads: DType::BF16, ..Precision::F32 }];
    for p in [narrow, wide] {
        all.extend([p, p.with_residual(), p.with_bf16_moments(), p.with_residual().with_bf16_moments()]);
    }
    specs.extend(all.into_iter().flat_map(adamw_spec));
    specs
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::Shape;

    #[test]
    fn what_ops_have_not_summed_is_read_in_pieces() {
        assert_eq!(between(100, &[10..30, 30..40, 64..100]), [0..10, 40..64]);
        assert_eq!(between(100, &[0..60, 60..100]), []);
        let words =
            |bytes: [u8; 16]| bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let of = |first, count, most| stretches(first, count, most).map(words).collect::<Vec<Vec<u64>>>();
        assert_eq!(of((40, 1), 24, 10), [[40, 10], [50, 10], [60, 4]]);
        assert_eq!(of((1 << 40, 8), 20, 10), [[1 << 40, 10], [(1 << 40) + 80, 10]]);
        assert_eq!(of((7, 1), 0, 10), [[0; 2]; 0]);
    }

    #[test]
    fn only_strides_of_decayed_parameters_are_marked() {
        let param = |first: usize, n: usize, decay: bool| Param {
            name: String::new(),
            decay,
            weight: Slot { pool: Pool::Params, offset: first * 4, shape: Shape::new([n]), dtype: DType::F32 },
            precision: Precision::default(),
            update: Update::AdamW { skipped: 0 },
        };
        let params = [param(0, 5, true), param(16, 231, false), param(256, 17, true), param(640, 1, true)];
        let map = decay_map(&params, 0, 656);
        assert_eq!(map.len(), 8);
        let set = |bit: usize| map[bit / 8] >> (bit % 8) & 1 == 1;
        let marked: Vec<usize> = (0..64).filter(|&bit| set(bit)).collect();
        assert_eq!(marked, [0, 16, 17, 40]);
    }

    #[test]
    fn tiles_leave_out_what_another_optimizer_has() {
        let tiles_of = |shared: bool| {
            let mut b = ironhorse_core::Builder::new();
            b.param("a", [5000], true); // up to 5008 with its gap
            b.param("b", [7], false);
            if shared {
                b.muon_group([("w", [100, 10], 1)], true); // 5024 to 6032
            }
            b.param("c", [3], false);
            tiles(b.finish().unwrap().params(), 2048)
        };
        assert_eq!(tiles_of(false), None);
        let found = tiles_of(true).unwrap();
        let rows: Vec<&[u64]> = found.chunks(3).collect();
        assert_eq!(rows, [[0, 2048, 0], [2048, 4096, 0], [4096, 5015, 0], [6032, 6035, 1008]]);
    }
}
