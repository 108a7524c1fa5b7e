//! The backward of norms, alone or with its result in 8 bits too.

use super::lower::{Lower, Partials, RESULT_SUMS};
use super::norm::{BWD_WARPS, LAYER, Norm, bwd_warps, rms};
use super::norm_hopper::{self, Block};
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::Slot;
use ironhorse_core::op::{Accum, LayerNormBwd, Op, Quantize, RmsNormBwd};

/// The most partial rows of column sums on the path for any width.
const MOST_PARTIALS: usize = 512;

/// Lowers [`LayerNormBwd`] and [`RmsNormBwd`].
pub(crate) fn norm_bwd(cx: &mut Lower<'_>, op: &Op) -> Result<()> {
    Backward::of(op).map_or(Ok(()), |backward| backward.launch(cx))
}

/// A backward.
pub(super) struct Backward {
    norm: Norm,
    pub d_inp: Slot,
    d_out: Slot,
    inp: Slot,
    mean: Option<Slot>,
    rstd: Slot,
    weight: Slot,
    d_weight: Slot,
    d_bias: Option<Slot>,
    accum_inp: Accum,
    accum: Accum,
}

impl Backward {
    fn launch(&self, cx: &mut Lower<'_>) -> Result<()> {
        let (rows, width) = (self.inp.shape.rows(), self.inp.shape.cols());
        let types = [self.inp.dtype, self.weight.dtype, self.d_weight.dtype];
        let hopper = Block::on(&cx.device.info, self.inp.dtype, width);
        let spec = self.norm.bwd_spec(types, width, hopper)?;
        let may_sum = rows > 0 && self.norm.has_result_sums(self.d_inp.dtype, width, hopper);
        let sums = may_sum && cx.bias_follows(self.d_inp);
        let spec = if sums { spec.define(RESULT_SUMS, 1) } else { spec };
        let (partials, count) = match rows {
            0 => (0, 0),
            _ if self.norm.is_fast(width) => self.fast(cx, &spec, hopper, sums)?,
            _ => self.any(cx, &spec)?,
        };
        if sums {
            let at = partials + (count * self.columns() * size_of::<f32>()) as u64;
            *cx.partials = Some(Partials { op: cx.op, of: self.d_inp, at, rows: count });
        }
        self.sums(cx, &spec, partials, count)
    }

    /// Adds up the partial rows.
    fn sums(&self, cx: &mut Lower<'_>, spec: &Spec, partials: u64, count: usize) -> Result<()> {
        let args = cx.optional_pointers(&[Some(self.d_weight), self.d_bias])?.ptr(partials);
        let args = args.u32s([count, self.inp.shape.cols()]).u32(cx.adds(self.accum).into());
        let grid = Grid::linear(self.columns().div_ceil(32), 1024);
        cx.launch(spec, self.norm.bwd_sums, grid, args)
    }

    /// What blocks read and write row by row.
    pub fn touches(&self) -> Vec<Slot> {
        let slots = [
            Some(self.d_inp),
            Some(self.d_out),
            Some(self.inp),
            self.mean,
            Some(self.rstd),
            Some(self.weight),
        ];
        slots.into_iter().flatten().collect()
    }

    /// The block of the kernel that also rounds the result to 8 bits as `narrow` says, if it takes the rows.
    pub fn narrowing(&self, cx: &Lower<'_>, narrow: &Quantize) -> Option<Block> {
        let (rows, width) = (self.inp.shape.rows(), self.inp.shape.cols());
        let sums = narrow.d_bias.is_none() || self.norm.is_centred();
        let block = Block::on(&cx.device.info, self.inp.dtype, width).and_then(Block::narrowing);
        block.filter(|_| sums && rows > 0 && rows.is_multiple_of(norm_hopper::CHUNK))
    }

    /// The launches where the result becomes 8 bits too, and is written in bf16 as ever: the same bits of both as by one after the other, and
    /// other sums in another order. `results` are the arguments that say where and how. Gives the address of the partial sums of
    /// columns for the bias of `narrow`, if there is one, and how many rows they have.
    pub fn launch_fp8(
        &self,
        cx: &mut Lower<'_>,
        block: Block,
        narrow: &Quantize,
        results: Args,
    ) -> Result<Option<(u64, usize)>> {
        let (rows, width) = (self.inp.shape.rows(), self.inp.shape.cols());
        let types = [self.inp.dtype, self.weight.dtype, self.d_weight.dtype];
        let sums = narrow.d_bias.is_some();
        let spec = self.norm.bwd_fp8_spec(types, width, block, (narrow.format, sums))?;
        let (threads, shared) = (block.threads(), block.shared_narrowing());
        let function = cx.kernel(&spec, self.norm.bwd_fp8)?;
        let count = (rows / norm_hopper::CHUNK).min(function.resident(threads, shared)?);
        let (partials, args) = self.partials(cx, count, if sums { width } else { 0 })?;
        let grid = Grid::linear(count, threads).shared(shared);
        cx.launch_function(self.norm.bwd_fp8, function, grid, args.extend(results));
        self.sums(cx, &spec, partials, count)?;
        Ok(sums.then(|| (partials + (count * self.columns() * size_of::<f32>()) as u64, count)))
    }

    /// The backward that an op is.
    pub fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::LayerNormBwd(op) => {
                let LayerNormBwd {
                    d_inp,
                    d_weight,
                    d_bias,
                    d_out,
                    inp,
                    mean,
                    rstd,
                    weight,
                    accum_inp,
                    accum,
                } = op;
                let (norm, mean, d_bias) = (LAYER, Some(mean), Some(d_bias));
                Some(Self { norm, d_inp, d_out, inp, mean, rstd, weight, d_weight, d_bias, accum_inp, accum })
            }
            Op::RmsNormBwd(op) => {
                let RmsNormBwd { d_inp, d_weight, d_out, inp, rstd, weight, accum_inp, accum, gain } = op;
                let (norm, mean, d_bias) = (rms(gain), None, None);
                Some(Self { norm, d_inp, d_out, inp, mean, rstd, weight, d_weight, d_bias, accum_inp, accum })
            }
            _ => None,
        }
    }

    /// Columns of a partial row: those of d_weight, and of d_bias.
    fn columns(&self) -> usize {
        self.inp.shape.cols() * (1 + usize::from(self.d_bias.is_some()))
    }

    /// Memory for `count` partial rows, of `more` columns besides its own, and the arguments of the kernels of the backward that work on rows.
    fn partials(&self, cx: &mut Lower<'_>, count: usize, more: usize) -> Result<(u64, Args)> {
        let partials = cx.scratch(count * (self.columns() + more) * size_of::<f32>())?;
        let args = cx.pointers(&[self.d_inp])?.ptr(partials);
        let slots = [Some(self.d_out), Some(self.inp), self.mean, Some(self.rstd), Some(self.weight)];
        let args = cx.append(args, &slots)?;
        let sizes = [self.inp.shape.rows(), self.inp.shape.cols()];
        Ok((partials, args.u32s(sizes).u32(cx.adds(self.accum_inp).into())))
    }

    /// Returns address and number of the partial rows; with `sums`, those of the result are behind them.
    fn fast(
        &self,
        cx: &mut Lower<'_>,
        spec: &Spec,
        hopper: Option<Block>,
        sums: bool,
    ) -> Result<(u64, usize)> {
        let warps = bwd_warps(self.inp.dtype, self.inp.shape.cols());
        let (rows, threads, shared) = match hopper {
            Some(block) => (block.rows(), block.threads(), block.shared()),
            None => (warps, 32 * warps as u32, 0),
        };
        let function = cx.kernel(spec, self.norm.bwd)?;
        // A block without rows would only write zeros, so there is at most one per row.
        let count = self.inp.shape.rows().div_ceil(rows).min(function.resident(threads, shared)?);
        let more = if sums { self.inp.shape.cols() } else { 0 };
        let (partials, args) = self.partials(cx, count, more)?;
        cx.launch_function(self.norm.bwd, function, Grid::linear(count, threads).shared(shared), args);
        Ok((partials, count))
    }

    /// Returns address and number of the partial rows.
    fn any(&self, cx: &mut Lower<'_>, spec: &Spec) -> Result<(u64, usize)> {
        let (rows, width) = (self.inp.shape.rows(), self.inp.shape.cols());
        let chunk = rows.div_ceil(MOST_PARTIALS).max(64);
        let count = rows.div_ceil(chunk);
        let (partials, args) = self.partials(cx, count, 0)?;
        let grid = Grid::linear(rows.div_ceil(BWD_WARPS), 32 * BWD_WARPS as u32);
        cx.launch(spec, self.norm.bwd_rows, grid, args.clone())?;
        let grid = Grid::plane(width.div_ceil(32), count, 256);
        cx.launch(spec, self.norm.bwd_columns, grid, args.u32(chunk as u32))?;
        Ok((partials, count))
    }
}
