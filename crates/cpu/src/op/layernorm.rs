//! Layer normalisation. Rows are spread over threads; the gradients of weight and bias, which sum over rows, are
//! spread over columns instead, so that every sum has one owner and one order.

use super::Ctx;
use super::elementwise::add_range;
use crate::math::{fma, sum_inline};
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd};

/// Rows a task handles.
const ROWS: usize = 8;
/// Columns a task of the column sums handles.
const COLS: usize = 64;
/// Rows summed in one accumulator before it is added to the total: keeps rounding low over many rows.
const BLOCK: usize = 32;

multiversion! {
    /// (mean, 1/√(var + eps)) of a row.
    fn statistics<const FMA: bool>(x: &[f32], eps: f32) -> (f32, f32) {
        let n = x.len() as f32;
        let mean = sum_inline(x) / n;
        let mut lanes = [0.0_f32; 16];
        let (chunks, tail) = x.as_chunks::<16>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let centred = x - mean;
                *lane = fma::<FMA>(centred, centred, *lane);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(tail) {
            let centred = x - mean;
            *lane = fma::<FMA>(centred, centred, *lane);
        }
        (mean, 1.0 / (sum_inline(&lanes) / n + eps).sqrt())
    }

    /// out = (x - mean) * rstd * w + b
    fn normalise<const FMA: bool>(out: &mut [f32], x: &[f32], stats: (f32, f32), w: &[f32], b: &[f32]) {
        let (mean, rstd) = stats;
        for (((out, x), w), b) in out.iter_mut().zip(x).zip(w).zip(b) {
            *out = fma::<FMA>((x - mean) * rstd, *w, *b);
        }
    }

    /// One row of the input gradient.
    fn row_bwd<const FMA: bool>(d_inp: &mut [f32], d_out: &[f32], x: &[f32], stats: (f32, f32), w: &[f32], adds: bool) {
        let (mean, rstd) = stats;
        let (mut sums, mut dots) = ([0.0_f32; 16], [0.0_f32; 16]);
        let mut tally = |i: usize, d: f32, w: f32, x: f32| {
            let g = d * w;
            sums[i] += g;
            dots[i] = fma::<FMA>(g, (x - mean) * rstd, dots[i]);
        };
        let ((d_chunks, d_tail), (w_chunks, w_tail), (x_chunks, x_tail)) =
            (d_out.as_chunks::<16>(), w.as_chunks::<16>(), x.as_chunks::<16>());
        for ((d, w), x) in d_chunks.iter().zip(w_chunks).zip(x_chunks) {
            for i in 0..16 {
                tally(i, d[i], w[i], x[i]);
            }
        }
        for (i, ((d, w), x)) in d_tail.iter().zip(w_tail).zip(x_tail).enumerate() {
            tally(i, *d, *w, *x);
        }
        let n = x.len() as f32;
        let (mean_g, mean_gx) = (sum_inline(&sums) / n, sum_inline(&dots) / n);
        let row = d_inp.iter_mut().zip(d_out).zip(w).zip(x);
        for (((d_inp, d), w), x) in row {
            let xhat = (x - mean) * rstd;
            let value = (d * w - mean_g - xhat * mean_gx) * rstd;
            *d_inp = if adds { *d_inp + value } else { value };
        }
    }

    /// sums += d, dots += d * x̂ on a piece of a row.
    fn column_tally<const FMA: bool>(sums: &mut [f32], dots: &mut [f32], d: &[f32], x: &[f32], stats: (f32, f32)) {
        let (mean, rstd) = stats;
        for (((sum, dot), d), x) in sums.iter_mut().zip(dots.iter_mut()).zip(d).zip(x) {
            *sum += d;
            *dot = fma::<FMA>(*d, (x - mean) * rstd, *dot);
        }
    }
}

pub fn layernorm_fwd(ctx: &mut Ctx<'_>, op: &LayerNormFwd) -> Result<()> {
    let (out, mean, rstd) = (ctx.f32(op.out)?, ctx.f32(op.mean)?, ctx.f32(op.rstd)?);
    let (inp, weight, bias) = (ctx.f32(op.inp)?, ctx.f32(op.weight)?, ctx.f32(op.bias)?);
    let (isa, width, eps) = (ctx.isa, op.inp.shape.cols(), op.eps);
    ctx.chunks(op.inp.shape.rows(), ROWS, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of what is written; written slots share no memory with read ones.
            unsafe {
                let x = inp.get(r.clone());
                let stats = statistics(isa, x, eps);
                mean.get_mut(row..row + 1)[0] = stats.0;
                rstd.get_mut(row..row + 1)[0] = stats.1;
                normalise(isa, out.get_mut(r), x, stats, weight.all(), bias.all());
            }
        }
    })
}

pub fn residual_layernorm_fwd(ctx: &mut Ctx<'_>, op: &ResidualLayerNormFwd) -> Result<()> {
    let (residual, out) = (ctx.f32(op.residual)?, ctx.f32(op.out)?);
    let (mean, rstd) = (ctx.f32(op.mean)?, ctx.f32(op.rstd)?);
    let (a, b, weight, bias) = (ctx.f32(op.a)?, ctx.f32(op.b)?, ctx.f32(op.weight)?, ctx.f32(op.bias)?);
    let (isa, width, eps) = (ctx.isa, op.a.shape.cols(), op.eps);
    ctx.chunks(op.a.shape.rows(), ROWS, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows; `residual` is one of its terms or apart from both, every other
            // written slot is apart from all else.
            unsafe {
                add_range(isa, residual, a, b, r.clone());
                let x = residual.get(r.clone());
                let stats = statistics(isa, x, eps);
                mean.get_mut(row..row + 1)[0] = stats.0;
                rstd.get_mut(row..row + 1)[0] = stats.1;
                normalise(isa, out.get_mut(r), x, stats, weight.all(), bias.all());
            }
        }
    })
}

pub fn layernorm_apply(ctx: &mut Ctx<'_>, op: &LayerNormApply) -> Result<()> {
    let (out, inp, mean, rstd) = (ctx.f32(op.out)?, ctx.f32(op.inp)?, ctx.f32(op.mean)?, ctx.f32(op.rstd)?);
    let (weight, bias) = (ctx.f32(op.weight)?, ctx.f32(op.bias)?);
    let (isa, width) = (ctx.isa, op.inp.shape.cols());
    ctx.chunks(op.inp.shape.rows(), ROWS, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of `out`, which shares no memory with anything read.
            unsafe {
                let stats = (mean.all()[row], rstd.all()[row]);
                normalise(isa, out.get_mut(r.clone()), inp.get(r), stats, weight.all(), bias.all());
            }
        }
    })
}

pub fn layernorm_bwd(ctx: &mut Ctx<'_>, op: &LayerNormBwd) -> Result<()> {
    let (d_inp, d_weight, d_bias) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_weight)?, ctx.f32(op.d_bias)?);
    let (d_out, inp, weight) = (ctx.f32(op.d_out)?, ctx.f32(op.inp)?, ctx.f32(op.weight)?);
    let (mean, rstd) = (ctx.f32(op.mean)?, ctx.f32(op.rstd)?);
    let (isa, rows, width) = (ctx.isa, op.inp.shape.rows(), op.inp.shape.cols());
    let micro_step = ctx.scalars.micro_step;
    let (adds_inp, adds) = (op.accum_inp.adds(micro_step), op.accum.adds(micro_step));
    // SAFETY: nothing writes the statistics or the weight while the op runs.
    let (mean, rstd, weight) = unsafe { (mean.all(), rstd.all(), weight.all()) };

    ctx.chunks(rows, ROWS, |rows, _| {
        for row in rows {
            let r = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows of `d_inp`, which shares no memory with anything read.
            unsafe {
                let (d, x) = (d_out.get(r.clone()), inp.get(r.clone()));
                row_bwd(isa, d_inp.get_mut(r), d, x, (mean[row], rstd[row]), weight, adds_inp);
            }
        }
    })?;
    ctx.chunks(width, COLS, |cols, _| {
        let n = cols.len();
        let (mut sums, mut dots) = ([0.0_f32; COLS], [0.0_f32; COLS]);
        for first in (0..rows).step_by(BLOCK) {
            let (mut block_sums, mut block_dots) = ([0.0_f32; COLS], [0.0_f32; COLS]);
            for row in first..rows.min(first + BLOCK) {
                let r = row * width + cols.start..row * width + cols.end;
                // SAFETY: nothing writes `d_out` and `inp` while the op runs.
                let (d, x) = unsafe { (d_out.get(r.clone()), inp.get(r)) };
                column_tally(isa, &mut block_sums[..n], &mut block_dots[..n], d, x, (mean[row], rstd[row]));
            }
            for i in 0..n {
                sums[i] += block_sums[i];
                dots[i] += block_dots[i];
            }
        }
        // SAFETY: tasks have disjoint columns of the two gradients, which share no memory with anything else.
        unsafe {
            super::store(d_bias.get_mut(cols.clone()), &sums[..n], adds);
            super::store(d_weight.get_mut(cols), &dots[..n], adds);
        }
    })
}
