//! Ops on attention heads: rotary position embedding and attention.

use super::{Array, Strides};

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// 2i and 2i + 1: the original paper, Meta's LLaMA code.
    Interleaved,
    /// i and i + head_dim / 2: GPT-NeoX, Hugging Face.
    Halves,
}

/// Rotary position embedding by tables of cosines and sines. `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// (batch, seq, heads, head_dim)
    pub x: Array,
    /// (seq, head_dim / 2), of type [`Float::acc`](super::Float::acc)
    pub cos: Array,
    /// (seq, head_dim / 2), of type [`Float::acc`](super::Float::acc)
    pub sin: Array,
    /// (batch, seq, heads, head_dim)
    pub y: Array,
    /// The sizes.
    pub shape: RopeShape,
    /// Rotates the other way, as for the gradient.
    pub back: bool,
}

/// The sizes of a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub seq: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Which elements are rotated together.
    pub pairs: Pairs,
}

/// Rotary position embedding by a table of angles, f32. `y` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct RopeAngles {
    /// (batch, seq, heads, head_dim)
    pub x: Array,
    /// (at least offset + seq, head_dim / 2)
    pub angles: *const f32,
    /// (batch, seq, heads, head_dim)
    pub y: Array,
    /// Position of the first token.
    pub offset: usize,
    /// The sizes.
    pub shape: RopeShape,
}

/// [`RopeAngles`] of q and of k, which differ in their arrays and their number of heads only.
#[derive(Clone, Copy, Debug)]
pub struct RopeQk {
    /// The rotation of the queries.
    pub q: RopeAngles,
    /// The rotation of the keys.
    pub k: RopeAngles,
}

/// `freqs[p, i] = p / base^(2i / head_dim)`: the angles of every position, computed in f64 and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct RopeFreqs {
    /// (positions, head_dim / 2)
    pub freqs: *mut f32,
    /// The number of positions.
    pub positions: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// The base of the wavelengths, including the NTK factor: see [`RopeFreqs::base`].
    pub base: f64,
}

impl RopeFreqs {
    /// The base including the NTK factor: `base · alpha^(d / (d - 2))` with d = head_dim.
    pub fn base(head_dim: usize, base: f32, alpha: f32) -> f64 {
        let d = head_dim as f64;
        // With d = 2 there is one frequency, 1, whatever the base.
        let stretch = if head_dim > 2 { f64::from(alpha).powf(d / (d - 2.0)) } else { 1.0 };
        f64::from(base) * stretch
    }
}

/// The sizes of an attention. Query head h uses key head h / (heads / kv_heads). With `causal`, query i sees the keys
/// up to kv_len - q_len + i. A query that sees no key gets zeros, and minus infinity as its lse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Queries of a sequence.
    pub q_len: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Whether a query sees no later position.
    pub causal: bool,
    /// Strides of q and d_q.
    pub q: Strides,
    /// Strides of k and d_k.
    pub k: Strides,
    /// Strides of v and d_v.
    pub v: Strides,
    /// Strides of out and d_out.
    pub out: Strides,
}

impl AttentionShape {
    /// The shape of contiguous (batch, positions, heads, head_dim) arrays, with `lengths` [batch, q_len, kv_len] and `heads`
    /// [heads, kv_heads].
    pub fn position_major(
        [batch, q_len, kv_len]: [usize; 3],
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
        (scale, causal): (f64, bool),
    ) -> Self {
        let q = Strides::position_major(heads, q_len, head_dim);
        let k = Strides::position_major(kv_heads, kv_len, head_dim);
        Self { batch, heads, kv_heads, q_len, kv_len, head_dim, scale, causal, q, k, v: k, out: q }
    }
}

/// `out = softmax(scale · q kᵀ) v` of each sequence and head.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// (batch, heads, q_len, head_dim)
    pub q: Array,
    /// (batch, kv_heads, kv_len, head_dim)
    pub k: Array,
    /// (batch, kv_heads, kv_len, head_dim)
    pub v: Array,
    /// (batch, heads, q_len, head_dim)
    pub out: Array,
    /// (batch, heads, q_len), contiguous, of type [`Float::acc`](super::Float::acc), optional: the logarithm of the sum
    /// of the exponentials of the scores
    pub lse: Array,
    /// The sizes.
    pub shape: AttentionShape,
}

/// The gradients of [`Attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionBwd {
    /// (batch, heads, q_len, head_dim)
    pub d_out: Array,
    /// (batch, heads, q_len, head_dim)
    pub q: Array,
    /// (batch, kv_heads, kv_len, head_dim)
    pub k: Array,
    /// (batch, kv_heads, kv_len, head_dim)
    pub v: Array,
    /// (batch, heads, q_len, head_dim)
    pub out: Array,
    /// (batch, heads, q_len)
    pub lse: Array,
    /// The shape and strides of q, optional.
    pub d_q: Array,
    /// The shape and strides of k, optional.
    pub d_k: Array,
    /// The shape and strides of v, optional.
    pub d_v: Array,
    /// The sizes.
    pub shape: AttentionShape,
    /// Allows sums of `d_q` in an order that differs from call to call, and with it their last bits, where that is faster.
    pub any_order: bool,
}
