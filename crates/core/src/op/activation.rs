//! Elementwise activations, as ops and fused into the linear layers before and after them.
//!
//! To add one, add a variant of [`Act`] with its `Facts`, and its formula to each engine and to the oracle.

use super::elementwise::same_size;
use super::numerics::{Arithmetic, Numerics};
use super::spec::{OpSpec, SlotField, slots};
use crate::{Result, Slot};

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// The tanh form of GELU: `0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
    Gelu,
    /// Squared ReLU: `max(x, 0)²`.
    Relu2,
}

/// The properties of an activation besides its formula.
struct Facts {
    name: &'static str,
    /// Names of the forward and the backward op.
    ops: [&'static str; 2],
    /// Floating-point operations per element, forward and backward.
    flops: [u64; 2],
    numerics: Numerics,
    /// The largest relevant condition number x·f'(x)/f(x): by how much a relative error of the input grows in the
    /// output.
    gain: f64,
}

const GELU: Facts = Facts {
    name: "gelu",
    ops: ["gelu_fwd", "gelu_bwd"],
    flops: [20, 30],
    // A few rounding errors and a tanh per element; 1 + tanh cancels for negative inputs, but those results are small.
    numerics: Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh(),
    // The largest for positive x; results for negative x are small and contribute little to the error of a tensor.
    gain: 1.3,
};

const RELU2: Facts = Facts {
    name: "relu2",
    ops: ["relu2_fwd", "relu2_bwd"],
    flops: [2, 3],
    // One rounded product; the backward has one more, and doubling is exact.
    numerics: Numerics::new(Arithmetic::Elementwise(2e-7)),
    gain: 2.0,
};

impl Act {
    /// Every activation.
    pub const ALL: &'static [Self] = &[Self::Gelu, Self::Relu2];

    const fn facts(self) -> &'static Facts {
        match self {
            Self::Gelu => &GELU,
            Self::Relu2 => &RELU2,
        }
    }

    /// The name, as in configurations.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// The names of its forward and its backward op, which their kernels have too.
    pub const fn ops(self) -> [&'static str; 2] {
        self.facts().ops
    }

    /// The activation of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|act| act.name() == name)
    }

    /// The largest relevant condition number x·f'(x)/f(x).
    pub(super) const fn gain(self) -> f64 {
        self.facts().gain
    }

    /// These numerics with the errors of the activation added.
    pub(super) fn after(self, numerics: Numerics) -> Numerics {
        Numerics { fast_tanh: self.facts().numerics.fast_tanh, ..numerics }
    }
}

impl std::fmt::Display for Act {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The names of the forward (0) or backward (1) ops of all activations.
const fn op_names(which: usize) -> [&'static str; Act::ALL.len()] {
    let mut names = [""; Act::ALL.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = Act::ALL[i].facts().ops[which];
        i += 1;
    }
    names
}

/// The input of an activation that is fused into a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreAct {
    /// Which activation.
    pub act: Act,
    /// The values before the activation.
    pub slot: Slot,
}

impl SlotField for Option<PreAct> {
    fn slot_mut(&mut self) -> Option<&mut Slot> {
        self.as_mut().map(|pre| &mut pre.slot)
    }
}

/// `out = act(inp)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActFwd {
    /// any shape
    pub out: Slot,
    /// the same size
    pub inp: Slot,
    /// Which activation.
    pub act: Act,
}

impl OpSpec for ActFwd {
    const NAME: &'static str = "act_fwd";
    const NAMES: &'static [&'static str] = &op_names(0);
    slots!(Write out, Read inp);

    fn name(&self) -> &'static str {
        self.act.facts().ops[0]
    }

    fn check(&self) -> Result<()> {
        same_size(self.name(), &[("out", &self.out), ("inp", &self.inp)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        self.act.facts().numerics
    }

    fn flops(&self) -> u64 {
        self.act.facts().flops[0] * self.inp.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "inp")]
    }
}

/// `d_inp = d_out · act'(inp)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActBwd {
    /// any shape
    pub d_inp: Slot,
    /// the same size
    pub d_out: Slot,
    /// the input of the forward
    pub inp: Slot,
    /// Which activation.
    pub act: Act,
}

impl OpSpec for ActBwd {
    const NAME: &'static str = "act_bwd";
    const NAMES: &'static [&'static str] = &op_names(1);
    slots!(Write d_inp, Read d_out, Read inp);

    fn name(&self) -> &'static str {
        self.act.facts().ops[1]
    }

    fn check(&self) -> Result<()> {
        same_size(self.name(), &[("d_inp", &self.d_inp), ("d_out", &self.d_out), ("inp", &self.inp)])
    }

    fn numerics(&self, _: &str) -> Numerics {
        self.act.facts().numerics
    }

    fn flops(&self) -> u64 {
        self.act.facts().flops[1] * self.inp.numel() as u64
    }

    fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("d_inp", "d_out")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;

    #[test]
    fn every_activation_is_found_by_its_name_and_names_its_ops() {
        for &act in Act::ALL {
            assert_eq!(Act::parse(act.name()), Some(act));
            for (op, suffix) in act.facts().ops.iter().zip(["_fwd", "_bwd"]) {
                assert_eq!(*op, act.name().to_owned() + suffix);
                assert!(Op::NAMES.contains(op));
            }
        }
        assert_eq!(Act::parse("tanh"), None);
        assert!(!Op::NAMES.contains(&"act_fwd"));
    }
}
