//! Matrix products, row-major, f32.

use super::Array;

/// `c = alpha · a b + beta · c` for each of `batch` products.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// (batch, m, k), or (batch, k, m) if transposed
    pub a: Array,
    /// (batch, k, n), or (batch, n, k) if transposed
    pub b: Array,
    /// (batch, m, n)
    pub c: Array,
    /// The sizes.
    pub shape: GemmShape,
}

/// The sizes and factors of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmShape {
    /// The number of products, stored one after the other.
    pub batch: usize,
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a, rows of b.
    pub k: usize,
    /// Factor of the product; if 0, a and b are not read.
    pub alpha: f32,
    /// Factor of the old c; if 0, it is not read.
    pub beta: f32,
    /// Whether a is stored as (k, m).
    pub transpose_a: bool,
    /// Whether b is stored as (n, k).
    pub transpose_b: bool,
}

/// One product of [`GroupedGemm`]: the offsets of its matrices and its sizes.
#[derive(Clone, Copy, Debug)]
pub struct GemmPart {
    /// Offset in a, in elements.
    pub a: usize,
    /// Offset in b, in elements.
    pub b: usize,
    /// Offset in c, in elements.
    pub c: usize,
    /// The sizes; `batch` is 1.
    pub shape: GemmShape,
}

/// Several products of different sizes in the same three arrays; no two write the same elements.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm<'a> {
    /// Contains a of every product.
    pub a: Array,
    /// Contains b of every product.
    pub b: Array,
    /// Contains c of every product.
    pub c: Array,
    /// The products.
    pub parts: &'a [GemmPart],
}
