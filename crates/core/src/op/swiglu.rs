//! SwiGLU and GeGLU: the first half of a row gates the second.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, named, op};
use crate::{Result, Slot};

/// An exponential and a few rounding errors per element. The logistic function is `(1 + tanh(x/2))/2`, so an engine may
/// use the hardware's tanh.
const SWIGLU: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh();

/// The function of the first half of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// `silu(x) = x / (1 + e^-x)`: SwiGLU.
    Silu,
    /// The tanh form of GELU, see [`Act::Gelu`](super::Act): GeGLU.
    Gelu,
}

impl Gate {
    /// Every gate.
    pub const ALL: [Self; 2] = [Self::Silu, Self::Gelu];
}

op! {
    /// `out = f(gate)·up`, where f is silu or GELU; a row of `inp` is `gate` followed by `up`.
    pub struct SwigluFwd {
        /// (..,F)
        pub out: Slot = Write,
        /// (..,2F)
        pub inp: Slot = Read,
        /// f
        pub gate: Gate,
    }
    name "swiglu_fwd"
    check(op, c) { op.check_as(c, ["out", "inp"]) }
    numerics { SWIGLU }
    flops(op) { 12 * op.out.numel() as u64 }
}

impl SwigluFwd {
    /// Checks the slots under the names that the calling op has for them.
    pub(super) fn check_as(&self, c: &Checker, [out, inp]: [&'static str; 2]) -> Result<()> {
        c.same_float(&[(out, &self.out), (inp, &self.inp)])?;
        c.matrix(inp, &self.inp, self.out.shape.rows(), 2 * self.out.shape.cols())
    }
}

op! {
    /// `d_gate = d_out·up·f'(gate)` and `d_up = d_out·f(gate)`. Of silu, with `s = 1 / (1 + e^-gate)`, these are
    /// `d_out·up·s·(1 + gate·(1 - s))` and `d_out·gate·s`. If `act` is given, it receives the result of the forward again, which
    /// costs almost nothing here.
    pub struct SwigluBwd {
        /// (..,2F)
        pub d_inp: Slot = Write,
        /// (..,F), optional; may be the same slot as `d_out`
        pub act: Option<Slot> = Write,
        /// (..,F)
        pub d_out: Slot = Read,
        /// (..,2F), the input of the forward
        pub inp: Slot = Read,
        /// f of the forward
        pub gate: Gate,
    }
    name "swiglu_bwd"
    check(op, c) {
        c.same_float(named!(op: d_out, inp, d_inp))?;
        let (rows, width) = (op.d_out.shape.rows(), op.d_out.shape.cols());
        c.matrices(named!(op: inp, d_inp), rows, 2 * width)?;
        match op.act {
            Some(out) => SwigluFwd { out, inp: op.inp, gate: op.gate }.check_as(c, ["act", "inp"]),
            None => Ok(()),
        }
    }
    numerics { SWIGLU }
    flops(op) { 18 * op.d_out.numel() as u64 }
    in_place (d_inp, inp) (act, d_out)
}
