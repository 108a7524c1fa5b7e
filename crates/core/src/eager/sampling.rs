//! Choosing tokens.

use super::{Array, Rows};

/// The column of the largest element of each row: the lowest of equal ones, or the first NaN if the row has one.
#[derive(Clone, Copy, Debug)]
pub struct Argmax {
    /// rows · cols
    pub logits: Array,
    /// rows
    pub out: *mut i32,
    /// The sizes.
    pub rows: Rows,
}

/// Draws a column of each row from `softmax(logits / temperature)`, cut to `top_k` or `top_p`. A row that has no
/// distribution (NaN, +inf, or all -inf) is an error on the host and gives -1 on a GPU. f32.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// rows · cols
    pub logits: Array,
    /// rows; the random number of a row is [`uniform_of_seed`]
    pub seeds: *const u64,
    /// rows
    pub out: *mut i32,
    /// The sizes.
    pub rows: Rows,
    /// Divides the logits; 0 selects the largest.
    pub temperature: f32,
    /// Only the k largest can be drawn.
    pub top_k: Option<usize>,
    /// Only the largest that together have this probability can be drawn.
    pub top_p: Option<f32>,
}

/// A number in \[0, 1) from a seed (splitmix64): the same on every machine.
pub fn uniform_of_seed(seed: u64) -> f64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}
