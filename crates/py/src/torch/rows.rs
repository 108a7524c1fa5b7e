//! Over rows of the last dimension.

use super::call::Call;
use super::kernel::{Outputs, op};
use super::tensor::{Dtype, Tensor};
use ironhorse::eager::{self, Gate};
use ironhorse::ops::Result;

op!(ScaleBiasRelu, "fused_scale_bias_relu", "(Tensor x, Tensor bias, float scale) -> Tensor",
    (x: tensor, bias: tensor, scale: float) scale_bias_relu(x, bias, scale));
op!(ScaleBiasReluGated, "fused_scale_bias_relu_gated",
    "(Tensor x, Tensor bias, float scale) -> (Tensor y, Tensor gate)",
    (x: tensor, bias: tensor, scale: float) scale_bias_relu_gated(x, bias, scale));
op!(ScaleBiasReluBwd, "fused_scale_bias_relu_bwd",
    "(Tensor d_y, Tensor y, float scale, bool need_x, bool need_bias) -> (Tensor, Tensor)",
    (d_y: tensor, y: tensor, scale: float, need_x: boolean, need_bias: boolean)
    scale_bias_relu_bwd(d_y, y, scale, [need_x, need_bias]));

op!(Softmax, "softmax", "(Tensor x) -> Tensor", (x: tensor) softmax(x));
op!(SoftmaxBwd, "softmax_bwd", "(Tensor d_y, Tensor y) -> Tensor", (d_y: tensor, y: tensor) softmax_bwd(d_y, y));

op!(Rmsnorm, "rmsnorm", "(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    (x: tensor, weight: tensor, eps: float) rmsnorm(x, weight, eps));
op!(RmsnormBwd, "rmsnorm_bwd",
    "(Tensor d_y, Tensor x, Tensor weight, Tensor rstd, bool need_x, bool need_weight) -> (Tensor, Tensor)",
    (d_y: tensor, x: tensor, weight: tensor, rstd: tensor, need_x: boolean, need_weight: boolean)
    rmsnorm_bwd([d_y, x, weight, rstd], [need_x, need_weight]));

op!(Layernorm, "layernorm",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    (x: tensor, weight: tensor, bias: tensor, eps: float) layernorm(x, weight, bias, eps));
op!(LayernormBwd, "layernorm_bwd",
    "(Tensor d_y, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool need_x, bool need_weight, bool need_bias) \
     -> (Tensor, Tensor, Tensor)",
    (d_y: tensor, x: tensor, weight: tensor, mean: tensor, rstd: tensor,
     need_x: boolean, need_weight: boolean, need_bias: boolean)
    layernorm_bwd([d_y, x, weight, mean, rstd], [need_x, need_weight, need_bias]));

/// The sides of a tensor without the last, which has `cols` elements.
fn outer<T: Tensor>(x: &T) -> &[i64] {
    &x.sizes()[..x.sizes().len() - 1]
}

fn scale_bias_relu<T: Tensor>(x: T, bias: T, scale: f64) -> Result<Outputs<T>> {
    let call = Call::new("fused_scale_bias_relu", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("bias", &bias, &[rows.cols as i64])?;
    let (x, bias) = (call.dense(x)?, call.dense(bias)?);
    let y: T = call.out(x.sizes(), call.float)?;
    let (inputs, outputs) =
        ([x.array(call.float), bias.array(call.float)], (y.array(call.float), std::ptr::null_mut()));
    // SAFETY: x and y have the rows, bias one row, of the type, side by side, where the call runs; y is new.
    call.run::<T>(|at| unsafe { eager::scale_bias_relu(at, inputs, outputs, rows, scale) })?;
    Ok([Some(y), None, None])
}

/// With the gate of the gradient as bits: an eighth of a byte an element for the backward to read, instead of y. Where that is not
/// to be had, the gate has no elements.
fn scale_bias_relu_gated<T: Tensor>(x: T, bias: T, scale: f64) -> Result<Outputs<T>> {
    let call = Call::new("fused_scale_bias_relu", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("bias", &bias, &[rows.cols as i64])?;
    let (x, bias) = (call.dense(x)?, call.dense(bias)?);
    let y: T = call.out(x.sizes(), call.float)?;
    let inputs = [x.array(call.float), bias.array(call.float)];
    let arrays = [inputs[0], inputs[1], y.array(call.float)];
    let bytes = if call.on_host() { 0 } else { eager::gate_bytes(&arrays, rows, call.float) };
    let gate = T::empty(&[bytes as i64], &[1], Dtype::U8, y.device())?;
    let kept = if bytes == 0 { std::ptr::null_mut() } else { gate.data() };
    // SAFETY: as `scale_bias_relu`; the gate is new and as large as it must be.
    call.run::<T>(|at| unsafe { eager::scale_bias_relu(at, inputs, (arrays[2], kept), rows, scale) })?;
    Ok([Some(y), Some(gate), None])
}

/// `y` is the result of the forward, or its gate.
fn scale_bias_relu_bwd<T: Tensor>(d_y: T, y: T, scale: f64, need: [bool; 2]) -> Result<Outputs<T>> {
    let call = Call::new("fused_scale_bias_relu_bwd", "d_y", &d_y)?;
    let rows = call.rows("d_y", &d_y)?;
    let by_bits = y.dtype() == Dtype::U8;
    if by_bits {
        call.sides("y", &y, &[(rows.elements() / 8) as i64])?;
    } else {
        call.same("y", &y, d_y.sizes())?;
    }
    let d_x = call.wanted::<T>(need[0], d_y.sizes(), call.float)?;
    let d_bias = call.wanted::<T>(need[1], &[rows.cols as i64], call.float)?;
    // What `sum()` sends back is one number seen everywhere.
    let same = !call.on_host() && d_y.elements() > 0 && d_y.strides().iter().all(|&stride| stride == 0);
    let y = call.dense(y)?;
    let d_y = match (same, by_bits && !d_y.data().addr().is_multiple_of(16)) {
        (true, _) => d_y,
        (false, true) => call.copied(&d_y)?,
        (false, false) => call.dense(d_y)?,
    };
    let gate = if by_bits { Gate::Bits(y.data()) } else { Gate::Result(y.array(call.float)) };
    let (d_y, outputs) = ((d_y.array(call.float), same), [d_x.array, d_bias.array]);
    // SAFETY: as forward; what is not wanted is null.
    call.run::<T>(|at| unsafe { eager::scale_bias_relu_bwd(at, d_y, gate, outputs, rows, scale) })?;
    Ok([Some(d_x.tensor), Some(d_bias.tensor), None])
}

fn softmax<T: Tensor>(x: T) -> Result<Outputs<T>> {
    let call = Call::new("softmax", "x", &x)?;
    let rows = call.rows("x", &x)?;
    let x = call.dense(x)?;
    let y: T = call.out(x.sizes(), call.float)?;
    // SAFETY: both have the rows, of the type, side by side, where the call runs; y is new.
    call.run::<T>(|at| unsafe { eager::softmax(at, x.array(call.float), y.array(call.float), rows) })?;
    Ok([Some(y), None, None])
}

fn softmax_bwd<T: Tensor>(d_y: T, y: T) -> Result<Outputs<T>> {
    let call = Call::new("softmax_bwd", "y", &y)?;
    let rows = call.rows("y", &y)?;
    call.same("d_y", &d_y, y.sizes())?;
    let (d_y, y) = (call.dense(d_y)?, call.dense(y)?);
    let d_x: T = call.out(y.sizes(), call.float)?;
    let inputs = [d_y.array(call.float), y.array(call.float)];
    // SAFETY: as forward.
    call.run::<T>(|at| unsafe { eager::softmax_bwd(at, inputs, d_x.array(call.float), rows) })?;
    Ok([Some(d_x), None, None])
}

fn rmsnorm<T: Tensor>(x: T, weight: T, eps: f64) -> Result<Outputs<T>> {
    let call = Call::new("rmsnorm", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    let (x, weight) = (call.dense(x)?, call.dense(weight)?);
    let (y, rstd): (T, T) = (call.out(x.sizes(), call.float)?, call.out(outer(&x), call.acc())?);
    let inputs = [x.array(call.float), weight.array(call.float)];
    let outputs = [y.array(call.float), rstd.array(call.acc())];
    // SAFETY: x and y have the rows, weight one row, rstd one number a row, side by side, where the call runs; outputs are new.
    call.run::<T>(|at| unsafe { eager::rmsnorm(at, inputs, outputs, rows, eps) })?;
    Ok([Some(y), Some(rstd), None])
}

fn rmsnorm_bwd<T: Tensor>([d_y, x, weight, rstd]: [T; 4], need: [bool; 2]) -> Result<Outputs<T>> {
    let call = Call::new("rmsnorm_bwd", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("d_y", &d_y, x.sizes())?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    call.tensor("rstd", &rstd, call.acc(), outer(&x))?;
    let (d_y, x, weight, rstd) = (call.dense(d_y)?, call.dense(x)?, call.dense(weight)?, call.dense(rstd)?);
    let d_x = call.wanted::<T>(need[0], x.sizes(), call.float)?;
    let d_weight = call.wanted::<T>(need[1], weight.sizes(), call.float)?;
    let inputs =
        [d_y.array(call.float), x.array(call.float), weight.array(call.float), rstd.array(call.acc())];
    // SAFETY: as forward; what is not wanted is null.
    call.run::<T>(|at| unsafe { eager::rmsnorm_bwd(at, inputs, [d_x.array, d_weight.array], rows) })?;
    Ok([Some(d_x.tensor), Some(d_weight.tensor), None])
}

fn layernorm<T: Tensor>(x: T, weight: T, bias: T, eps: f64) -> Result<Outputs<T>> {
    let call = Call::new("layernorm", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    call.same("bias", &bias, &[rows.cols as i64])?;
    let (x, weight, bias) = (call.dense(x)?, call.dense(weight)?, call.dense(bias)?);
    let y: T = call.out(x.sizes(), call.float)?;
    let (mean, rstd): (T, T) = (call.out(outer(&x), call.acc())?, call.out(outer(&x), call.acc())?);
    let inputs = [x.array(call.float), weight.array(call.float), bias.array(call.float)];
    let outputs = [y.array(call.float), mean.array(call.acc()), rstd.array(call.acc())];
    // SAFETY: as `rmsnorm`.
    call.run::<T>(|at| unsafe { eager::layernorm(at, inputs, outputs, rows, eps) })?;
    Ok([Some(y), Some(mean), Some(rstd)])
}

fn layernorm_bwd<T: Tensor>([d_y, x, weight, mean, rstd]: [T; 5], need: [bool; 3]) -> Result<Outputs<T>> {
    let call = Call::new("layernorm_bwd", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("d_y", &d_y, x.sizes())?;
    call.same("weight", &weight, &[rows.cols as i64])?;
    call.tensor("mean", &mean, call.acc(), outer(&x))?;
    call.tensor("rstd", &rstd, call.acc(), outer(&x))?;
    let (d_y, x, weight) = (call.dense(d_y)?, call.dense(x)?, call.dense(weight)?);
    let (mean, rstd) = (call.dense(mean)?, call.dense(rstd)?);
    let d_x = call.wanted::<T>(need[0], x.sizes(), call.float)?;
    let d_weight = call.wanted::<T>(need[1], weight.sizes(), call.float)?;
    let d_bias = call.wanted::<T>(need[2], weight.sizes(), call.float)?;
    let arrays = [d_y.array(call.float), x.array(call.float), weight.array(call.float)];
    let inputs = [arrays[0], arrays[1], arrays[2], mean.array(call.acc()), rstd.array(call.acc())];
    let outputs = [d_x.array, d_weight.array, d_bias.array];
    // SAFETY: as `rmsnorm_bwd`.
    call.run::<T>(|at| unsafe { eager::layernorm_bwd(at, inputs, outputs, rows) })?;
    Ok([Some(d_x.tensor), Some(d_weight.tensor), Some(d_bias.tensor)])
}
