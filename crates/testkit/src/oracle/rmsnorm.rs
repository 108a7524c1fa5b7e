//! RMS normalisation over the last dimension.

use super::{Pools, Step};
use ironhorse_core::op::{Gain, RmsNormApply, RmsNormBwd, RmsNormFwd};
use ironhorse_core::{Result, Slot};

/// `1 / √(mean(row²) + eps)`.
pub(crate) fn rstd(row: &[f64], eps: f64) -> f64 {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    1.0 / (mean + eps).sqrt()
}

/// What columns are multiplied by.
pub(super) fn factors(pools: &Pools, weight: Slot, gain: Gain) -> Result<Vec<f64>> {
    let one = if gain == Gain::OnePlusWeight { 1.0 } else { 0.0 };
    Ok(pools.read(weight)?.into_iter().map(|weight| one + weight).collect())
}

pub(super) fn fwd(pools: &mut Pools, op: &RmsNormFwd) -> Result<()> {
    let inp = pools.read(op.inp)?;
    let all: Vec<f64> =
        inp.chunks_exact(op.inp.shape.cols()).map(|row| rstd(row, f64::from(op.eps))).collect();
    pools.write(op.rstd, &all)?;
    let RmsNormFwd { out, rstd, inp, weight, gain, .. } = *op;
    apply(pools, &RmsNormApply { out, inp, rstd, weight, gain })
}

pub(super) fn apply(pools: &mut Pools, op: &RmsNormApply) -> Result<()> {
    let width = op.inp.shape.cols();
    let (inp, rstd, weight) =
        (pools.read(op.inp)?, pools.read(op.rstd)?, factors(pools, op.weight, op.gain)?);
    let mut out = vec![0.0; inp.len()];
    for r in 0..op.inp.shape.rows() {
        for c in 0..width {
            out[r * width + c] = inp[r * width + c] * rstd[r] * weight[c];
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &RmsNormBwd, step: Step) -> Result<()> {
    let (rows, width) = (op.inp.shape.rows(), op.inp.shape.cols());
    let (d_out, inp, weight) =
        (pools.read(op.d_out)?, pools.read(op.inp)?, factors(pools, op.weight, op.gain)?);
    let rstd = pools.read(op.rstd)?;
    let mut d_inp = vec![0.0; inp.len()];
    let mut d_weight = vec![0.0; width];
    for r in 0..rows {
        let row = r * width..(r + 1) * width;
        let x_hat: Vec<f64> = inp[row.clone()].iter().map(|x| x * rstd[r]).collect();
        let g: Vec<f64> = d_out[row].iter().zip(&weight).map(|(d, w)| d * w).collect();
        let mean_gx = g.iter().zip(&x_hat).map(|(g, x)| g * x).sum::<f64>() / width as f64;
        for c in 0..width {
            d_inp[r * width + c] = rstd[r] * (g[c] - x_hat[c] * mean_gx);
            d_weight[c] += d_out[r * width + c] * x_hat[c];
        }
    }
    let micro_step = step.scalars.added();
    pools.store(op.d_inp, &d_inp, op.accum_inp.adds(micro_step))?;
    pools.store(op.d_weight, &d_weight, op.accum.adds(micro_step))
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, Gain, ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};

    /// Row (1, 3): the mean of the squares is 5; with eps 11 rstd is 1/4.
    #[test]
    fn fwd_by_hand() {
        let mut kit = Kit::new("rmsnorm");
        let op = RmsNormFwd {
            out: kit.slot([1, 2]),
            rstd: kit.slot([1]),
            inp: kit.f32s([1, 2], &[1.0, 3.0]),
            weight: kit.f32s([2], &[2.0, 4.0]),
            eps: 11.0,
            gain: Gain::Weight,
        };
        let case = kit.finish(op);
        case.expect_f64(op.rstd, &[0.25]);
        case.expect_f64(op.out, &[0.5, 3.0]);
    }

    #[test]
    fn residual_fwd_by_hand() {
        let mut kit = Kit::new("rmsnorm");
        let op = ResidualRmsNormFwd {
            residual: kit.slot([1, 2]),
            out: kit.slot([1, 2]),
            rstd: kit.slot([1]),
            a: kit.f32s([1, 2], &[0.0, 5.0]),
            b: kit.f32s([1, 2], &[1.0, -2.0]),
            weight: kit.f32s([2], &[2.0, 4.0]),
            eps: 11.0,
            gain: Gain::Weight,
        };
        let case = kit.finish(op);
        case.expect_f64(op.residual, &[1.0, 3.0]);
        case.expect_f64(op.rstd, &[0.25]);
        case.expect_f64(op.out, &[0.5, 3.0]);
    }

    /// The given statistic is used, here different from that of the row.
    #[test]
    fn apply_by_hand() {
        let mut kit = Kit::new("rmsnorm");
        let op = RmsNormApply {
            out: kit.slot([1, 2]),
            inp: kit.f32s([1, 2], &[1.0, 3.0]),
            rstd: kit.f32s([1], &[2.0]),
            weight: kit.f32s([2], &[2.0, 3.0]),
            gain: Gain::Weight,
        };
        kit.finish(op).expect_f64(op.out, &[4.0, 18.0]);
    }

    /// x̂ = (1/4, 3/4), g = (2, 4), mean(g·x̂) = 7/4: d_inp = 1/4·(2 - 7/16, 4 - 21/16); d_weight = x̂.
    #[test]
    fn bwd_by_hand() {
        for (accum_inp, accum) in [(Accum::Write, Accum::Add), (Accum::Add, Accum::FirstWrites)] {
            let mut kit = Kit::new("rmsnorm");
            let op = RmsNormBwd {
                d_inp: kit.f32s([1, 2], &[100.0, 200.0]),
                d_weight: kit.f32s([2], &[10.0, 20.0]),
                d_out: kit.f32s([1, 2], &[1.0, 1.0]),
                inp: kit.f32s([1, 2], &[1.0, 3.0]),
                rstd: kit.f32s([1], &[0.25]),
                weight: kit.f32s([2], &[2.0, 4.0]),
                accum_inp,
                accum,
                gain: Gain::Weight,
            };
            let case = kit.finish(op);
            if accum == Accum::Add {
                case.expect_f64(op.d_inp, &[0.390625, 0.671875]);
                case.expect_f64(op.d_weight, &[10.25, 20.75]);
            } else {
                case.expect_f64(op.d_inp, &[100.390625, 200.671875]);
                case.expect_f64(op.d_weight, &[0.25, 0.75]);
            }
        }
    }
}
