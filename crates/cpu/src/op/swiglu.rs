//! SwiGLU. Rows are spread over threads.

use super::Ctx;
use crate::math::{exp_flush, fma};
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{SwigluBwd, SwigluFwd};

multiversion! {
    /// out = silu(gate)·up
    fn forward<const FMA: bool>(out: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp_flush::<FMA>(-gate)) * up;
        }
    }

    /// (gate, up) become (d·up·s·(1 + gate·(1 - s)), d·gate·s) with s = 1/(1 + e^-gate).
    fn backward<const FMA: bool>(gate: &mut [f32], up: &mut [f32], d: &[f32]) {
        for ((gate, up), d) in gate.iter_mut().zip(up).zip(d) {
            let s = 1.0 / (1.0 + exp_flush::<FMA>(-*gate));
            let d_gate = d * *up * (s * fma::<FMA>(*gate, 1.0 - s, 1.0));
            (*gate, *up) = (d_gate, d * *gate * s);
        }
    }

    /// The same, and d becomes what `forward` gives.
    fn backward_again<const FMA: bool>(gate: &mut [f32], up: &mut [f32], d: &mut [f32]) {
        for ((gate, up), d) in gate.iter_mut().zip(up).zip(d) {
            let open = 1.0 + exp_flush::<FMA>(-*gate);
            let (s, act) = (1.0 / open, *gate / open * *up);
            let d_gate = *d * *up * (s * fma::<FMA>(*gate, 1.0 - s, 1.0));
            (*gate, *up, *d) = (d_gate, *d * *gate * s, act);
        }
    }
}

pub fn swiglu_fwd(ctx: &mut Ctx<'_>, op: &SwigluFwd) -> Result<()> {
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    let (isa, width) = (ctx.isa, op.out.shape.cols());
    ctx.rows(op.out.shape.rows(), width, |rows, _| {
        for row in rows {
            // SAFETY: tasks have disjoint rows of `out`, which shares no memory with `inp`.
            unsafe {
                let (gate, up) = inp.get(2 * row * width..2 * (row + 1) * width).split_at(width);
                forward(isa, out.get_mut(row * width..(row + 1) * width), gate, up);
            }
        }
    })
}

pub fn swiglu_bwd(ctx: &mut Ctx<'_>, op: &SwigluBwd) -> Result<()> {
    let (d_inp, d_out, inp) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
    let act = op.act.map(|slot| ctx.f32(slot)).transpose()?;
    let (isa, width) = (ctx.isa, op.d_out.shape.cols());
    ctx.rows(op.d_out.shape.rows(), width, |rows, _| {
        for row in rows {
            let r = 2 * row * width..2 * (row + 1) * width;
            let narrow = row * width..(row + 1) * width;
            // SAFETY: tasks have disjoint rows; `d_inp` is `inp` or apart from it, `act` is `d_out` or apart from it, and
            // those two are apart from these.
            unsafe {
                if !d_inp.is(inp) {
                    d_inp.get_mut(r.clone()).copy_from_slice(inp.get(r.clone()));
                }
                let (gate, up) = d_inp.get_mut(r).split_at_mut(width);
                match act {
                    None => backward(isa, gate, up, d_out.get(narrow)),
                    Some(act) => {
                        if !act.is(d_out) {
                            act.get_mut(narrow.clone()).copy_from_slice(d_out.get(narrow.clone()));
                        }
                        backward_again(isa, gate, up, act.get_mut(narrow));
                    }
                }
            }
        }
    })
}
