//! Layer norm and RMSNorm over the last dimension.

use super::call::TorchCall;
use super::kernel::{Outputs, ops};
use super::tensor::Tensor;
use ironhorse::core::eager::{LayerNorm, LayerNormBwd, RmsNorm, RmsNormBwd};
use ironhorse::ops::Result;

ops! {
    "rmsnorm", "(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
        (x: tensor, weight: tensor, eps: float) => rmsnorm(x, weight, eps);
    "rmsnorm_bwd",
        "(Tensor d_y, Tensor x, Tensor weight, Tensor rstd, bool need_x, bool need_weight) -> (Tensor, Tensor)",
        (d_y: tensor, x: tensor, weight: tensor, rstd: tensor, need_x: boolean, need_weight: boolean)
        => rmsnorm_bwd(Kept { d_y, x, weight, mean: None, rstd }, [need_x, need_weight]);
    "layernorm", "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
        (x: tensor, weight: tensor, bias: tensor, eps: float) => layernorm(x, weight, bias, eps);
    "layernorm_bwd",
        "(Tensor d_y, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool need_x, bool need_weight, bool need_bias) \
         -> (Tensor, Tensor, Tensor)",
        (d_y: tensor, x: tensor, weight: tensor, mean: tensor, rstd: tensor,
         need_x: boolean, need_weight: boolean, need_bias: boolean)
        => layernorm_bwd(Kept { d_y, x, weight, mean: Some(mean), rstd }, [need_x, need_weight, need_bias]);
}

/// The sizes of a tensor without the last.
fn outer<T: Tensor>(x: &T) -> &[i64] {
    &x.sizes()[..x.sizes().len() - 1]
}

fn rmsnorm<T: Tensor>(x: T, weight: T, eps: f64) -> Result<Outputs<T>> {
    let call = TorchCall::new("rmsnorm", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    let (x, weight) = (call.dense(x)?, call.dense(weight)?);
    let (out, rstd): (T, T) = (call.out(x.sizes(), call.float)?, call.out(outer(&x), call.acc())?);
    let kept = call.statistic(&rstd);
    let [x, weight, y] = [&x, &weight, &out].map(|tensor| call.array(tensor));
    // SAFETY: x and y have the rows, weight one row, rstd one number per row, contiguous; outputs are new.
    unsafe { call.eager::<T>(&RmsNorm { x, weight, y, rstd: kept, rows, eps }) }?;
    Ok([Some(out), Some(rstd), None])
}

/// What the backward of a norm needs. RMSNorm has no mean.
struct Kept<T> {
    d_y: T,
    x: T,
    weight: T,
    mean: Option<T>,
    rstd: T,
}

impl<T: Tensor> Kept<T> {
    /// Checked against x, and contiguous.
    fn checked(self, op: &'static str) -> Result<(TorchCall, Self)> {
        let Self { d_y, x, weight, mean, rstd } = self;
        let call = TorchCall::new(op, "x", &x)?;
        call.same("d_y", &d_y, x.sizes())?;
        call.same("weight", &weight, &[call.rows("x", &x)?.cols as i64])?;
        for (name, statistic) in [("mean", mean.as_ref()), ("rstd", Some(&rstd))] {
            statistic.map_or(Ok(()), |statistic| call.tensor(name, statistic, call.acc(), outer(&x)))?;
        }
        let (d_y, x, weight) = (call.dense(d_y)?, call.dense(x)?, call.dense(weight)?);
        let mean = mean.map(|mean| call.dense(mean)).transpose()?;
        let rstd = call.dense(rstd)?;
        Ok((call, Self { d_y, x, weight, mean, rstd }))
    }
}

fn rmsnorm_bwd<T: Tensor>(kept: Kept<T>, need: [bool; 2]) -> Result<Outputs<T>> {
    let (call, Kept { d_y, x, weight, rstd, .. }) = kept.checked("rmsnorm_bwd")?;
    let d_x = call.wanted::<T>(need[0], x.sizes(), call.float)?;
    let d_weight = call.wanted::<T>(need[1], weight.sizes(), call.float)?;
    let op = RmsNormBwd {
        d_y: call.array(&d_y),
        x: call.array(&x),
        weight: call.array(&weight),
        rstd: call.statistic(&rstd),
        d_x: d_x.array,
        d_weight: d_weight.array,
        rows: call.rows("x", &x)?,
    };
    // SAFETY: as in the forward; outputs that are not wanted are null.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_x.tensor), Some(d_weight.tensor), None])
}

fn layernorm<T: Tensor>(x: T, weight: T, bias: T, eps: f64) -> Result<Outputs<T>> {
    let call = TorchCall::new("layernorm", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    call.same("bias", &bias, &[rows.cols as i64])?;
    let (x, weight, bias) = (call.dense(x)?, call.dense(weight)?, call.dense(bias)?);
    let out: T = call.out(x.sizes(), call.float)?;
    let (mean, rstd): (T, T) = (call.out(outer(&x), call.acc())?, call.out(outer(&x), call.acc())?);
    let kept = [call.statistic(&mean), call.statistic(&rstd)];
    let [x, weight, bias, y] = [&x, &weight, &bias, &out].map(|tensor| call.array(tensor));
    // SAFETY: as in `rmsnorm`.
    unsafe { call.eager::<T>(&LayerNorm { x, weight, bias, y, mean: kept[0], rstd: kept[1], rows, eps }) }?;
    Ok([Some(out), Some(mean), Some(rstd)])
}

fn layernorm_bwd<T: Tensor>(kept: Kept<T>, need: [bool; 3]) -> Result<Outputs<T>> {
    let (call, Kept { d_y, x, weight, mean, rstd }) = kept.checked("layernorm_bwd")?;
    let mean = mean.as_ref().map_or(call.statistic(&rstd), |mean| call.statistic(mean));
    let d_x = call.wanted::<T>(need[0], x.sizes(), call.float)?;
    let d_weight = call.wanted::<T>(need[1], weight.sizes(), call.float)?;
    let d_bias = call.wanted::<T>(need[2], weight.sizes(), call.float)?;
    let op = LayerNormBwd {
        d_y: call.array(&d_y),
        x: call.array(&x),
        weight: call.array(&weight),
        mean,
        rstd: call.statistic(&rstd),
        d_x: d_x.array,
        d_weight: d_weight.array,
        d_bias: d_bias.array,
        rows: call.rows("x", &x)?,
    };
    // SAFETY: as in the forward; outputs that are not wanted are null.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_x.tensor), Some(d_weight.tensor), Some(d_bias.tensor)])
}
