//! Elementwise ops.

use super::call::TorchCall;
use super::kernel::{Outputs, ops};
use super::tensor::Tensor;
use ironhorse::core::eager::{Binary, BinaryFn, SwigluBwd, Unary, UnaryBwd, UnaryFn};
use ironhorse::core::op::Act;
use ironhorse::ops::Result;

ops! {
    "square", "(Tensor x) -> Tensor", (x: tensor) => unary("square", UnaryFn::Square, x);
    "square_bwd", "(Tensor d_y, Tensor x) -> Tensor", (d_y: tensor, x: tensor)
        => unary_bwd("square_bwd", UnaryFn::Square, d_y, x);
    "silu", "(Tensor x) -> Tensor", (x: tensor) => unary("silu", UnaryFn::Silu, x);
    "silu_bwd", "(Tensor d_y, Tensor x) -> Tensor", (d_y: tensor, x: tensor)
        => unary_bwd("silu_bwd", UnaryFn::Silu, d_y, x);
    "gelu", "(Tensor x, bool tanh) -> Tensor", (x: tensor, tanh: boolean) => unary("gelu", gelu(tanh), x);
    "gelu_bwd", "(Tensor d_y, Tensor x, bool tanh) -> Tensor", (d_y: tensor, x: tensor, tanh: boolean)
        => unary_bwd("gelu_bwd", gelu(tanh), d_y, x);
    "relu2", "(Tensor x) -> Tensor", (x: tensor) => unary("relu2", UnaryFn::Act(Act::Relu2), x);
    "relu2_bwd", "(Tensor d_y, Tensor x) -> Tensor", (d_y: tensor, x: tensor)
        => unary_bwd("relu2_bwd", UnaryFn::Act(Act::Relu2), d_y, x);
    "swiglu", "(Tensor gate, Tensor up) -> Tensor", (gate: tensor, up: tensor) => swiglu(gate, up);
    "swiglu_bwd", "(Tensor d_y, Tensor gate, Tensor up, bool need_gate, bool need_up) -> (Tensor, Tensor)",
        (d_y: tensor, gate: tensor, up: tensor, need_gate: boolean, need_up: boolean)
        => swiglu_bwd(d_y, gate, up, [need_gate, need_up]);
}

fn gelu(tanh: bool) -> UnaryFn {
    if tanh { UnaryFn::Act(Act::Gelu) } else { UnaryFn::GeluErf }
}

fn unary<T: Tensor>(name: &'static str, op: UnaryFn, x: T) -> Result<Outputs<T>> {
    let call = TorchCall::new(name, "x", &x)?;
    let x = call.dense(x)?;
    let y: T = call.out(x.sizes(), call.float)?;
    // SAFETY: both are contiguous and have n elements; y is new.
    unsafe { call.eager::<T>(&Unary { op, x: call.array(&x), y: call.array(&y), n: x.elements() }) }?;
    Ok([Some(y), None, None])
}

fn unary_bwd<T: Tensor>(name: &'static str, op: UnaryFn, d_y: T, x: T) -> Result<Outputs<T>> {
    let call = TorchCall::new(name, "x", &x)?;
    call.same("d_y", &d_y, x.sizes())?;
    let (d_y, x) = (call.dense(d_y)?, call.dense(x)?);
    let d_x: T = call.out(x.sizes(), call.float)?;
    let [d_y, from, to] = [&d_y, &x, &d_x].map(|tensor| call.array(tensor));
    // SAFETY: all are contiguous and have n elements; d_x is new.
    unsafe { call.eager::<T>(&UnaryBwd { op, d_y, x: from, d_x: to, n: x.elements() }) }?;
    Ok([Some(d_x), None, None])
}

fn swiglu<T: Tensor>(gate: T, up: T) -> Result<Outputs<T>> {
    let call = TorchCall::new("swiglu", "gate", &gate)?;
    call.same("up", &up, gate.sizes())?;
    let (gate, up) = (call.dense(gate)?, call.dense(up)?);
    let out: T = call.out(gate.sizes(), call.float)?;
    let [a, b, y] = [&gate, &up, &out].map(|tensor| call.array(tensor));
    // SAFETY: all are contiguous and have n elements; out is new.
    unsafe { call.eager::<T>(&Binary { op: BinaryFn::Swiglu, a, b, y, n: gate.elements() }) }?;
    Ok([Some(out), None, None])
}

fn swiglu_bwd<T: Tensor>(d_y: T, gate: T, up: T, need: [bool; 2]) -> Result<Outputs<T>> {
    let call = TorchCall::new("swiglu_bwd", "gate", &gate)?;
    call.same("d_y", &d_y, gate.sizes())?;
    call.same("up", &up, gate.sizes())?;
    let (d_y, gate, up) = (call.dense(d_y)?, call.dense(gate)?, call.dense(up)?);
    let d_gate = call.wanted::<T>(need[0], gate.sizes(), call.float)?;
    let d_up = call.wanted::<T>(need[1], gate.sizes(), call.float)?;
    let op = SwigluBwd {
        d_y: call.array(&d_y),
        gate: call.array(&gate),
        up: call.array(&up),
        d_gate: d_gate.array,
        d_up: d_up.array,
        n: gate.elements(),
    };
    // SAFETY: all are contiguous and have n elements; outputs are new, or null if they are not wanted.
    unsafe { call.eager::<T>(&op) }?;
    Ok([Some(d_gate.tensor), Some(d_up.tensor), None])
}
