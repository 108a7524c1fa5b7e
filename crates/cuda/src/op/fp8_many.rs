//! Ops in a row that look at weights, or round them to 8 bits, in one launch: a weight alone is too small to keep a GPU busy.

use super::fp8::{THREADS, TILE, format_name};
use super::fp8_joined::is_plain;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{Amax, Op, Quantize};
use ironhorse_core::{DType, Fp8, Node, Pool, Slot};

/// Bytes that a thread of `amax_many` reads: `DEEP` vectors of fp8/many.cu.
const DEEP: usize = 8 * 16;

/// Ops of one kind in a row, none of which needs another one's result.
enum Row<T> {
    /// It has no neighbours, or one of them needs what another one writes.
    Alone,
    /// The last of them does the work of all.
    Later,
    /// These are all of them, the first at this place of the program.
    All(Vec<T>, usize),
}

impl<T> Row<T> {
    /// The row that the op being lowered is in; `kind` says whether an op can be part of it.
    fn of(cx: &Lower<'_>, kind: impl Fn(&Op) -> Option<T>) -> Self {
        let nodes = cx.program.nodes();
        let is_part = |at: &usize| cx.range.contains(at) && kind(&nodes[*at].op).is_some();
        let first = (0..cx.op).rev().take_while(is_part).last().unwrap_or(cx.op);
        let last = (cx.op + 1..nodes.len()).take_while(is_part).last().unwrap_or(cx.op);
        let row = &nodes[first..=last];
        if first == last || !are_independent(row) {
            Self::Alone
        } else if cx.op < last {
            Self::Later
        } else {
            Self::All(row.iter().filter_map(|node| kind(&node.op)).collect(), first)
        }
    }
}

/// Whether nothing that one of the ops writes is read or written by another one.
fn are_independent(nodes: &[Node]) -> bool {
    let mut uses: Vec<_> = nodes.iter().flat_map(|node| node.op.args()).collect();
    uses.sort_by_key(|arg| (arg.slot.pool.index(), arg.slot.offset));
    uses.chunk_by(|a, b| a.slot.pool == b.slot.pool).all(|pool| {
        let (mut used, mut written) = (0, 0); // the ends of what comes before
        pool.iter().all(|arg| {
            let apart = arg.slot.offset >= if arg.access.writes() { used } else { written };
            used = used.max(arg.slot.end());
            if arg.access.writes() {
                written = written.max(arg.slot.end());
            }
            apart
        })
    })
}

fn is_weight(slot: Slot, dtype: DType) -> bool {
    slot.pool == Pool::Params && slot.dtype == dtype && slot.numel() > 0
}

/// Computes the largest elements of all tensors of a row, if the op is in one.
pub(super) fn amax(cx: &mut Lower<'_>, op: &Amax) -> Result<bool> {
    let dtype = op.inp.dtype;
    let row = Row::of(cx, |op| match *op {
        Op::Amax(op) if is_weight(op.inp, dtype) => Some(op),
        _ => None,
    });
    let (ops, first) = match row {
        Row::Alone => return Ok(false),
        Row::Later => return Ok(true),
        Row::All(ops, first) => (ops, first),
    };
    let (mut words, mut blocks) = (Vec::new(), 0);
    for op in &ops {
        words.extend([cx.ptr(op.amax)?, cx.ptr(op.inp)?, op.inp.numel() as u64, blocks as u64]);
        blocks += op.inp.bytes().div_ceil(DEEP * THREADS as usize);
    }
    let args = table(cx, &words, ops.len())?;
    let spec = spec(dtype, Fp8::E4M3)?;
    let clear = Grid::linear(ops.len().div_ceil(THREADS as usize), THREADS);
    let before = cx.out.len();
    cx.launch(&spec, "amax_clear", clear, args.clone())?;
    cx.launch(&spec, "amax_many", Grid::linear(blocks, THREADS), args)?;
    cx.out[before..].iter_mut().for_each(|launch| launch.first = first);
    Ok(true)
}

/// Rounds all tensors of a row to 8 bits, if the op is in one.
pub(super) fn quantize(cx: &mut Lower<'_>, op: &Quantize) -> Result<bool> {
    let (dtype, format) = (op.inp.dtype, op.format);
    let row = Row::of(cx, |op| match *op {
        Op::Quantize(op) => {
            let same = is_weight(op.inp, dtype) && op.format == format;
            (same && is_plain(&op) && op.seen.is_none()).then_some(op)
        }
        _ => None,
    });
    let (ops, first) = match row {
        Row::Alone => return Ok(false),
        Row::Later => return Ok(true),
        Row::All(ops, first) => (ops, first),
    };
    let pair = |low: usize, high: usize| (low as u64) | (high as u64) << 32;
    let (mut words, mut blocks) = (Vec::new(), 0);
    for op in &ops {
        let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
        let [across, down] = [cols, rows].map(|side| side.div_ceil(TILE));
        words.extend([cx.optional(op.out)?, cx.optional(op.out_t)?, cx.ptr(op.inverse)?, cx.ptr(op.amax)?]);
        words.extend([cx.ptr(op.inp)?, pair(rows, cols), pair(blocks, across)]);
        words.push(u64::from(op.margin as u32) | u64::from(op.unknown as u32) << 32);
        blocks += across * down;
    }
    let args = table(cx, &words, ops.len())?;
    let before = cx.out.len();
    cx.launch(&spec(dtype, format)?, "quantize_many", Grid::linear(blocks, THREADS), args)?;
    cx.out[before..].iter_mut().for_each(|launch| launch.first = first);
    Ok(true)
}

/// The arguments that give a kernel of fp8/many.cu its tensors.
fn table(cx: &mut Lower<'_>, words: &[u64], count: usize) -> Result<Args> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Ok(Args::new().ptr(cx.upload(&bytes)?).u32(count as u32))
}

fn spec(act: DType, format: Fp8) -> Result<Spec> {
    Ok(Spec::act("fp8/many.cu", act)?.define("FORMAT", format_name(format)))
}

pub(super) fn specs() -> Vec<Spec> {
    let types = [DType::F32, DType::BF16];
    types.into_iter().flat_map(|act| Fp8::ALL.map(|format| spec(act, format))).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::op::Accum;
    use ironhorse_core::{Builder, Precision};

    #[test]
    fn ops_that_share_what_one_writes_are_not_done_at_once() {
        let mut b = Builder::with_precision(Precision::BF16);
        let weights = ["v", "w"].map(|name| b.param(name, [16, 32], false));
        let largest = b.io("largest", [2, 1], DType::F32);
        let [first, second] = [0, 1].map(|row| largest.rows(row..row + 1).view([1]));
        for (amax, inp) in
            [(first, weights[0]), (second, weights[1]), (first, weights[1]), (second, weights[1])]
        {
            b.push(Amax { amax, inp }).unwrap();
        }
        let program = b.finish().unwrap();
        let nodes = program.nodes();
        assert!(are_independent(&nodes[..2]), "neighbours in memory");
        assert!(are_independent(&nodes[1..3]), "both read one weight");
        assert!(!are_independent(&nodes[..3]), "two write one number");
        assert!(!are_independent(&nodes[1..]), "two write one number");
    }

    #[test]
    fn an_op_that_reads_what_another_writes_waits_for_it() {
        let mut b = Builder::with_precision(Precision::BF16);
        let inp = b.param("w", [16, 32], false);
        let [amax, inverse] = ["amax", "inverse"].map(|name| b.io(name, [1], DType::F32));
        let out = Some(b.io("q", [16, 32], DType::F8(Fp8::E4M3)));
        let largest = Amax { amax, inp };
        let rounded = Quantize {
            out,
            out_t: None,
            inverse,
            d_bias: None,
            inp,
            pre: None,
            amax,
            seen: None,
            act: None,
            format: Fp8::E4M3,
            margin: 0,
            unknown: 0,
            accum: Accum::Write,
        };
        let ops: [Op; 3] = [largest.into(), rounded.into(), largest.into()];
        ops.into_iter().for_each(|op| b.push(op).unwrap());
        let program = b.finish().unwrap();
        assert!(!are_independent(&program.nodes()[..2]), "the maximum comes first");
        assert!(!are_independent(&program.nodes()[1..]), "the next maximum comes last");
    }
}
