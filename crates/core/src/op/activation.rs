//! Elementwise activations, as ops and fused into the linear layers before and after them.
//!
//! To add one, add a variant of [`Act`] with its `Facts`, and its formula to each engine and to the oracle.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{SlotField, named, op};
use crate::Slot;

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
    names: Names,
    /// Floating-point operations per element, forward and backward.
    flops: [u64; 2],
    numerics: Numerics,
    /// The largest relevant condition number x·f'(x)/f(x): by how much a relative error of the input grows in the
    /// output.
    gain: f64,
    /// Whether results have about the size of the input at most, and the derivative is about 1 at most.
    bounded: bool,
}

/// What an activation is called.
struct Names {
    name: &'static str,
    /// The forward and the backward op.
    ops: [&'static str; 2],
    /// The kernels of both whose results have 8 bits.
    quantizing: [&'static str; 2],
}

macro_rules! names {
    ($name:literal) => {
        Names {
            name: $name,
            ops: [concat!($name, "_fwd"), concat!($name, "_bwd")],
            quantizing: [concat!("quantize_", $name, "_fwd"), concat!("quantize_", $name, "_bwd")],
        }
    };
}

const GELU: Facts = Facts {
    names: names!("gelu"),
    flops: [20, 30],
    // A few rounding errors and a tanh per element; 1 + tanh cancels for negative inputs, but those results are small.
    numerics: Numerics::new(Arithmetic::Elementwise(1e-6)).fast_tanh(),
    // The largest for positive x; results for negative x are small and contribute little to the error of a tensor.
    gain: 1.3,
    bounded: true,
};

const RELU2: Facts = Facts {
    names: names!("relu2"),
    flops: [2, 3],
    // One rounded product; the backward has one more, and doubling is exact.
    numerics: Numerics::new(Arithmetic::Elementwise(2e-7)),
    gain: 2.0,
    bounded: false,
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
        self.facts().names.name
    }

    /// The names of its forward and its backward op, which their kernels have too.
    pub const fn ops(self) -> [&'static str; 2] {
        self.facts().names.ops
    }

    /// The names of the kernels that compute its forward and its backward in 8 bits.
    pub const fn quantizing(self) -> [&'static str; 2] {
        self.facts().names.quantizing
    }

    /// Whether its results and gradients are about as large as what they are computed from, at most.
    pub const fn is_bounded(self) -> bool {
        self.facts().bounded
    }

    /// The activation of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|act| act.name() == name)
    }

    /// The largest relevant condition number x·f'(x)/f(x).
    pub(super) const fn gain(self) -> f64 {
        self.facts().gain
    }

    /// These numerics for a result that this activation is applied to.
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
        names[i] = Act::ALL[i].ops()[which];
        i += 1;
    }
    names
}

/// The input of an activation that is fused into a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreAct {
    /// Which activation.
    pub act: Act,
    /// The values before the activation. Where one other op alone reads them, and both run together, an engine may leave there what that op
    /// makes of them.
    pub slot: Slot,
}

impl SlotField for Option<PreAct> {
    fn slot_mut(&mut self) -> Option<&mut Slot> {
        self.as_mut().map(|pre| &mut pre.slot)
    }
}

op! {
    /// `out = act(inp)`.
    pub struct ActFwd {
        /// any shape
        pub out: Slot = Write,
        /// the same size
        pub inp: Slot = Read,
        /// Which activation.
        pub act: Act,
    }
    names &op_names(0), op => op.act as usize;
    check(op, c) { c.same_size(named!(op: out, inp)) }
    numerics(op, _arg) { op.act.facts().numerics }
    flops(op) { op.act.facts().flops[0] * op.inp.numel() as u64 }
    in_place (out, inp)
}

op! {
    /// `d_inp = d_out · act'(inp)`.
    pub struct ActBwd {
        /// any shape
        pub d_inp: Slot = Write,
        /// the same size
        pub d_out: Slot = Read,
        /// the input of the forward
        pub inp: Slot = Read,
        /// Which activation.
        pub act: Act,
    }
    names &op_names(1), op => op.act as usize;
    check(op, c) { c.same_size(named!(op: d_inp, d_out, inp)) }
    numerics(op, _arg) { op.act.facts().numerics }
    flops(op) { op.act.facts().flops[1] * op.inp.numel() as u64 }
    in_place (d_inp, d_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;

    #[test]
    fn every_activation_is_found_by_its_name_and_names_its_ops() {
        for &act in Act::ALL {
            assert_eq!(Act::parse(act.name()), Some(act));
            assert!(act.ops().iter().all(|op| Op::NAMES.contains(op)));
        }
        assert_eq!(Act::parse("tanh"), None);
        assert!(!Op::NAMES.contains(&"act_fwd"));
    }
}
