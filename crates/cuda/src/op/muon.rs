//! Muon: the momentum of matrices of one size, and their step.

use super::lower::Lower;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::op::{MuonMomentum, MuonUpdate};
use ironhorse_core::{DType, Precision, Slot, muon_matrices};

/// Elements and threads of a block of optimizer/muon.cu.
const BLOCK: usize = 8192;
const THREADS: u32 = 256;
/// `DECAYS` of optimizer/muon.cu.
const DECAYS: u64 = 1 << 63;

fn spec(p: Precision) -> Result<Spec> {
    let master = if p.has_residual() { "i16" } else { "float" };
    let spec = Spec::new("optimizer/muon.cu").typed("PARAM", p.weights)?.typed("GRAD", p.grads)?;
    spec.define("MASTER", master).typed("MOMENT", p.moments)
}

/// The matrices of an op, where the kernels find them.
struct Batch {
    /// The address of where each starts.
    starts: u64,
    /// Elements of each.
    len: usize,
    grid: Grid,
    blocks: usize,
}

impl Batch {
    /// `None` if there is nothing to do.
    fn new(cx: &mut Lower<'_>, matrices: Slot, first: usize) -> Result<Option<Self>> {
        let &[count, rows, cols] = matrices.shape.dims() else { return Ok(None) };
        if matrices.numel() == 0 {
            return Ok(None);
        }
        let found = muon_matrices(cx.program.params(), [rows, cols]).skip(first).take(count);
        let starts: Vec<u64> =
            found.map(|matrix| matrix.first as u64 | if matrix.decay { DECAYS } else { 0 }).collect();
        if starts.len() < count {
            let what =
                format!("the model has {} matrices of {rows} by {cols}, expected {count}", starts.len());
            return Err(Error::Unsupported(what));
        }
        let bytes: Vec<u8> = starts.iter().flat_map(|start| start.to_le_bytes()).collect();
        let (starts, len) = (cx.upload(&bytes)?, rows * cols);
        let blocks = count * len.div_ceil(BLOCK);
        Ok(Some(Self { starts, len, grid: Grid::linear(blocks, THREADS), blocks }))
    }
}

pub(crate) fn muon_momentum(cx: &mut Lower<'_>, op: &MuonMomentum) -> Result<()> {
    let Some(Batch { starts, len, grid, blocks }) = Batch::new(cx, op.out, op.first)? else { return Ok(()) };
    let (weights, grads, moments) = (op.out.dtype, op.grads.dtype, op.moment1.dtype);
    let spec = spec(Precision { weights, grads, moments, ..Precision::F32 })?;
    let parts = cx.scratch(blocks * size_of::<f64>())?;
    let args = Args::new().ptr(parts);
    let args = cx.append(args, &[op.moment1, op.grads, op.norm, op.halt].map(Some))?;
    let args = args.ptr(starts).ptr(cx.scalars).u64(len as u64).f32(op.momentum);
    cx.launch(&spec, "muon_momentum_parts", grid, args)?;
    let args = cx.pointers(&[op.out, op.moment1, op.grads, op.norm, op.halt])?;
    let args = args.ptr(starts).ptr(cx.scalars).ptr(parts).u64(len as u64).f32(op.momentum);
    cx.launch(&spec, "muon_momentum", grid, args)
}

pub(crate) fn muon_update(cx: &mut Lower<'_>, op: &MuonUpdate) -> Result<()> {
    let Some(Batch { starts, len, grid, .. }) = Batch::new(cx, op.inp, op.first)? else { return Ok(()) };
    let master = op.master.map_or(DType::F32, |slot| slot.dtype);
    // the types of gradients and moments make no difference to it
    let weights = op.params.dtype;
    let spec = spec(Precision { weights, grads: weights, master, ..Precision::F32 })?;
    let args = cx.pointers(&[op.params, op.master.unwrap_or(op.params), op.inp, op.norm, op.halt])?;
    let args = args.ptr(starts).ptr(cx.scalars).u64(len as u64).f32(op.scale);
    cx.launch(&spec, "muon_update", grid, args)
}

/// Every specialisation these launchers ask for.
pub(super) fn specs() -> Vec<Spec> {
    let (f32, bf16) = (Precision::F32, Precision::BF16);
    let all = [
        f32,
        bf16,
        Precision::BF16_F32_GRADS,
        bf16.with_bf16_moments(),
        Precision::BF16_F32_GRADS.with_bf16_moments(),
        bf16.with_residual(),
    ];
    all.into_iter().flat_map(spec).collect()
}
