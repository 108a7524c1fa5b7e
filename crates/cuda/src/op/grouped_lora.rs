//! Adapters of experts: products on some of the columns of their rows, one launch for each part. Where each expert's rows are
//! is known to the device only, so blocks look for their tiles, as in `grouped.rs`.

use super::grouped::{Path, check_experts};
use super::lora::addresses;
use super::lower::Lower;
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::op::{GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd};
use ironhorse_core::{DType, Slot};

/// The kernels of experts/grouped_lora_any.cu and experts/grouped_lora_mma.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Rows by the transposed weights of their experts.
    Fwd,
    /// Rows by the weights of their experts.
    Bwd,
    /// Sums over the rows of each expert.
    BwdWeight,
}

/// One product: `to (+)= scale · left · right`, each at its address.
#[derive(Clone, Copy, Debug)]
struct Product {
    step: Step,
    at: [u64; 3],
    /// The element types of the operands, and of the result.
    dtypes: [DType; 2],
    rows: usize,
    experts: usize,
    /// Columns of the result, and terms of its sums or, of [`Step::BwdWeight`], rows of the result.
    sizes: [usize; 2],
    /// Elements from one row to the next of the result and the operands.
    ld: [usize; 3],
    /// Elements from the weight of one expert to that of the next.
    step_by: usize,
    scale: f32,
    adds: bool,
}

impl Product {
    /// The fastest kernels that take it, up to `most`; there are none for wgmma, whose tiles are wider than most ranks.
    fn path(&self, most: Path) -> Path {
        let numbers = self.sizes.iter().chain(&self.ld).chain([&self.step_by]);
        let whole = numbers.into_iter().all(|size| size.is_multiple_of(8));
        let aligned = self.at.iter().all(|at| at.is_multiple_of(16));
        if most > Path::Any && self.dtypes[0] == DType::BF16 && whole && aligned {
            Path::Mma
        } else {
            Path::Any
        }
    }

    /// The most tiles there can be: every expert may end inside one.
    fn tiles(&self, [tall, wide]: [usize; 2]) -> usize {
        let [columns, other] = self.sizes;
        let rows = match self.step {
            Step::Fwd | Step::Bwd => self.rows / tall + self.experts.min(self.rows),
            Step::BwdWeight => self.experts * other.div_ceil(tall),
        };
        rows * columns.div_ceil(wide)
    }
}

fn name(path: Path, step: Step) -> &'static str {
    match (path, step) {
        (Path::Any, Step::Fwd) => "grouped_lora_any_fwd",
        (Path::Any, Step::Bwd) => "grouped_lora_any_bwd",
        (Path::Any, Step::BwdWeight) => "grouped_lora_any_bwd_weight",
        (_, Step::Fwd) => "grouped_lora_mma_fwd",
        (_, Step::Bwd) => "grouped_lora_mma_bwd",
        (_, Step::BwdWeight) => "grouped_lora_mma_bwd_weight",
    }
}

fn spec(path: Path, [input, output]: [DType; 2]) -> Result<Spec> {
    match path {
        Path::Any => Spec::new("experts/grouped_lora_any.cu").typed("IN", input)?.typed("OUT", output),
        _ => Spec::new("experts/grouped_lora_mma.cu").typed("OUT", output),
    }
}

fn launch(cx: &mut Lower<'_>, product: &Product, offsets: Slot) -> Result<()> {
    let Product { step, at, dtypes, rows, experts, sizes, ld, step_by, scale, adds } = *product;
    check_experts(experts)?;
    let path = product.path(Path::most(cx.device.info.compute));
    let blocks = product.tiles(path.tile());
    if blocks == 0 {
        return Ok(());
    }
    let args = at.into_iter().fold(Args::new(), Args::ptr);
    let args = args.ptr(cx.ptr(offsets)?).ptr(cx.fault).u32s([rows, experts]).u32s(sizes).u32s(ld);
    let args = args.u64(step_by as u64).f32(scale).u32(adds.into());
    let grid = Grid::linear(blocks, path.threads()).shared(path.shared(experts));
    cx.launch_resident((&spec(path, dtypes)?, name(path, step)), grid, 1, args)
}

pub(crate) fn grouped_lora_fwd(cx: &mut Lower<'_>, op: &GroupedLoraFwd) -> Result<()> {
    let (rows, oc, wide) = (op.out.shape.rows(), op.out.shape.cols(), op.hidden.shape.cols());
    let (rank, experts) = (op.b.shape.cols(), op.offsets.numel() - 1);
    let [out, hidden, b] = addresses(cx, [op.out, op.hidden, op.b])?;
    for part in op.parts.each(rank) {
        let product = Product {
            step: Step::Fwd,
            at: [out(part.out.start), hidden(part.hidden.start), b(part.b.start * rank)],
            dtypes: [op.hidden.dtype, op.out.dtype],
            rows,
            experts,
            sizes: [part.out.len(), rank],
            ld: [oc, wide, rank],
            step_by: op.parts.rows() * rank,
            scale: op.scale,
            adds: true,
        };
        launch(cx, &product, op.offsets)?;
    }
    Ok(())
}

pub(crate) fn grouped_lora_bwd_hidden(cx: &mut Lower<'_>, op: &GroupedLoraBwdHidden) -> Result<()> {
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.d_hidden.shape.cols());
    let (rank, experts) = (op.b.shape.cols(), op.offsets.numel() - 1);
    let [d_hidden, d_out, b] = addresses(cx, [op.d_hidden, op.d_out, op.b])?;
    for part in op.parts.each(rank) {
        let product = Product {
            step: Step::Bwd,
            at: [d_hidden(part.hidden.start), d_out(part.out.start), b(part.b.start * rank)],
            dtypes: [op.d_out.dtype, op.d_hidden.dtype],
            rows,
            experts,
            sizes: [rank, part.out.len()],
            ld: [wide, oc, rank],
            step_by: op.parts.rows() * rank,
            scale: op.scale,
            adds: false,
        };
        launch(cx, &product, op.offsets)?;
    }
    Ok(())
}

pub(crate) fn grouped_lora_bwd_weight(cx: &mut Lower<'_>, op: &GroupedLoraBwdWeight) -> Result<()> {
    let (rows, oc, wide) = (op.d_out.shape.rows(), op.d_out.shape.cols(), op.hidden.shape.cols());
    let (rank, experts) = (op.d_b.shape.cols(), op.offsets.numel() - 1);
    let [d_b, d_out, hidden] = addresses(cx, [op.d_b, op.d_out, op.hidden])?;
    let adds = cx.adds(op.accum);
    for part in op.parts.each(rank) {
        let product = Product {
            step: Step::BwdWeight,
            at: [d_b(part.b.start * rank), d_out(part.out.start), hidden(part.hidden.start)],
            dtypes: [op.d_out.dtype, op.d_b.dtype],
            rows,
            experts,
            sizes: [rank, part.out.len()],
            ld: [rank, oc, wide],
            step_by: op.parts.rows() * rank,
            scale: op.scale,
            adds,
        };
        launch(cx, &product, op.offsets)?;
    }
    Ok(())
}

pub(crate) fn grouped_lora_bwd_input(cx: &mut Lower<'_>, op: &GroupedLoraBwdInput) -> Result<()> {
    let (rows, ic, wide) = (op.d_inp.shape.rows(), op.d_inp.shape.cols(), op.d_hidden.shape.cols());
    let product = Product {
        step: Step::Bwd,
        at: [cx.ptr(op.d_inp)?, cx.ptr(op.d_hidden)?, cx.ptr(op.a)?],
        dtypes: [op.d_hidden.dtype, op.d_inp.dtype],
        rows,
        experts: op.offsets.numel() - 1,
        sizes: [ic, wide],
        ld: [ic, wide, ic],
        step_by: wide * ic,
        scale: 1.0,
        adds: true,
    };
    launch(cx, &product, op.offsets)
}

pub(super) fn specs() -> Vec<Spec> {
    use DType::{BF16, F32};
    let any = [[F32, F32], [BF16, BF16], [BF16, F32]].map(|dtypes| (Path::Any, dtypes));
    let mma = [[BF16, BF16], [BF16, F32]].map(|dtypes| (Path::Mma, dtypes));
    any.into_iter().chain(mma).filter_map(|(path, dtypes)| spec(path, dtypes).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gate of 64 experts in rank 16, where rows are gate and up.
    const GATE: Product = Product {
        step: Step::Fwd,
        at: [256, 512, 1024],
        dtypes: [DType::BF16; 2],
        rows: 4096,
        experts: 64,
        sizes: [768, 16],
        ld: [1536, 32, 16],
        step_by: 1536 * 16,
        scale: 2.0,
        adds: true,
    };

    #[test]
    fn tensor_cores_take_whole_vectors_only() {
        assert_eq!(
            [Path::Wgmma, Path::Mma, Path::Any].map(|most| GATE.path(most)),
            [Path::Mma, Path::Mma, Path::Any]
        );
        let others = [
            Product { dtypes: [DType::F32; 2], ..GATE },
            Product { sizes: [768, 12], ld: [1536, 24, 12], step_by: 1536 * 12, ..GATE },
            Product { at: [256, 512 + 2, 1024], ..GATE },
            Product { ld: [1537, 32, 16], ..GATE },
        ];
        for product in others {
            assert_eq!(product.path(Path::Wgmma), Path::Any, "{product:?}");
        }
    }

    #[test]
    fn there_are_tiles_for_every_way_rows_can_spread() {
        assert_eq!(GATE.tiles([128, 128]), (32 + 64) * 6);
        assert_eq!(Product { rows: 3, ..GATE }.tiles([128, 128]), 3 * 6, "an expert each at most");
        assert_eq!(Product { rows: 0, ..GATE }.tiles([128, 128]), 0);
        let weight = Product { step: Step::BwdWeight, sizes: [16, 768], rows: 0, ..GATE };
        assert_eq!(weight.tiles([128, 128]), 64 * 6, "gradients without rows are zeroed");
    }
}
