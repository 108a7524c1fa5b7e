//! Layer normalisation over the last dimension.

use super::{Pools, Step};
use ironhorse_core::Result;
use ironhorse_core::op::{LayerNormApply, LayerNormBwd, LayerNormFwd};

/// Mean and `1/√(var + eps)` of a row; the variance is the biased one.
pub(crate) fn stats(row: &[f64], eps: f64) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    (mean, 1.0 / (var + eps).sqrt())
}

pub(super) fn fwd(pools: &mut Pools, op: &LayerNormFwd) -> Result<()> {
    let inp = pools.read(op.inp)?;
    let (mut mean, mut rstd) = (Vec::new(), Vec::new());
    for row in inp.chunks_exact(op.inp.shape.cols()) {
        let (m, r) = stats(row, f64::from(op.eps));
        mean.push(m);
        rstd.push(r);
    }
    pools.write(op.mean, &mean)?;
    pools.write(op.rstd, &rstd)?;
    let LayerNormFwd { out, mean, rstd, inp, weight, bias, .. } = *op;
    apply(pools, &LayerNormApply { out, inp, mean, rstd, weight, bias })
}

pub(super) fn apply(pools: &mut Pools, op: &LayerNormApply) -> Result<()> {
    let width = op.inp.shape.cols();
    let (inp, mean, rstd) = (pools.read(op.inp)?, pools.read(op.mean)?, pools.read(op.rstd)?);
    let (weight, bias) = (pools.read(op.weight)?, pools.read(op.bias)?);
    let mut out = vec![0.0; inp.len()];
    for r in 0..op.inp.shape.rows() {
        for c in 0..width {
            out[r * width + c] = (inp[r * width + c] - mean[r]) * rstd[r] * weight[c] + bias[c];
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &LayerNormBwd, step: Step) -> Result<()> {
    let (rows, width) = (op.inp.shape.rows(), op.inp.shape.cols());
    let (d_out, inp, weight) = (pools.read(op.d_out)?, pools.read(op.inp)?, pools.read(op.weight)?);
    let (mean, rstd) = (pools.read(op.mean)?, pools.read(op.rstd)?);
    let mut d_inp = vec![0.0; inp.len()];
    let mut d_weight = vec![0.0; width];
    let mut d_bias = vec![0.0; width];
    for r in 0..rows {
        let row = r * width..(r + 1) * width;
        let x_hat: Vec<f64> = inp[row.clone()].iter().map(|x| (x - mean[r]) * rstd[r]).collect();
        let g: Vec<f64> = d_out[row].iter().zip(&weight).map(|(d, w)| d * w).collect();
        let mean_g = g.iter().sum::<f64>() / width as f64;
        let mean_gx = g.iter().zip(&x_hat).map(|(g, x)| g * x).sum::<f64>() / width as f64;
        for c in 0..width {
            d_inp[r * width + c] = rstd[r] * (g[c] - mean_g - x_hat[c] * mean_gx);
            d_weight[c] += d_out[r * width + c] * x_hat[c];
            d_bias[c] += d_out[r * width + c];
        }
    }
    let micro_step = step.scalars.added();
    pools.store(op.d_inp, &d_inp, op.accum_inp.adds(micro_step))?;
    pools.store(op.d_weight, &d_weight, op.accum.adds(micro_step))?;
    pools.store(op.d_bias, &d_bias, op.accum.adds(micro_step))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd};

    /// Row (1, 3): mean 2, variance 1; with eps 3 rstd is 1/2, so x̂ = (-1/2, 1/2).
    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("layernorm");
        let op = LayerNormFwd {
            out: kit.slot([1, 2]),
            mean: kit.slot([1]),
            rstd: kit.slot([1]),
            inp: kit.f32s([1, 2], &[1.0, 3.0]),
            weight: kit.f32s([2], &[2.0, 4.0]),
            bias: kit.f32s([2], &[10.0, 20.0]),
            eps: 3.0,
        };
        let case = kit.finish(op);
        case.expect_f64(op.mean, &[2.0]);
        case.expect_f64(op.rstd, &[0.5]);
        case.expect_f64(op.out, &[9.0, 22.0]);
    }

    #[test]
    fn residual_fwd_by_hand() {
        let mut kit = Kit::new("layernorm");
        let op = ResidualLayerNormFwd {
            residual: kit.slot([1, 2]),
            out: kit.slot([1, 2]),
            mean: kit.slot([1]),
            rstd: kit.slot([1]),
            a: kit.f32s([1, 2], &[0.0, 5.0]),
            b: kit.f32s([1, 2], &[1.0, -2.0]),
            weight: kit.f32s([2], &[2.0, 4.0]),
            bias: kit.f32s([2], &[10.0, 20.0]),
            eps: 3.0,
        };
        let case = kit.finish(op);
        case.expect_f64(op.residual, &[1.0, 3.0]);
        case.expect_f64(op.mean, &[2.0]);
        case.expect_f64(op.rstd, &[0.5]);
        case.expect_f64(op.out, &[9.0, 22.0]);
    }

    /// The given statistics are used, here different from those of the row.
    #[test]
    fn apply_by_hand() {
        let mut kit = Kit::new("layernorm");
        let op = LayerNormApply {
            out: kit.slot([1, 2]),
            mean: kit.f32s([1], &[1.0]),
            rstd: kit.f32s([1], &[2.0]),
            inp: kit.f32s([1, 2], &[1.0, 3.0]),
            weight: kit.f32s([2], &[2.0, 3.0]),
            bias: kit.f32s([2], &[10.0, 20.0]),
        };
        kit.finish(op).expect_f64(op.out, &[10.0, 32.0]);
    }

    /// x̂ = (-1/2, 1/2), g = (1·2, 1·4) = (2, 4), mean(g) = 3, mean(g·x̂) = 1/2:
    /// d_inp = 1/2·(2 - 3 + 1/4, 4 - 3 - 1/4) = (-3/8, 3/8); d_weight = x̂; d_bias = 1.
    #[test]
    fn bwd_by_hand() {
        for (accum_inp, accum) in [(Accum::Write, Accum::Add), (Accum::Add, Accum::FirstWrites)] {
            let mut kit = Kit::new("layernorm");
            let op = LayerNormBwd {
                d_inp: kit.f32s([1, 2], &[100.0, 200.0]),
                d_weight: kit.f32s([2], &[10.0, 20.0]),
                d_bias: kit.f32s([2], &[30.0, 40.0]),
                d_out: kit.f32s([1, 2], &[1.0, 1.0]),
                mean: kit.f32s([1], &[2.0]),
                rstd: kit.f32s([1], &[0.5]),
                inp: kit.f32s([1, 2], &[1.0, 3.0]),
                weight: kit.f32s([2], &[2.0, 4.0]),
                accum_inp,
                accum,
            };
            let case = kit.finish(op);
            if accum == Accum::Add {
                case.expect_f64(op.d_inp, &[-0.375, 0.375]);
                case.expect_f64(op.d_weight, &[9.5, 20.5]);
                case.expect_f64(op.d_bias, &[31.0, 41.0]);
            } else {
                case.expect_f64(op.d_inp, &[99.625, 200.375]);
                case.expect_f64(op.d_weight, &[-0.5, 0.5]);
                case.expect_f64(op.d_bias, &[1.0, 1.0]);
            }
        }
    }
}
