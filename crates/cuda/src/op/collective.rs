//! What several ranks exchange, and the sum of what arrives. Messages go at the same time, on the stream of the engine; the sum
//! is ours, so that its order does not depend on NCCL. With `--fast` NCCL adds, in an order of its own: fewer bytes between machines.

use super::lower::Lower;
use crate::args::Grid;
use crate::kernels::Spec;
use crate::nccl::{Nccl, Transfer, Transfers, number_type};
use crate::{Error, Result};
use ironhorse_core::op::{AllGather, Exchange, TreeSum};
use ironhorse_core::ranks::PIECE_ELEMENTS;
use ironhorse_core::{DType, Place, Slices, Slot, SumTree};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// `THREADS` of ranks/tree_sum.cu and ranks/poison.cu.
const THREADS: u32 = 256;

fn spec(dtype: DType) -> Result<Spec> {
    Spec::act("ranks/tree_sum.cu", dtype)
}

/// The other ranks; refuses a program for another place.
fn ranks(cx: &Lower<'_>, place: Place) -> Result<Arc<Nccl>> {
    match &cx.libraries.nccl {
        Some(nccl) if nccl.place() == place => Ok(nccl.clone()),
        _ => {
            let Place { rank, world } = place;
            Err(Error::Unsupported(format!(
                "the program is for rank {rank} of {world}, which this engine has not joined"
            )))
        }
    }
}

/// Adds transfers, those of nothing left out.
fn transfer(cx: &mut Lower<'_>, place: Place, name: &'static str, mut all: Vec<Transfer>) -> Result<()> {
    all.retain(|transfer| !transfer.is_empty());
    if !all.is_empty() {
        let nccl = ranks(cx, place)?;
        cx.call(name, Rc::new(Transfers { nccl, all }));
    }
    Ok(())
}

/// Whether NCCL adds: where every rank of all has one node. The sum is then the first row of what [`Exchange`] writes.
fn added_by_nccl(cx: &Lower<'_>, micro_steps: usize, world: usize) -> bool {
    let all = cx.libraries.nccl.as_ref().is_some_and(|nccl| nccl.place().world == world);
    cx.settings.fast && world > 1 && all && SumTree::new(micro_steps).rows(world).len() == world
}

/// The sums of the nodes of all ranks: of each part to its owner, or of everything to all.
fn reduce(cx: &mut Lower<'_>, op: &Exchange, inp: Slot, out: u64) -> Result<()> {
    let (number, at) = (number_type(inp.dtype)?, cx.ptr(inp)?);
    let all = if op.divided {
        let part = |(to, part): (usize, Range<usize>)| {
            let at = at + (part.start * inp.dtype.size()) as u64;
            Transfer::Reduce { at, out, elements: part.len(), number, to: Some(to) }
        };
        op.receivers(inp.numel()).into_iter().map(part).collect()
    } else {
        vec![Transfer::Reduce { at, out, elements: inp.numel(), number, to: None }]
    };
    transfer(cx, op.place, "reduce", all)
}

pub(crate) fn exchange(cx: &mut Lower<'_>, op: &Exchange) -> Result<()> {
    let (rank, world, size) = (op.place.rank, op.within().world, op.out.dtype.size());
    let width = op.out.numel() / op.rows() * size;
    let out = cx.ptr(op.out)?;
    // what all get is where a fault of this rank must show: the loss
    if let Some(inp) = op.inp.filter(|inp| !op.divided && world > 1 && inp.dtype == DType::F32) {
        let args = cx.pointers(&[inp])?.ptr(cx.fault).u32(inp.numel() as u32);
        cx.launch(&Spec::new("ranks/poison.cu"), "poison", Grid::linear(1, THREADS), args)?;
    }
    if let Some(inp) = op.inp.filter(|_| added_by_nccl(cx, op.micro_steps, world)) {
        return reduce(cx, op, inp, out);
    }
    let mut all = Vec::new();
    for (from, row) in op.senders() {
        let at = out + (row * width) as u64;
        match op.inp.filter(|_| from == rank) {
            Some(inp) => {
                let own = op.part(inp.numel(), op.within().rank);
                if !own.is_empty() {
                    let here = cx.ptr(inp)? + (own.start * size) as u64;
                    cx.copy(at, here, width);
                }
            }
            None => all.push(Transfer::Receive { at, bytes: width, from }),
        }
    }
    if let Some(inp) = op.inp {
        let base = cx.ptr(inp)?;
        for (to, part) in op.receivers(inp.numel()).into_iter().filter(|(to, _)| *to != rank) {
            all.push(Transfer::Send { at: base + (part.start * size) as u64, bytes: part.len() * size, to });
        }
    }
    transfer(cx, op.place, "exchange", all)
}

pub(crate) fn all_gather(cx: &mut Lower<'_>, op: &AllGather) -> Result<()> {
    let (slices, place) = (op.slices, op.slices.place);
    if place.is_alone() {
        return Ok(());
    }
    let (size, base) = (op.data.dtype.size(), cx.ptr(op.data)?);
    let part = |from: usize| {
        let part = slices.part_of(&(0..op.data.numel()), from);
        Transfer::Broadcast { at: base + (part.start * size) as u64, bytes: part.len() * size, from }
    };
    transfer(cx, place, "all_gather", (0..place.world).map(part).collect())
}

pub(crate) fn tree_sum(cx: &mut Lower<'_>, op: &TreeSum) -> Result<()> {
    let n = op.out.numel();
    if n == 0 {
        return Ok(());
    }
    if added_by_nccl(cx, op.micro_steps, op.world) {
        let (out, inp) = (cx.ptr(op.out)?, cx.ptr(op.inp)?);
        cx.copy(out, inp, op.out.bytes());
        return Ok(());
    }
    let merges = SumTree::new(op.micro_steps).merges(op.world);
    let words: Vec<u8> = merges.iter().flat_map(|&merges| (merges as u32).to_le_bytes()).collect();
    let table = cx.upload(&words)?;
    let args = cx.pointers(&[op.out, op.inp])?.ptr(table).u32(merges.len() as u32).u64(n as u64);
    cx.launch(&spec(op.out.dtype)?, "tree_sum", Grid::linear(n.div_ceil(THREADS as usize), THREADS), args)
}

/// Gives every rank the sums of all pieces, of which it has those of its own parts.
pub(super) fn share_pieces(cx: &mut Lower<'_>, slices: Slices, elements: usize, sums: u64) -> Result<()> {
    if slices.place.is_alone() {
        return Ok(());
    }
    let pieces = |part: Range<usize>| part.start / PIECE_ELEMENTS..part.end.div_ceil(PIECE_ELEMENTS);
    let mut all = Vec::new();
    for from in 0..slices.place.world {
        for pieces in slices.parts_of(elements, from).into_iter().filter(|part| !part.is_empty()).map(pieces)
        {
            let at = sums + (pieces.start * size_of::<f64>()) as u64;
            all.push(Transfer::Broadcast { at, bytes: pieces.len() * size_of::<f64>(), from });
        }
    }
    transfer(cx, slices.place, "share_norm", all)
}

pub(super) fn specs() -> Vec<Spec> {
    let mut specs = Spec::all_types(spec);
    specs.push(Spec::new("ranks/poison.cu"));
    specs
}
