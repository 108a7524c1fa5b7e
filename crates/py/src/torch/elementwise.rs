//! Element by element.

use super::call::Call;
use super::kernel::{Outputs, op};
use super::tensor::Tensor;
use ironhorse::core::eager::{BinaryFn, UnaryFn};
use ironhorse::core::op::Act;
use ironhorse::eager;
use ironhorse::ops::Result;

op!(Square, "square", "(Tensor x) -> Tensor", (x: tensor) unary("square", UnaryFn::Square, x));
op!(SquareBwd, "square_bwd", "(Tensor d_y, Tensor x) -> Tensor", (d_y: tensor, x: tensor)
    unary_bwd("square_bwd", UnaryFn::Square, d_y, x));

op!(Silu, "silu", "(Tensor x) -> Tensor", (x: tensor) unary("silu", UnaryFn::Silu, x));
op!(SiluBwd, "silu_bwd", "(Tensor d_y, Tensor x) -> Tensor", (d_y: tensor, x: tensor)
    unary_bwd("silu_bwd", UnaryFn::Silu, d_y, x));

op!(Gelu, "gelu", "(Tensor x, bool tanh) -> Tensor", (x: tensor, tanh: boolean) unary("gelu", gelu(tanh), x));
op!(GeluBwd, "gelu_bwd", "(Tensor d_y, Tensor x, bool tanh) -> Tensor", (d_y: tensor, x: tensor, tanh: boolean)
    unary_bwd("gelu_bwd", gelu(tanh), d_y, x));

op!(Swiglu, "swiglu", "(Tensor gate, Tensor up) -> Tensor", (gate: tensor, up: tensor) swiglu(gate, up));
op!(SwigluBwd, "swiglu_bwd",
    "(Tensor d_y, Tensor gate, Tensor up, bool need_gate, bool need_up) -> (Tensor, Tensor)",
    (d_y: tensor, gate: tensor, up: tensor, need_gate: boolean, need_up: boolean)
    swiglu_bwd([d_y, gate, up], [need_gate, need_up]));

fn gelu(tanh: bool) -> UnaryFn {
    if tanh { UnaryFn::Act(Act::Gelu) } else { UnaryFn::GeluErf }
}

fn unary<T: Tensor>(op: &'static str, f: UnaryFn, x: T) -> Result<Outputs<T>> {
    let call = Call::new(op, "x", &x)?;
    let x = call.dense(x)?;
    let y: T = call.out(x.sizes(), call.float)?;
    let n = x.elements();
    // SAFETY: both have n elements of the type, side by side, where the call runs; y is new.
    call.run::<T>(|at| unsafe { eager::unary(at, f, x.array(call.float), y.array(call.float), n) })?;
    Ok([Some(y), None, None])
}

fn unary_bwd<T: Tensor>(op: &'static str, f: UnaryFn, d_y: T, x: T) -> Result<Outputs<T>> {
    let call = Call::new(op, "x", &x)?;
    call.same("d_y", &d_y, x.sizes())?;
    let (d_y, x) = (call.dense(d_y)?, call.dense(x)?);
    let d_x: T = call.out(x.sizes(), call.float)?;
    let inputs = [d_y.array(call.float), x.array(call.float)];
    // SAFETY: as in `unary`.
    call.run::<T>(|at| unsafe { eager::unary_bwd(at, f, inputs, d_x.array(call.float), x.elements()) })?;
    Ok([Some(d_x), None, None])
}

fn swiglu<T: Tensor>(gate: T, up: T) -> Result<Outputs<T>> {
    let call = Call::new("swiglu", "gate", &gate)?;
    call.same("up", &up, gate.sizes())?;
    let (gate, up) = (call.dense(gate)?, call.dense(up)?);
    let y: T = call.out(gate.sizes(), call.float)?;
    let (inputs, n) = ([gate.array(call.float), up.array(call.float)], gate.elements());
    // SAFETY: as in `unary`.
    call.run::<T>(|at| unsafe { eager::binary(at, BinaryFn::Swiglu, inputs, y.array(call.float), n) })?;
    Ok([Some(y), None, None])
}

fn swiglu_bwd<T: Tensor>([d_y, gate, up]: [T; 3], need: [bool; 2]) -> Result<Outputs<T>> {
    let call = Call::new("swiglu_bwd", "gate", &gate)?;
    call.same("d_y", &d_y, gate.sizes())?;
    call.same("up", &up, gate.sizes())?;
    let (d_y, gate, up) = (call.dense(d_y)?, call.dense(gate)?, call.dense(up)?);
    let d_gate = call.wanted::<T>(need[0], gate.sizes(), call.float)?;
    let d_up = call.wanted::<T>(need[1], gate.sizes(), call.float)?;
    let inputs = [d_y.array(call.float), gate.array(call.float), up.array(call.float)];
    let n = gate.elements();
    // SAFETY: as in `unary`; what is not wanted is null.
    call.run::<T>(|at| unsafe { eager::swiglu_bwd(at, inputs, [d_gate.array, d_up.array], n) })?;
    Ok([Some(d_gate.tensor), Some(d_up.tensor), None])
}
