//! Ops on the rows of the last dimension; norms are in `norms.rs`.

use super::call::TorchCall;
use super::kernel::{Outputs, ops};
use super::tensor::{Dtype, Tensor};
use ironhorse::core::eager::{Gate, ScaleBiasRelu, ScaleBiasReluBwd, Softmax, SoftmaxBwd};
use ironhorse::eager::gate_bytes;
use ironhorse::ops::Result;

ops! {
    "fused_scale_bias_relu", "(Tensor x, Tensor bias, float scale) -> Tensor",
        (x: tensor, bias: tensor, scale: float) => scale_bias_relu(x, bias, scale, false);
    "fused_scale_bias_relu_gated", "(Tensor x, Tensor bias, float scale) -> (Tensor y, Tensor gate)",
        (x: tensor, bias: tensor, scale: float) => scale_bias_relu(x, bias, scale, true);
    "fused_scale_bias_relu_bwd",
        "(Tensor d_y, Tensor y, float scale, bool need_x, bool need_bias) -> (Tensor, Tensor)",
        (d_y: tensor, y: tensor, scale: float, need_x: boolean, need_bias: boolean)
        => scale_bias_relu_bwd(d_y, y, scale, [need_x, need_bias]);
    "softmax", "(Tensor x) -> Tensor", (x: tensor) => softmax(x);
    "softmax_bwd", "(Tensor d_y, Tensor y) -> Tensor", (d_y: tensor, y: tensor) => softmax_bwd(d_y, y);
}

/// The result y and, with `gated`, one bit per element for the backward to read instead of y, where the GPU supports it; else the
/// gate has no elements.
fn scale_bias_relu<T: Tensor>(x: T, bias: T, scale: f64, gated: bool) -> Result<Outputs<T>> {
    let call = TorchCall::new("fused_scale_bias_relu", "x", &x)?;
    let rows = call.rows("x", &x)?;
    call.same("bias", &bias, &[rows.cols as i64])?;
    let (x, bias) = (call.dense(x)?, call.dense(bias)?);
    let out: T = call.out(x.sizes(), call.float)?;
    let arrays = [&x, &bias, &out].map(|tensor| call.array(tensor));
    let bytes = if gated && !call.on_host() { gate_bytes(&arrays, rows, call.float) } else { 0 };
    let kept: Option<T> =
        if gated { Some(T::empty(&[bytes as i64], &[1], Dtype::U8, out.device())?) } else { None };
    let gate = kept.as_ref().filter(|_| bytes > 0).map_or(std::ptr::null_mut(), Tensor::data);
    let [x, bias, y] = arrays;
    // SAFETY: x and y have the rows, bias one row, contiguous; y is new, and so is the gate, of `gate_bytes`.
    unsafe { call.eager::<T>(&ScaleBiasRelu { x, bias, y, gate, rows, scale }) }?;
    Ok([Some(out), kept, None])
}

/// `y` is the result of the forward, or its gate.
fn scale_bias_relu_bwd<T: Tensor>(d_y: T, y: T, scale: f64, need: [bool; 2]) -> Result<Outputs<T>> {
    let call = TorchCall::new("fused_scale_bias_relu_bwd", "d_y", &d_y)?;
    let rows = call.rows("d_y", &d_y)?;
    let by_bits = y.dtype() == Dtype::U8;
    if by_bits {
        call.sized("y", &y, &[(rows.elements() / 8) as i64])?;
    } else {
        call.same("y", &y, d_y.sizes())?;
    }
    let d_x = call.wanted::<T>(need[0], d_y.sizes(), call.float)?;
    let d_bias = call.wanted::<T>(need[1], &[rows.cols as i64], call.float)?;
    // The gradient of `sum()` is one number, expanded to all elements.
    let expanded = !call.on_host() && d_y.elements() > 0 && d_y.strides().iter().all(|&stride| stride == 0);
    let y = call.dense(y)?;
    let d_y = match (expanded, by_bits && !d_y.data().addr().is_multiple_of(16)) {
        (true, _) => d_y,
        (false, true) => call.copied(&d_y)?,
        (false, false) => call.dense(d_y)?,
    };
    let op = ScaleBiasReluBwd {
        d_y: call.array(&d_y),
        expanded,
        gate: if by_bits { Gate::Bits(y.data()) } else { Gate::Result(call.array(&y)) },
        d_x: d_x.array,
        d_bias: d_bias.array,
        rows,
        scale,
    };
    // SAFETY: as in the forward; outputs that are not wanted are null.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_x.tensor), Some(d_bias.tensor), None])
}

fn softmax<T: Tensor>(x: T) -> Result<Outputs<T>> {
    let call = TorchCall::new("softmax", "x", &x)?;
    let rows = call.rows("x", &x)?;
    let x = call.dense(x)?;
    let y: T = call.out(x.sizes(), call.float)?;
    // SAFETY: both have the rows, contiguous; y is new.
    unsafe { call.eager::<T>(&Softmax { x: call.array(&x), y: call.array(&y), rows }) }?;
    Ok([Some(y), None, None])
}

fn softmax_bwd<T: Tensor>(d_y: T, y: T) -> Result<Outputs<T>> {
    let call = TorchCall::new("softmax_bwd", "y", &y)?;
    let rows = call.rows("y", &y)?;
    call.same("d_y", &d_y, y.sizes())?;
    let (d_y, y) = (call.dense(d_y)?, call.dense(y)?);
    let out: T = call.out(y.sizes(), call.float)?;
    let [d_y, y, d_x] = [&d_y, &y, &out].map(|tensor| call.array(tensor));
    // SAFETY: all have the rows, contiguous; d_x is new.
    unsafe { call.eager::<T>(&SoftmaxBwd { d_y, y, d_x, rows }) }?;
    Ok([Some(out), None, None])
}
