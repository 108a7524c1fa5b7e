//! SwiGLU: the first half of a row gates the second.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

/// An exponential and a few rounding errors per element. The logistic function is `(1 + tanh(x/2))/2`, so an engine may
/// use the hardware's tanh.
const SWIGLU: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh();

/// `out = silu(gate)·up` with `silu(x) = x / (1 + e^-x)`; a row of `inp` is `gate` followed by `up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwigluFwd {
    /// (..,F)
    pub out: Slot,
    /// (..,2F)
    pub inp: Slot,
}

impl OpSpec for SwigluFwd {
    const NAME: &'static str = "swiglu_fwd";
    slots!(Write out, Read inp);

    fn check(&self) -> Result<()> {
        self.check_as(&Checker(Self::NAME), ["out", "inp"])
    }

    fn numerics(&self, _: &str) -> Numerics {
        SWIGLU
    }

    fn flops(&self) -> u64 {
        12 * self.out.numel() as u64
    }
}

impl SwigluFwd {
    /// Checks the slots under the names that the calling op has for them.
    pub(super) fn check_as(&self, c: &Checker, [out, inp]: [&'static str; 2]) -> Result<()> {
        c.same_float(&[(out, &self.out), (inp, &self.inp)])?;
        c.matrix(inp, &self.inp, self.out.shape.rows(), 2 * self.out.shape.cols())
    }
}

/// With `s = 1 / (1 + e^-gate)`: `d_gate = d_out·up·s·(1 + gate·(1 - s))` and `d_up = d_out·gate·s`. If `act` is given,
/// it receives the result of the forward again, which costs almost nothing here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwigluBwd {
    /// (..,2F)
    pub d_inp: Slot,
    /// (..,F), optional; may be the same slot as `d_out`
    pub act: Option<Slot>,
    /// (..,F)
    pub d_out: Slot,
    /// (..,2F), the input of the forward
    pub inp: Slot,
}

impl OpSpec for SwigluBwd {
    const NAME: &'static str = "swiglu_bwd";
    slots!(Write d_inp, Write act, Read d_out, Read inp);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out), ("inp", &self.inp), ("d_inp", &self.d_inp)])?;
        let (rows, width) = (self.d_out.shape.rows(), self.d_out.shape.cols());
        c.matrix("inp", &self.inp, rows, 2 * width)?;
        c.matrix("d_inp", &self.d_inp, rows, 2 * width)?;
        match self.act {
            Some(out) => SwigluFwd { out, inp: self.inp }.check_as(&c, ["act", "inp"]),
            None => Ok(()),
        }
    }

    fn numerics(&self, _: &str) -> Numerics {
        SWIGLU
    }

    fn flops(&self) -> u64 {
        18 * self.d_out.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("d_inp", "inp"), ("act", "d_out")]
    }
}
