//! Elementwise ops: GELU (tanh form) and addition.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

/// tanh of a few roundings per element; 1 + tanh cancels for negative inputs, but those results are small.
const GELU: Numerics = Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh();

/// `out = 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeluFwd {
    /// any shape
    pub out: Slot,
    /// the same size
    pub inp: Slot,
}

impl OpSpec for GeluFwd {
    const NAME: &'static str = "gelu_fwd";
    slots!(Write out, Read inp);

    fn check(&self) -> Result<()> {
        same_size(Self::NAME, &[("out", &self.out), ("inp", &self.inp)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        GELU
    }

    fn flops(&self) -> u64 {
        20 * self.inp.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "inp")]
    }
}

/// `d_inp = d_out · gelu'(inp)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeluBwd {
    /// any shape
    pub d_inp: Slot,
    /// the same size
    pub d_out: Slot,
    /// the input of the forward
    pub inp: Slot,
}

impl OpSpec for GeluBwd {
    const NAME: &'static str = "gelu_bwd";
    slots!(Write d_inp, Read d_out, Read inp);

    fn check(&self) -> Result<()> {
        same_size(Self::NAME, &[("d_inp", &self.d_inp), ("d_out", &self.d_out), ("inp", &self.inp)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        GELU
    }

    fn flops(&self) -> u64 {
        30 * self.inp.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("d_inp", "d_out")]
    }
}

/// `out = a + b`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Add {
    /// any shape
    pub out: Slot,
    /// the same size
    pub a: Slot,
    /// the same size
    pub b: Slot,
}

impl OpSpec for Add {
    const NAME: &'static str = "add";
    slots!(Write out, Read a, Read b);

    fn check(&self) -> Result<()> {
        same_size(Self::NAME, &[("out", &self.out), ("a", &self.a), ("b", &self.b)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::new(Arithmetic::Addition)
    }

    fn flops(&self) -> u64 {
        self.out.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "a"), ("out", "b")]
    }
}

fn same_size(op: &'static str, slots: &[(&str, &Slot)]) -> Result<()> {
    let c = Checker(op);
    c.same_float(slots)?;
    let Some((_, first)) = slots.first() else { return Ok(()) };
    slots.iter().try_for_each(|(name, slot)| c.numel(name, slot, first.numel()))
}
