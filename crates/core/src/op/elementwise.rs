//! Addition, and the check that elementwise ops share.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

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

/// Checks that all slots have as many elements as the first, and its float type.
pub(super) fn same_size(op: &'static str, slots: &[(&str, &Slot)]) -> Result<()> {
    let c = Checker(op);
    c.same_float(slots)?;
    let Some((_, first)) = slots.first() else { return Ok(()) };
    slots.iter().try_for_each(|(name, slot)| c.numel(name, slot, first.numel()))
}
