//! Normalisation by the root mean square. Rows are spread over threads; the gradient of the weight, which sums over
//! rows, over columns instead, so that every sum has one owner and one order.

use super::Ctx;
use super::elementwise::add_range;
use crate::math::{LANES, dot_inline, fma, tree};
use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};
use std::ops::Range;

/// Columns a task of the column sums handles.
const COLS: usize = 64;
/// Rows summed in one accumulator before it is added to the total: keeps rounding low over many rows.
const BLOCK: usize = 32;

multiversion! {
    /// 1/√(mean(x²) + eps)
    fn statistic<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
        1.0 / (dot_inline::<FMA>(x, x) / x.len() as f32 + eps).sqrt()
    }

    /// out = x · rstd · w
    fn normalise<const FMA: bool>(out: &mut [f32], x: &[f32], rstd: f32, w: &[f32]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
            *out = x * rstd * w;
        }
    }

    /// One row of the input gradient: rstd·d·w - x·(rstd³·mean(d·w·x)).
    fn row_bwd<const FMA: bool>(d_inp: &mut [f32], d_out: &[f32], x: &[f32], rstd: f32, w: &[f32], adds: bool) {
        let mut dots = [0.0_f32; LANES];
        let ((d_chunks, d_tail), (w_chunks, w_tail), (x_chunks, x_tail)) =
            (d_out.as_chunks::<LANES>(), w.as_chunks::<LANES>(), x.as_chunks::<LANES>());
        for ((d, w), x) in d_chunks.iter().zip(w_chunks).zip(x_chunks) {
            for i in 0..LANES {
                dots[i] = fma::<FMA>(d[i] * w[i], x[i], dots[i]);
            }
        }
        for (i, ((d, w), x)) in d_tail.iter().zip(w_tail).zip(x_tail).enumerate() {
            dots[i] = fma::<FMA>(d * w, *x, dots[i]);
        }
        // The compiler must not see the tree (see `math::sum_inline`).
        let dot = tree(std::hint::black_box(dots), |a, b| a + b);
        let pull = rstd * rstd * (dot / x.len() as f32);
        let row = d_inp.iter_mut().zip(d_out).zip(w).zip(x);
        for (((d_inp, d), w), x) in row {
            let value = fma::<FMA>(-*x, pull, d * w) * rstd;
            *d_inp = if adds { *d_inp + value } else { value };
        }
    }

    /// dots += d · x · rstd on a piece of a row.
    fn column_tally<const FMA: bool>(dots: &mut [f32], d: &[f32], x: &[f32], rstd: f32) {
        for ((dot, d), x) in dots.iter_mut().zip(d).zip(x) {
            *dot = fma::<FMA>(*d, x * rstd, *dot);
        }
    }
}

/// Normalises one row and keeps its statistic.
///
/// # Safety
/// The row of `out` and its element of `rstd` are the caller's alone; `inp` and `weight` are only read.
unsafe fn forward_row(
    ctx: (crate::isa::Isa, f32),
    [out, rstd, inp, weight]: [Span<f32>; 4],
    row: usize,
    r: Range<usize>,
) {
    let (isa, eps) = ctx;
    // SAFETY: the caller's contract.
    unsafe {
        let x = inp.get(r.clone());
        let factor = statistic(isa, x, eps);
        rstd.get_mut(row..row + 1)[0] = factor;
        normalise(isa, out.get_mut(r), x, factor, weight.all());
    }
}

pub fn rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &RmsNormFwd) -> Result<()> {
    let (out, rstd) = (ctx.f32(op.out)?, ctx.f32(op.rstd)?);
    let (inp, weight) = (ctx.f32(op.inp)?, ctx.f32(op.weight)?);
    let (isa, width, eps) = (ctx.isa, op.inp.shape.cols(), op.eps);
    ctx.rows(op.inp.shape.rows(), width, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of what is written; written slots share no memory with read ones.
            unsafe { forward_row((isa, eps), [out, rstd, inp, weight], row, r) }
        }
    })
}

pub fn residual_rmsnorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualRmsNormFwd) -> Result<()> {
    let (residual, out, rstd) = (ctx.f32(op.residual)?, ctx.f32(op.out)?, ctx.f32(op.rstd)?);
    let (a, b, weight) = (ctx.f32(op.a)?, ctx.f32(op.b)?, ctx.f32(op.weight)?);
    let (isa, width, eps) = (ctx.isa, op.a.shape.cols(), op.eps);
    ctx.rows(op.a.shape.rows(), width, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows; `residual` is one of its terms or apart from both, every other written
            // slot is apart from all else.
            unsafe {
                add_range(isa, residual, a, b, r.clone());
                forward_row((isa, eps), [out, rstd, residual, weight], row, r);
            }
        }
    })
}

pub fn rmsnorm_apply(ctx: &mut Ctx<'_>, op: &RmsNormApply) -> Result<()> {
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    let (rstd, weight) = (ctx.f32(op.rstd)?, ctx.f32(op.weight)?);
    let (isa, width) = (ctx.isa, op.inp.shape.cols());
    ctx.rows(op.inp.shape.rows(), width, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of `out`, which shares no memory with anything read.
            unsafe { normalise(isa, out.get_mut(r.clone()), inp.get(r), rstd.all()[row], weight.all()) }
        }
    })
}

pub fn rmsnorm_bwd(ctx: &mut Ctx<'_>, op: &RmsNormBwd) -> Result<()> {
    let (d_inp, d_weight, d_out) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_weight)?, ctx.f32(op.d_out)?);
    let (inp, weight, rstd) = (ctx.f32(op.inp)?, ctx.f32(op.weight)?, ctx.f32(op.rstd)?);
    let (isa, rows, width) = (ctx.isa, op.inp.shape.rows(), op.inp.shape.cols());
    let micro_step = ctx.scalars.micro_step;
    let (adds_inp, adds) = (op.accum_inp.adds(micro_step), op.accum.adds(micro_step));
    // SAFETY: nothing writes the statistic or the weight while the op runs.
    let (rstd, weight) = unsafe { (rstd.all(), weight.all()) };

    ctx.rows(rows, width, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of `d_inp`, which shares no memory with anything read.
            unsafe {
                let (d, x) = (d_out.get(r.clone()), inp.get(r.clone()));
                row_bwd(isa, d_inp.get_mut(r), d, x, rstd[row], weight, adds_inp);
            }
        }
    })?;
    ctx.chunks(width, COLS, |cols, _| {
        let n = cols.len();
        let mut total = [0.0_f32; COLS];
        for first in (0..rows).step_by(BLOCK) {
            let mut block = [0.0_f32; COLS];
            for (row, &factor) in (first..).zip(&rstd[first..rows.min(first + BLOCK)]) {
                let r = row * width + cols.start..row * width + cols.end;
                // SAFETY: nothing writes `d_out` and `inp` while the op runs.
                let (d, x) = unsafe { (d_out.get(r.clone()), inp.get(r)) };
                column_tally(isa, &mut block[..n], d, x, factor);
            }
            total.iter_mut().zip(block).for_each(|(total, block)| *total += block);
        }
        // SAFETY: tasks have disjoint columns of the gradient, which shares no memory with anything else.
        super::store(unsafe { d_weight.get_mut(cols) }, &total[..n], adds);
    })
}
