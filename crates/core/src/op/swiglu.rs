//! SwiGLU: the first half of a row gates the second.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, named, op};
use crate::{Result, Slot};

/// An exponential and a few rounding errors per element. The logistic function is `(1 + tanh(x/2))/2`, so an engine may
/// use the hardware's tanh.
const SWIGLU: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh();

op! {
    /// `out = silu(gate)·up` with `silu(x) = x / (1 + e^-x)`; a row of `inp` is `gate` followed by `up`.
    pub struct SwigluFwd {
        /// (..,F)
        pub out: Slot = Write,
        /// (..,2F)
        pub inp: Slot = Read,
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
    /// With `s = 1 / (1 + e^-gate)`: `d_gate = d_out·up·s·(1 + gate·(1 - s))` and `d_up = d_out·gate·s`. If `act` is given,
    /// it receives the result of the forward again, which costs almost nothing here.
    pub struct SwigluBwd {
        /// (..,2F)
        pub d_inp: Slot = Write,
        /// (..,F), optional; may be the same slot as `d_out`
        pub act: Option<Slot> = Write,
        /// (..,F)
        pub d_out: Slot = Read,
        /// (..,2F), the input of the forward
        pub inp: Slot = Read,
    }
    name "swiglu_bwd"
    check(op, c) {
        c.same_float(named!(op: d_out, inp, d_inp))?;
        let (rows, width) = (op.d_out.shape.rows(), op.d_out.shape.cols());
        c.matrices(named!(op: inp, d_inp), rows, 2 * width)?;
        match op.act {
            Some(out) => SwigluFwd { out, inp: op.inp }.check_as(c, ["act", "inp"]),
            None => Ok(()),
        }
    }
    numerics { SWIGLU }
    flops(op) { 18 * op.d_out.numel() as u64 }
    in_place (d_inp, inp) (act, d_out)
}
