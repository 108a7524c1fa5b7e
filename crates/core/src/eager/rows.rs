//! Ops on the rows of a matrix: softmax, the norms, and the router's choice.

use super::{Array, Rows};

/// `y = softmax(x)` of each row. `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// rows · cols
    pub x: Array,
    /// rows · cols
    pub y: Array,
    /// The sizes.
    pub rows: Rows,
}

/// The gradient of [`Softmax`]. `d_x` may be `d_y` or `y`.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxBwd {
    /// rows · cols
    pub d_y: Array,
    /// rows · cols, the result of the forward
    pub y: Array,
    /// rows · cols
    pub d_x: Array,
    /// The sizes.
    pub rows: Rows,
}

/// The k largest probabilities of each row, normalised to sum to 1, and their columns. Ties go to the lower column. f32.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxTopk {
    /// rows · cols
    pub x: Array,
    /// rows · k
    pub weights: Array,
    /// rows · k
    pub indices: *mut i32,
    /// The sizes.
    pub rows: Rows,
    /// How many columns of each row are chosen.
    pub k: usize,
}

/// `y = x · rstd · weight` with `rstd = 1 / √(mean(x²) + eps)` of each row. `y` may be `x`. Without columns `rstd` is NaN.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// rows · cols
    pub x: Array,
    /// cols
    pub weight: Array,
    /// rows · cols
    pub y: Array,
    /// rows, of type [`Float::acc`](super::Float::acc), optional
    pub rstd: Array,
    /// The sizes.
    pub rows: Rows,
    /// Added to the mean of the squares.
    pub eps: f64,
}

/// `sum = x + residual`, then [`RmsNorm`] of the sum. `sum` may be `x` or `residual`; `y` may be `x` or `residual` if
/// `sum` is another array, and is never `sum`.
#[derive(Clone, Copy, Debug)]
pub struct ResidualRmsNorm {
    /// rows · cols
    pub x: Array,
    /// rows · cols
    pub residual: Array,
    /// cols
    pub weight: Array,
    /// rows · cols
    pub y: Array,
    /// rows · cols
    pub sum: Array,
    /// The sizes.
    pub rows: Rows,
    /// Added to the mean of the squares.
    pub eps: f64,
}

/// The gradients of [`RmsNorm`]. `d_x` may be `d_y` or `x`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBwd {
    /// rows · cols
    pub d_y: Array,
    /// rows · cols
    pub x: Array,
    /// cols
    pub weight: Array,
    /// rows
    pub rstd: Array,
    /// rows · cols, optional
    pub d_x: Array,
    /// cols, optional
    pub d_weight: Array,
    /// The sizes.
    pub rows: Rows,
}

/// `y = (x - mean) · rstd · weight + bias` with `rstd = 1 / √(var + eps)` of each row; var is divided by cols, not
/// cols - 1. `y` may be `x`. Without columns `mean` and `rstd` are NaN.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// rows · cols
    pub x: Array,
    /// cols
    pub weight: Array,
    /// cols
    pub bias: Array,
    /// rows · cols
    pub y: Array,
    /// rows, of type [`Float::acc`](super::Float::acc), optional
    pub mean: Array,
    /// rows, of type [`Float::acc`](super::Float::acc), optional
    pub rstd: Array,
    /// The sizes.
    pub rows: Rows,
    /// Added to the variance.
    pub eps: f64,
}

/// The gradients of [`LayerNorm`]. `d_x` may be `d_y` or `x`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormBwd {
    /// rows · cols
    pub d_y: Array,
    /// rows · cols
    pub x: Array,
    /// cols
    pub weight: Array,
    /// rows
    pub mean: Array,
    /// rows
    pub rstd: Array,
    /// rows · cols, optional
    pub d_x: Array,
    /// cols, optional
    pub d_weight: Array,
    /// cols, optional
    pub d_bias: Array,
    /// The sizes.
    pub rows: Rows,
}
