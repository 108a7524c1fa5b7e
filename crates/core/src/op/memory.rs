//! Fills and copies.

use super::numerics::Numerics;
use super::spec::{named, op};
use crate::Slot;

op! {
    /// `out = value` for every element.
    pub struct Fill {
        /// any shape, f32 or bf16
        pub out: Slot = Write,
        /// The value.
        pub value: f32,
    }
    name "fill"
    check(op, c) { c.same_float(named!(op: out)) }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}

op! {
    /// `out = inp`, without conversion: both have the same element type.
    pub struct CopySlot {
        /// any shape
        pub out: Slot = Write,
        /// the same size
        pub inp: Slot = Read,
    }
    name "copy"
    check(op, c) {
        c.dtype("out", &op.out, op.inp.dtype)?;
        c.numel("out", &op.out, op.inp.numel())
    }
    numerics { Numerics::EXACT }
    flops(_op) { 0 }
}
