//! Elementwise ops.

use super::{Array, Rows};
use crate::op::Act;
use std::ffi::c_void;

/// A function of one number. Each has a derivative: see [`UnaryBwd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UnaryFn {
    /// x / (1 + e^-x)
    Silu,
    /// An activation that models use too.
    Act(Act),
    /// x (1 + erf(x / √2)) / 2
    GeluErf,
    /// x²
    Square,
    /// a x
    Scale(f64),
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryFn {
    /// a + b
    Add,
    /// a b
    Mul,
    /// silu(a) b
    Swiglu,
}

/// `y = op(x)`. `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Unary {
    /// The function.
    pub op: UnaryFn,
    /// n elements
    pub x: Array,
    /// n elements
    pub y: Array,
    /// The number of elements.
    pub n: usize,
}

/// The gradient of [`Unary`]: `d_x = d_y · op'(x)`. `d_x` may be `d_y` or `x`.
#[derive(Clone, Copy, Debug)]
pub struct UnaryBwd {
    /// The function.
    pub op: UnaryFn,
    /// n elements
    pub d_y: Array,
    /// n elements
    pub x: Array,
    /// n elements
    pub d_x: Array,
    /// The number of elements.
    pub n: usize,
}

/// `y = op(a, b)`. `y` may be `a` or `b`.
#[derive(Clone, Copy, Debug)]
pub struct Binary {
    /// The function.
    pub op: BinaryFn,
    /// n elements
    pub a: Array,
    /// n elements
    pub b: Array,
    /// n elements
    pub y: Array,
    /// The number of elements.
    pub n: usize,
}

/// The gradients of `y = silu(gate) · up`.
#[derive(Clone, Copy, Debug)]
pub struct SwigluBwd {
    /// n elements
    pub d_y: Array,
    /// n elements
    pub gate: Array,
    /// n elements
    pub up: Array,
    /// n elements, optional
    pub d_gate: Array,
    /// n elements, optional
    pub d_up: Array,
    /// The number of elements.
    pub n: usize,
}

/// `y = relu(x · scale + bias)` in each row.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBiasRelu {
    /// rows · cols
    pub x: Array,
    /// cols
    pub bias: Array,
    /// rows · cols
    pub y: Array,
    /// One bit per element for the backward, or null. Only on a GPU, where `gate_bytes` gives its size.
    pub gate: *mut c_void,
    /// The sizes.
    pub rows: Rows,
    /// Factor of x.
    pub scale: f64,
}

/// The gradients of [`ScaleBiasRelu`]: `d_x = d_y · scale` and `d_bias = Σ d_y` over rows, for the elements that passed
/// the ReLU and 0 for the others.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBiasReluBwd {
    /// rows · cols, or a single number for all elements with `expanded`
    pub d_y: Array,
    /// Whether `d_y` is a single number. Only on a GPU.
    pub expanded: bool,
    /// Which elements passed the ReLU.
    pub gate: Gate,
    /// rows · cols, optional
    pub d_x: Array,
    /// cols, optional
    pub d_bias: Array,
    /// The sizes.
    pub rows: Rows,
    /// Factor of x.
    pub scale: f64,
}

/// Which elements passed a ReLU.
#[derive(Clone, Copy, Debug)]
pub enum Gate {
    /// The result y of the forward; an element passed unless y <= 0, so NaN passes.
    Result(Array),
    /// The elements whose bit is set in [`ScaleBiasRelu::gate`]. Only on a GPU.
    Bits(*const c_void),
}
