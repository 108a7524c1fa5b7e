//! Activations and addition.

use super::Ctx;
use crate::isa::Isa;
use crate::math::{gelu, gelu_grad, gelu_slice};
use crate::memory::Span;
use crate::multiversion;
use ironhorse_core::Result;
use ironhorse_core::op::{Act, ActBwd, ActFwd, Add};

/// Elements a task handles: small enough to balance, large enough to be worth a hand-out.
const CHUNK: usize = 8192;

multiversion! {
    /// x = gelu(x)
    fn gelu_in_place<const FMA: bool>(x: &mut [f32]) {
        for x in x {
            *x = gelu::<FMA>(*x);
        }
    }

    /// d = d * gelu'(x)
    fn gelu_grad_in_place<const FMA: bool>(d: &mut [f32], x: &[f32]) {
        for (d, x) in d.iter_mut().zip(x) {
            *d *= gelu_grad::<FMA>(*x);
        }
    }

    /// x = x * factor
    pub fn scale_in_place<const FMA: bool>(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    /// a = a + b
    pub fn add_in_place<const FMA: bool>(a: &mut [f32], b: &[f32]) {
        for (a, b) in a.iter_mut().zip(b) {
            *a += b;
        }
    }

    /// out = a + b
    pub fn add_into<const FMA: bool>(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }
}

/// `out = act(x)`
pub fn act_into(act: Act, isa: Isa, out: &mut [f32], x: &[f32]) {
    match act {
        Act::Gelu => gelu_slice(isa, out, x),
    }
}

/// `x = act(x)`
fn act_in_place(act: Act, isa: Isa, x: &mut [f32]) {
    match act {
        Act::Gelu => gelu_in_place(isa, x),
    }
}

/// `d = d · act'(x)`
pub fn act_grad_in_place(act: Act, isa: Isa, d: &mut [f32], x: &[f32]) {
    match act {
        Act::Gelu => gelu_grad_in_place(isa, d, x),
    }
}

pub fn act_fwd(ctx: &mut Ctx<'_>, op: &ActFwd) -> Result<()> {
    let (out, inp) = (ctx.f32(op.out)?, ctx.f32(op.inp)?);
    let isa = ctx.isa;
    ctx.chunks(out.len(), CHUNK, |r, _| {
        // SAFETY: tasks have disjoint ranges; `out` and `inp` are the same window or apart (check_aliasing).
        unsafe {
            if out.is(inp) {
                act_in_place(op.act, isa, out.get_mut(r));
            } else {
                act_into(op.act, isa, out.get_mut(r.clone()), inp.get(r));
            }
        }
    })
}

pub fn act_bwd(ctx: &mut Ctx<'_>, op: &ActBwd) -> Result<()> {
    let (d_inp, d_out, inp) = (ctx.f32(op.d_inp)?, ctx.f32(op.d_out)?, ctx.f32(op.inp)?);
    let isa = ctx.isa;
    ctx.chunks(d_inp.len(), CHUNK, |r, _| {
        // SAFETY: tasks have disjoint ranges; `d_inp` is `d_out` or apart from it, and apart from `inp`.
        unsafe {
            if !d_inp.is(d_out) {
                d_inp.get_mut(r.clone()).copy_from_slice(d_out.get(r.clone()));
            }
            act_grad_in_place(op.act, isa, d_inp.get_mut(r.clone()), inp.get(r));
        }
    })
}

pub fn add(ctx: &mut Ctx<'_>, op: &Add) -> Result<()> {
    let (out, a, b) = (ctx.f32(op.out)?, ctx.f32(op.a)?, ctx.f32(op.b)?);
    let isa = ctx.isa;
    ctx.chunks(out.len(), CHUNK, |r, _| {
        // SAFETY: tasks have disjoint ranges; `out` is one of the terms or apart from both.
        unsafe { add_range(isa, out, a, b, r) }
    })
}

/// `out = a + b` on a range; `out` may be `a` or `b`.
///
/// # Safety
/// Nobody else uses this range of `out`; it is the same window as a term or shares no memory with it.
pub unsafe fn add_range(isa: Isa, out: Span<f32>, a: Span<f32>, b: Span<f32>, r: std::ops::Range<usize>) {
    // SAFETY: by the contract; each branch makes one mutable slice that meets no other slice.
    unsafe {
        if out.is(a) && out.is(b) {
            out.get_mut(r).iter_mut().for_each(|x| *x += *x);
        } else if out.is(a) {
            add_in_place(isa, out.get_mut(r.clone()), b.get(r));
        } else if out.is(b) {
            add_in_place(isa, out.get_mut(r.clone()), a.get(r));
        } else {
            add_into(isa, out.get_mut(r.clone()), a.get(r.clone()), b.get(r));
        }
    }
}
