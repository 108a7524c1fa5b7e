//! SwiGLU's backward together with the experts' product whose result it reads: experts/grouped_swiglu_bwd.cu, Hopper only.

use super::fp8_joined::{ahead, are_apart, is_read_later};
use super::grouped::{BOX, Groups, HOPPER_SHARED, Path, mapped, path_of};
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{Gate, GroupedLinearBwdInput, Op, SwigluBwd};

/// `STAGES` and `THREADS` of the file, and rows and columns of a tile.
const STAGES: usize = 5;
const THREADS: u32 = 384;
const TILE: usize = 128;

fn spec() -> Spec {
    Spec::new("experts/grouped_swiglu_bwd.cu")
}

/// Bytes of dynamic shared memory: stages, the two tiles of results, barriers, the offsets, and what is lost to start at a multiple
/// of 1024.
fn shared(experts: usize) -> usize {
    STAGES * ((32 << 10) + 16) + (64 << 10) + 2 * (experts + 1) * size_of::<u32>() + 1024
}

/// Computes the experts' product and SwiGLU's backward in one kernel, if the product was the last launch and nothing else reads its
/// result: the same bits, and the result is neither written nor read. `false` if it is not so.
pub(super) fn with_product(cx: &mut Lower<'_>, op: &SwigluBwd) -> Result<bool> {
    let Some(Op::GroupedLinearBwdInput(of)) = ahead(cx, 1) else { return Ok(false) };
    if op.gate != Gate::Silu || of.d_inp != op.d_out || !takes(cx, op, &of)? || !is_alone(cx, op, &of) {
        return Ok(false);
    }
    let replaced = cx.out.pop(); // the launch of the product
    let g = Groups::new(of.d_inp, of.weight)?;
    let args = cx.append(Args::new(), &[Some(op.d_inp), op.act, Some(op.inp)])?;
    let args = mapped(cx, mapped(cx, args, of.d_out, TILE as u32)?, of.weight, BOX as u32)?;
    let args = args.ptr(cx.ptr(of.offsets)?).ptr(cx.fault).u32s([g.rows, g.experts, g.ic, g.oc]);
    let tiles = g.row_tiles(TILE) * g.ic.div_ceil(TILE);
    let grid = Grid::linear(tiles, THREADS).shared(shared(g.experts));
    cx.launch_resident((&spec(), "grouped_swiglu_bwd"), grid, 1, args)?;
    cx.joins(replaced);
    Ok(true)
}

/// Whether the kernel takes the sizes, and where everything begins.
fn takes(cx: &Lower<'_>, op: &SwigluBwd, of: &GroupedLinearBwdInput) -> Result<bool> {
    let g = Groups::new(of.d_inp, of.weight)?;
    let mut slots = vec![of.d_out, of.weight, op.inp, op.d_inp];
    slots.extend(op.act);
    Ok(shared(g.experts) <= HOPPER_SHARED && path_of(cx, &g, &slots)? == Path::Wgmma)
}

/// Whether nothing reads the product's result later, and no block writes what another still reads. The gradient may be written over
/// SwiGLU's input: the same thread reads and writes an element.
fn is_alone(cx: &Lower<'_>, op: &SwigluBwd, of: &GroupedLinearBwdInput) -> bool {
    let operands = [of.d_out, of.weight, of.offsets];
    let written = [Some(op.d_inp), op.act].into_iter().flatten();
    let apart = are_apart(written, &operands) && are_apart(op.act.into_iter(), &[op.inp]);
    let in_place = op.d_inp == op.inp || !op.d_inp.overlaps(&op.inp);
    apart && in_place && (op.act == Some(op.d_out) || !is_read_later(cx, op.d_out))
}

pub(super) fn specs() -> Vec<Spec> {
    vec![spec()]
}
