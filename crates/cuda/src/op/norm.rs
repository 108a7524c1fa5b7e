//! Layer norm and RMS norm, which has no mean and no bias: their kernels, and the forward. The backward is in `norm_bwd.rs`.

use super::fp8::format_name;
use super::lower::{Lower, RESULT_SUMS};
use super::norm_hopper::{self, Block, CHUNK};
use crate::Result;
use crate::args::Grid;
use crate::kernels::{Kernel, Spec};
use ironhorse_core::op::{
    Gain, LayerNormApply, LayerNormFwd, Op, ResidualLayerNormFwd, ResidualRmsNormFwd, RmsNormApply,
    RmsNormFwd,
};
use ironhorse_core::{DType, Fp8, Slot};

/// `WARPS` of norm/fwd.cu, a row each.
const FWD_WARPS: usize = 8;
/// `WARPS` of norm/bwd.cu on the path for any width, and the fewest on the other.
pub(super) const BWD_WARPS: usize = 4;
/// The most columns of a lane in norm/bwd.cu, whose sums stay in registers: with few warps, and with more, which leave
/// fewer registers to each.
const BWD_COLUMNS: [usize; 2] = [24, 16];
/// Widths whose rows are kept in registers; a kernel is compiled for each width met.
const FAST: std::ops::RangeInclusive<usize> = 256..=8192;
/// The largest of these widths for a layer norm: the sums of its weight and its bias share the shared memory of a block.
const FAST_CENTRED: usize = 5120;
/// The largest width for which a warp has the registers for a row; each wider row gets a block.
const WARP_ROW: usize = 3072;
/// The most rows that get a block each whatever their width.
const FEW: usize = 8;
/// Widths of which [`CHUNK`] rows fit the shared memory of a block, several times on a multiprocessor.
const FP8_WIDTHS: std::ops::RangeInclusive<usize> = 256..=2048;

/// One of the two norms: its constants and the names of its kernels.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    /// The gain of an RMS norm.
    gain: Gain,
    /// `NORM` and `CENTRED` of the files.
    name: &'static str,
    centred: &'static str,
    /// The backward's kernels: the one for a known width, and where its result becomes 8 bits too; the two for any width, by rows and by
    /// columns; and the one that adds up the partial sums of all ways.
    pub bwd: &'static str,
    pub bwd_fp8: &'static str,
    pub bwd_rows: &'static str,
    pub bwd_columns: &'static str,
    pub bwd_sums: &'static str,
}

macro_rules! norm {
    ($name:literal, $centred:literal) => {
        Norm {
            gain: Gain::Weight,
            name: $name,
            centred: $centred,
            bwd: concat!($name, "_bwd"),
            bwd_fp8: concat!($name, "_bwd_fp8"),
            bwd_rows: concat!($name, "_bwd_rows"),
            bwd_columns: concat!($name, "_bwd_columns"),
            bwd_sums: concat!($name, "_bwd_sums"),
        }
    };
}

pub(super) const LAYER: Norm = norm!("layernorm", "true");
const RMS: Norm = norm!("rmsnorm", "false");

pub(super) fn rms(gain: Gain) -> Norm {
    Norm { gain, ..RMS }
}

/// Whether rows of a norm, `centred` or not, are kept in registers.
fn is_fast(centred: bool, width: usize) -> bool {
    width.is_multiple_of(8) && FAST.contains(&width) && (!centred || width <= FAST_CENTRED)
}

/// Whether each row gets a block of the forward: rows that are few, so that latency counts, or wide.
fn has_row_blocks(centred: bool, rows: usize, width: usize) -> bool {
    is_fast(centred, width) && (rows <= FEW || width > WARP_ROW)
}

/// Whether the block of another kernel has the registers for a row of this width besides its own.
pub(super) fn is_narrow(act: DType, width: usize) -> bool {
    width <= WARP_ROW || width * act.size() <= 8192
}

/// `WARPS` of norm/bwd.cu for rows in registers: enough that a row fits a block's lanes.
pub(super) fn bwd_warps(act: DType, width: usize) -> usize {
    let per_vector = 16 / act.size();
    let columns = |warps: usize| (width / per_vector).div_ceil(32 * warps) * per_vector;
    if columns(BWD_WARPS) <= BWD_COLUMNS[0] {
        return BWD_WARPS;
    }
    if columns(2 * BWD_WARPS) <= BWD_COLUMNS[1] { 2 * BWD_WARPS } else { 4 * BWD_WARPS }
}

impl Norm {
    /// A file for this norm, with the width as a constant where rows are kept in registers.
    fn spec(&self, file: &'static str, [act, weight]: [DType; 2], width: usize) -> Result<Spec> {
        let spec = Spec::act(file, act)?.typed("WEIGHT", weight)?;
        let spec = spec.define("NORM", self.name).define("CENTRED", self.centred).gain(self.gain);
        Ok(if self.is_fast(width) { spec.define("WIDTH", width as u32) } else { spec })
    }

    pub fn is_fast(&self, width: usize) -> bool {
        is_fast(self.is_centred(), width)
    }

    pub fn is_centred(&self) -> bool {
        self.centred == "true"
    }

    /// The specialisation of the forward, and whether each row gets a block.
    fn fwd_spec(&self, types: [DType; 2], rows: usize, width: usize) -> Result<(Spec, bool)> {
        let spec = self.spec("norm/fwd.cu", types, width)?;
        let blocks = has_row_blocks(self.is_centred(), rows, width);
        Ok((if blocks { spec.define("ROW_BLOCKS", 1) } else { spec }, blocks))
    }

    pub fn bwd_spec(
        &self,
        [act, weight, grad]: [DType; 3],
        width: usize,
        hopper: Option<Block>,
    ) -> Result<Spec> {
        if let Some(block) = hopper {
            let spec = self.spec(norm_hopper::FILE, [act, weight], width)?.typed("GRAD", grad)?;
            return Ok(block.define(spec));
        }
        let warps = if self.is_fast(width) { bwd_warps(act, width) } else { BWD_WARPS };
        Ok(self.spec("norm/bwd.cu", [act, weight], width)?.typed("GRAD", grad)?.define("WARPS", warps as u32))
    }

    /// norm/bwd_hopper.cu where its result becomes 8 bits of this format too, with or without sums of it over rows.
    pub fn bwd_fp8_spec(
        &self,
        types: [DType; 3],
        width: usize,
        block: Block,
        (format, sums): (Fp8, bool),
    ) -> Result<Spec> {
        let spec = self.bwd_spec(types, width, Some(block))?;
        let spec = if sums { spec.define(RESULT_SUMS, 1) } else { spec };
        Ok(spec.define("FORMAT", format_name(format)))
    }

    /// Whether the backward also sums its result over rows, where the next op needs that: always in norm/bwd_hopper.cu; in norm/bwd.cu in
    /// bf16, for widths of which a lane has at most 16 columns (`GROUP` there). For others, such as 768, rows would be divided
    /// otherwise, which costs as much as it spares.
    pub fn has_result_sums(&self, act: DType, width: usize, hopper: Option<Block>) -> bool {
        if hopper.is_some() {
            return self.is_centred();
        }
        let columns = |warps: usize| (width / 8).div_ceil(32 * warps) * 8;
        let usual = [1, 2, BWD_WARPS].map(columns).into_iter().find(|columns| *columns <= BWD_COLUMNS[0]);
        let few = usual.is_some_and(|columns| columns <= BWD_COLUMNS[1]);
        act == DType::BF16 && self.is_centred() && self.is_fast(width) && few
    }

    /// norm/fp8.cu in bf16.
    fn fp8_spec(&self, width: usize, format: &'static str) -> Result<Spec> {
        Ok(self.spec("norm/fp8.cu", [DType::BF16; 2], width)?.define("FORMAT", format))
    }

    /// The specialisations for these widths.
    fn specs(&self, widths: &[usize]) -> Vec<Spec> {
        use DType::{BF16, F32};
        let mut specs = Vec::new();
        for &width in widths {
            for types in [[F32; 3], [BF16; 3], [BF16, BF16, F32]] {
                for rows in [1, FEW + 1] {
                    specs.extend(self.fwd_spec([types[0], types[1]], rows, width).map(|(spec, _)| spec));
                }
                for hopper in [None].into_iter().chain(Block::of(types[0], width).map(Some)) {
                    let bwd = self.bwd_spec(types, width, hopper).ok();
                    let sums = bwd.clone().filter(|_| self.has_result_sums(types[0], width, hopper));
                    specs.extend(bwd.into_iter().chain(sums.map(|spec| spec.define(RESULT_SUMS, 1))));
                }
                let narrowing = Block::of(types[0], width).and_then(Block::narrowing);
                for format in narrowing.iter().flat_map(|_| Fp8::ALL) {
                    let sums = [false, true].into_iter().filter(|sums| !sums || self.is_centred());
                    specs.extend(
                        sums.flat_map(|sums| {
                            self.bwd_fp8_spec(types, width, narrowing?, (format, sums)).ok()
                        }),
                    );
                }
            }
            specs.extend(self.fp8_spec(width, "E4M3").ok().filter(|_| FP8_WIDTHS.contains(&width)));
        }
        specs.dedup();
        specs
    }

    /// A kernel of norm/fwd.cu with these slots as its first arguments, weight and bias at their end.
    fn forward(
        &self,
        cx: &mut Lower<'_>,
        kernel: &'static str,
        slots: &[Option<Slot>],
        inp: Slot,
        eps: Option<f32>,
    ) -> Result<()> {
        let (rows, width) = (inp.shape.rows(), inp.shape.cols());
        let [.., Some(weight), bias] = *slots else { return Ok(()) };
        if rows == 0 {
            return Ok(());
        }
        let args = cx.optional_pointers(slots)?;
        let args = eps.into_iter().fold(args, |args, eps| args.f32(eps)).u32s([rows, width]);
        let (spec, blocks) = self.fwd_spec([inp.dtype, weight.dtype], rows, width)?;
        if blocks && rows <= FEW {
            let grid = Grid::row_blocks(rows, inp.dtype, width);
            let parameters: Vec<Slot> = bias.into_iter().chain([weight]).collect();
            return cx.launch_chained(&spec.kernel(kernel), grid, args, &parameters);
        }
        let grid = match blocks {
            true => Grid::row_blocks(rows, inp.dtype, width),
            false => Grid::linear(rows.div_ceil(FWD_WARPS), 32 * FWD_WARPS as u32),
        };
        cx.launch(&spec, kernel, grid, args)
    }
}

/// A norm of the sum of two tensors: of layernorm with mean and bias, of rmsnorm without.
pub(super) struct ResidualNorm {
    pub residual: Slot,
    pub out: Slot,
    pub mean: Option<Slot>,
    pub rstd: Slot,
    pub a: Slot,
    pub b: Slot,
    pub weight: Slot,
    pub bias: Option<Slot>,
    pub eps: f32,
    pub gain: Gain,
}

impl ResidualNorm {
    pub fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::ResidualLayerNormFwd(op) => {
                let ResidualLayerNormFwd { residual, out, mean, rstd, a, b, weight, bias, eps } = op;
                let (mean, bias, gain) = (Some(mean), Some(bias), Gain::Weight);
                Some(Self { residual, out, mean, rstd, a, b, weight, bias, eps, gain })
            }
            Op::ResidualRmsNormFwd(op) => {
                let ResidualRmsNormFwd { residual, out, rstd, a, b, weight, eps, gain } = op;
                Some(Self { residual, out, mean: None, rstd, a, b, weight, bias: None, eps, gain })
            }
            _ => None,
        }
    }

    /// Its arguments in the order of the kernels, before `eps`.
    pub fn slots(&self) -> [Option<Slot>; 8] {
        let Self { residual, out, mean, rstd, a, b, weight, bias, .. } = *self;
        [Some(residual), Some(out), mean, Some(rstd), Some(a), Some(b), Some(weight), bias]
    }

    /// The kernel of norm/fp8.cu, which rounds the result to 8 bits as well; `None` for rows that it does not take.
    pub fn fp8(&self, format: &'static str) -> Result<Option<(Kernel, Grid)>> {
        let (rows, width) = (self.a.shape.rows(), self.a.shape.cols());
        let (norm, kernel) = match self.mean {
            Some(_) => (LAYER, "residual_layernorm_fwd_fp8"),
            None => (rms(self.gain), "residual_rmsnorm_fwd_fp8"),
        };
        let types = [self.a.dtype, self.weight.dtype];
        let takes = norm.is_fast(width) && FP8_WIDTHS.contains(&width) && rows.is_multiple_of(CHUNK);
        if !takes || rows == 0 || types != [DType::BF16; 2] {
            return Ok(None);
        }
        let grid =
            Grid::linear(rows / CHUNK, 32 * FWD_WARPS as u32).shared(CHUNK * width.next_multiple_of(128));
        Ok(Some((norm.fp8_spec(width, format)?.kernel(kernel), grid)))
    }

    /// Whether its kernel is that of norm/row_block.cuh.
    pub fn has_row_blocks(&self) -> bool {
        let (rows, width) = (self.a.shape.rows(), self.a.shape.cols());
        rows > 0 && has_row_blocks(self.mean.is_some(), rows, width)
    }
}

pub(crate) fn layernorm_fwd(cx: &mut Lower<'_>, op: &LayerNormFwd) -> Result<()> {
    let slots = [op.out, op.mean, op.rstd, op.inp, op.weight, op.bias].map(Some);
    LAYER.forward(cx, "layernorm_fwd", &slots, op.inp, Some(op.eps))
}

pub(crate) fn rmsnorm_fwd(cx: &mut Lower<'_>, op: &RmsNormFwd) -> Result<()> {
    let slots = [Some(op.out), None, Some(op.rstd), Some(op.inp), Some(op.weight), None];
    rms(op.gain).forward(cx, "rmsnorm_fwd", &slots, op.inp, Some(op.eps))
}

/// Lowers [`ResidualLayerNormFwd`] and [`ResidualRmsNormFwd`].
pub(crate) fn residual_norm_fwd(cx: &mut Lower<'_>, op: &Op) -> Result<()> {
    let Some(op) = ResidualNorm::of(op) else { return Ok(()) };
    let (norm, kernel) = match op.mean {
        Some(_) => (LAYER, "residual_layernorm_fwd"),
        None => (rms(op.gain), "residual_rmsnorm_fwd"),
    };
    norm.forward(cx, kernel, &op.slots(), op.a, Some(op.eps))
}

pub(crate) fn layernorm_apply(cx: &mut Lower<'_>, op: &LayerNormApply) -> Result<()> {
    let slots = [op.out, op.inp, op.mean, op.rstd, op.weight, op.bias].map(Some);
    LAYER.forward(cx, "layernorm_apply", &slots, op.inp, None)
}

pub(crate) fn rmsnorm_apply(cx: &mut Lower<'_>, op: &RmsNormApply) -> Result<()> {
    let slots = [Some(op.out), Some(op.inp), None, Some(op.rstd), Some(op.weight), None];
    rms(op.gain).forward(cx, "rmsnorm_apply", &slots, op.inp, None)
}

pub(super) fn specs() -> Vec<Spec> {
    let both = &[1, 256, 768, 1024, 1280, 1600, 2048, 3072, 5120];
    let llama = &[3584, 4096, 8192];
    let gemma = rms(Gain::OnePlusWeight).specs(&[1, 640, 1152, 2560, 5376]);
    [LAYER.specs(both), RMS.specs(both), RMS.specs(llama), gemma].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed_where_rows_need_not_be_divided_otherwise() {
        let all = [256, 768, 1024, 1280, 1600, 2048, 3072, 5120, 1003];
        let widths = |norm: Norm, act| -> Vec<usize> {
            all.into_iter().filter(|&width| norm.has_result_sums(act, width, None)).collect()
        };
        assert_eq!(widths(LAYER, DType::BF16), [256, 1024, 1600, 2048]);
        assert!(widths(LAYER, DType::F32).is_empty() && widths(RMS, DType::BF16).is_empty());
        let on_hopper = |norm: Norm, act| -> Vec<usize> {
            all.into_iter().filter(|&width| norm.has_result_sums(act, width, Block::of(act, width))).collect()
        };
        assert_eq!(on_hopper(LAYER, DType::BF16), [256, 768, 1024, 1280, 1600, 2048]);
        assert!(on_hopper(LAYER, DType::F32).is_empty() && on_hopper(RMS, DType::BF16).is_empty());
    }
}
