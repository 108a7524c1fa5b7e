//! Addition.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{named, op};
use crate::Slot;

op! {
    /// `out = a + b`.
    pub struct Add {
        /// any shape
        pub out: Slot = Write,
        /// the same size
        pub a: Slot = Read,
        /// the same size
        pub b: Slot = Read,
    }
    name "add"
    check(op, c) { c.same_size(named!(op: out, a, b)) }
    numerics { Numerics::new(Arithmetic::Addition) }
    flops(op) { op.out.numel() as u64 }
    in_place (out, a) (out, b)
}
