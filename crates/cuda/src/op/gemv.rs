//! Linear layers of a few rows, as in decoding: their time is that of reading the weights, which product/gemv.cu does while
//! earlier kernels run.

use super::lower::Lower;
use super::norm::{ResidualNorm, is_narrow};
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::DType;
use ironhorse_core::op::{Act, Gain, LinearFwd};

/// The most rows that [`linear_few`] takes.
const MOST_ROWS: usize = 8;
/// Bytes of weights in a block's shared memory: four blocks fit on a multiprocessor.
const HELD_BYTES: usize = 52 << 10;
/// Blocks that keep all multiprocessors busy. Not the device's own number, so that every device computes the same.
const LEAST_BLOCKS: usize = 192;
/// Bytes of weights that a block asks for at a time. Memory is busy with four blocks of them per multiprocessor; with twice as much, or
/// with all at once, its queues are longer than it needs, and half as much leaves it idle.
const GROUP_BYTES: usize = 12_800;
/// Threads of a warp.
const WARP: u32 = 32;
/// Sums of a block at most: one per lane.
const MOST_SUMS: usize = 32;
/// Rows of the weight per block at most.
const MOST_OUTS: usize = 16;

/// Bytes of a weight from which on a norm ahead is computed by the blocks of the layer. Each of them computes it, which is
/// longer than a launch unless there is much to read meanwhile.
const LEAST_JOINED: usize = 12 << 20;
/// Bytes of a weight whose reading takes much longer than what its kernel waits for: blocks ask for all they hold at once.
const LARGE: usize = 32 << 20;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    act: DType,
    width: usize,
    /// A power of two, at least the rows of the input.
    rows: usize,
    /// Rows of the weight per block: a power of two.
    outs: usize,
    /// Groups in which a block copies its part of the weight, if one after the other.
    groups: usize,
}

impl Shape {
    /// `None` if there are too many rows, or if they are too long or not a multiple of a vector. `paced` if the device copies by
    /// itself: then in groups, for one row and unless the weight is large.
    fn choose(act: DType, [rows, width, outs]: [usize; 3], paced: bool) -> Option<Self> {
        let bytes = width * act.size();
        let takes = (1..=MOST_ROWS).contains(&rows) && outs > 0;
        if !takes || bytes == 0 || bytes > HELD_BYTES || !bytes.is_multiple_of(16) {
            return None;
        }
        let rows = rows.next_power_of_two();
        let most = (MOST_SUMS / rows).min(MOST_OUTS).min(HELD_BYTES / bytes);
        let mut each = 1 << most.ilog2();
        while each > 1 && outs.div_ceil(each) < LEAST_BLOCKS {
            each /= 2;
        }
        let groups =
            if paced && rows == 1 && outs * bytes < LARGE { (each * bytes).div_ceil(GROUP_BYTES) } else { 1 };
        Some(Self { act, width, rows, outs: each, groups })
    }

    fn grid(&self, outs: usize) -> Grid {
        let held = self.outs * self.width * self.act.size();
        let mut grid = Grid::row_blocks(outs.div_ceil(self.outs), self.act, self.width).shared(held);
        if self.groups > 1 {
            grid.block[0] += WARP;
        }
        grid
    }

    fn spec(&self, activation: Option<Act>) -> Result<Spec> {
        let spec = Spec::act("product/gemv.cu", self.act)?
            .define("WIDTH", self.width as u32)
            .define("ROWS", self.rows as u32)
            .define("OUTS", self.outs as u32);
        let spec = if self.groups > 1 { spec.define("GROUPS", self.groups as u32) } else { spec };
        Ok(match activation {
            Some(act) => spec.define("ACTIVATION", act.name()),
            None => spec,
        })
    }
}

/// Lowers a layer of few rows; `false` if the shape is left to the library.
pub(super) fn linear_few(cx: &mut Lower<'_>, op: &LinearFwd) -> Result<bool> {
    let (rows, width, outs) = (op.inp.shape.rows(), op.inp.shape.cols(), op.weight.shape.rows());
    let act = op.out.dtype;
    let same_type = op.inp.dtype == act && op.weight.dtype == act;
    let paced = cx.device.info.has_bulk_copies();
    let Some(shape) = Shape::choose(act, [rows, width, outs], paced).filter(|_| same_type) else {
        return Ok(false);
    };
    let (weight, inp) = (cx.ptr(op.weight)?, cx.ptr(op.inp)?);
    if !(weight | inp).is_multiple_of(16) {
        return Ok(false);
    }
    tracing::debug!(
        "{rows} rows of {width} to {outs} {act}: gemv, {} rows of the weight per block",
        shape.outs
    );
    let bias = cx.optional(op.bias)?;
    let args = cx.optional_pointers(&[Some(op.out), op.pre.map(|pre| pre.slot)])?;
    let spec = shape.spec(op.pre.map(|pre| pre.act))?;
    let mut early: Vec<_> = op.bias.into_iter().chain([op.weight]).collect();
    let (kernel, args) = if let Some(norm) = norm_ahead(cx, op) {
        cx.out.pop(); // the norm's launch
        let args = cx.append(args.ptr(weight).ptr(bias).u32(outs as u32), &norm.slots())?;
        early.extend(norm.bias.into_iter().chain([norm.weight]));
        (with_norm(spec, act, norm.bias.is_some(), norm.gain)?.kernel("gemv_norm"), args.f32(norm.eps))
    } else {
        let args = args.ptr(inp).ptr(weight).ptr(bias);
        (spec.kernel("gemv"), args.u32(rows as u32).u32(outs as u32))
    };
    cx.launch_chained(&kernel, shape.grid(outs), args, &early)?;
    Ok(true)
}

/// The norm of one row whose result is the layer's input, if its launch is the last one and the layer's blocks can do its
/// work: while one of them stores the results of the norm and all store those of the layer, the others still read `a` and
/// `b`.
fn norm_ahead(cx: &Lower<'_>, op: &LinearFwd) -> Option<ResidualNorm> {
    let index = cx.op.checked_sub(1).filter(|&index| cx.out.last().is_some_and(|last| last.op == index))?;
    let norm = ResidualNorm::of(&cx.program.nodes()[index].op)?;
    let one_row =
        op.inp.shape.rows() == 1 && norm.has_row_blocks() && is_narrow(norm.a.dtype, norm.a.shape.cols());
    let same = norm.out == op.inp && norm.weight.dtype == op.out.dtype;
    let written = [norm.residual, norm.out, norm.rstd, op.out].into_iter();
    let mut written = written.chain(norm.mean).chain(op.pre.map(|pre| pre.slot));
    let apart = written.all(|to| ![norm.a, norm.b].iter().any(|from| from.overlaps(&to)));
    (one_row && same && apart && op.weight.bytes() >= LEAST_JOINED).then_some(norm)
}

fn with_norm(spec: Spec, act: DType, centred: bool, gain: Gain) -> Result<Spec> {
    let spec = spec.typed("WEIGHT", act)?.define("CENTRED", if centred { "true" } else { "false" });
    Ok(spec.gain(gain))
}

/// The specialisations of GPT-2, of a 7B and of 8Bs, of an odd size, and of a long row copied in groups.
pub(super) fn specs() -> Vec<Spec> {
    let gelu = Some(Act::Gelu);
    let gpt2 = [(768, 2304), (3072, 768), (1600, 4800), (1600, 1600), (6400, 1600)];
    let large = [(4096, 6144), (11008, 4096), (12288, 4096), (14336, 4096)];
    let plain = gpt2.into_iter().chain(large).chain([(8, 24), (11008, 1024)]);
    let layers = plain.map(|sizes| (sizes, None)).chain([((768, 3072), gelu), ((1600, 6400), gelu)]);
    let mut specs = Vec::new();
    for ((width, outs), activation) in layers {
        for (act, rows) in
            [DType::F32, DType::BF16].into_iter().flat_map(|act| [1, 2, 4, 8].map(|r| (act, r)))
        {
            let shape = Shape::choose(act, [rows, width, outs], true);
            let spec = shape.and_then(|shape| shape.spec(activation).ok());
            let joined = rows == 1 && outs * width * act.size() >= LEAST_JOINED && is_narrow(act, width);
            if let Some(spec) = spec.clone().filter(|_| joined) {
                specs.extend(
                    [(true, Gain::Weight), (false, Gain::Weight), (false, Gain::OnePlusWeight)]
                        .into_iter()
                        .filter_map(|(centred, gain)| with_norm(spec.clone(), act, centred, gain).ok()),
                );
            }
            specs.extend(spec);
        }
    }
    specs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_as_many_rows_as_fit() {
        let outs = |act, sizes| Shape::choose(act, sizes, true).map(|shape| (shape.rows, shape.outs));
        assert_eq!(outs(DType::BF16, [1, 1600, 4800]), Some((1, 16)));
        assert_eq!(outs(DType::BF16, [1, 1600, 1600]), Some((1, 8)), "more blocks");
        assert_eq!(outs(DType::BF16, [1, 6400, 1600]), Some((1, 4)), "51,200 bytes");
        assert_eq!(outs(DType::F32, [3, 1600, 4800]), Some((4, 8)), "32 sums");
        assert_eq!(outs(DType::BF16, [8, 1600, 4800]), Some((8, 4)));
        assert_eq!(outs(DType::BF16, [1, 8, 3]), Some((1, 1)));
        for refused in [[9, 64, 64], [0, 64, 64], [1, 12, 64], [1, 0, 64], [1, 64, 0], [1, 1 << 20, 64]] {
            assert_eq!(outs(DType::BF16, refused), None, "{refused:?}");
        }
    }

    #[test]
    fn weights_are_copied_in_groups_where_the_device_copies() {
        let shape = |sizes, paced| Shape::choose(DType::BF16, sizes, paced).unwrap();
        let groups = |sizes| shape(sizes, true).groups;
        assert_eq!(
            [[1, 1600, 4800], [1, 1600, 1600], [1, 6400, 1600], [8, 1600, 4800]].map(groups),
            [4, 2, 4, 1]
        );
        assert_eq!(groups([1, 1600, 50257]), 1, "large");
        assert_eq!(shape([1, 1600, 4800], false).groups, 1);
        assert_eq!(shape([1, 1600, 4800], true).grid(4800).block[0], 224 + 32, "a warp that copies");
        assert_eq!(shape([1, 1600, 4800], false).grid(4800).block[0], 224);
    }
}
