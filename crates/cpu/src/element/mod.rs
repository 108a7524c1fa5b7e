//! The types of elements, and loops over elements that become vector code: what matrix products and the arithmetic of ops
//! have in common.

mod loops;
mod types;

pub use loops::{
    BLOCK, Blocks, LANES, Order, Whole, dot, dot_inline, largest, map, sum_inline, totals, tree,
};
pub use types::{Bf16, Elem, F16, Real};
