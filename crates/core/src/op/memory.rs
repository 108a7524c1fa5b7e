//! Fills and copies.

use super::numerics::Numerics;
use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

/// `out = value` for every element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fill {
    /// any shape, f32 or bf16
    pub out: Slot,
    /// The value.
    pub value: f32,
}

impl OpSpec for Fill {
    const NAME: &'static str = "fill";
    slots!(Write out);

    fn check(&self) -> Result<()> {
        Checker(Self::NAME).same_float(&[("out", &self.out)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::EXACT
    }

    fn flops(&self) -> u64 {
        0
    }
}

/// `out = inp`, without conversion: both have the same element type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopySlot {
    /// any shape
    pub out: Slot,
    /// the same size
    pub inp: Slot,
}

impl OpSpec for CopySlot {
    const NAME: &'static str = "copy";
    slots!(Write out, Read inp);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.dtype("out", &self.out, self.inp.dtype)?;
        c.numel("out", &self.out, self.inp.numel())
    }

    fn numerics(&self, _: &str) -> Numerics {
        Numerics::EXACT
    }

    fn flops(&self) -> u64 {
        0
    }
}
