//! Dropout of activations, and attention with dropout of its probabilities. Masks are those of
//! [`DropMask`](crate::DropMask) with the scalars `seed`, `step` and `micro_step`: nothing is kept for the backward.

use super::attention::{AttentionBwd, AttentionFwd};
use super::mask::AttentionMask;
use super::numerics::{Arithmetic, F32_UNIT, Numerics};
use super::spec::{named, op};
use crate::{DropSite, Slot};

op! {
    /// `out = inp·scale` where the mask keeps an element, else 0; `scale` is 1 / (1 - rate). It is its own backward: the
    /// gradient of the input is the dropout of the gradient of the output. An element's row and column in the mask are
    /// those of its slot as a matrix.
    pub struct Dropout {
        /// (N,C)
        pub out: Slot = Write,
        /// the same shape
        pub inp: Slot = Read,
        /// How often, and which mask.
        pub drop: DropSite,
    }
    name "dropout"
    check(op, c) {
        c.same_float(named!(op: out, inp))?;
        c.matrix("inp", &op.inp, op.out.shape.rows(), op.out.shape.cols())
    }
    // one rounded product
    numerics { Numerics::new(Arithmetic::Elementwise(1.1 * F32_UNIT)) }
    flops(op) { op.out.numel() as u64 }
    in_place (out, inp)
}

op! {
    /// [`AttentionFwd`] with dropout of the probabilities after the softmax: `lse` is that of all keys. Row (b·NH + h)·T + t
    /// of the mask is that of a query, its column that of a key.
    pub struct AttentionDropoutFwd {
        /// (B,T,C), heads side by side
        pub out: Slot = Write,
        /// (B,NH,T) f32
        pub lse: Slot = Write,
        /// (B,T,W)
        pub qkv: Slot = Read,
        /// NH
        pub heads: usize,
        /// NKV, a divisor of NH
        pub kv_heads: usize,
        /// Which of the keys up to its own a query reaches.
        pub mask: AttentionMask = Read,
        /// How often, and which mask.
        pub drop: DropSite,
    }
    name "attention_dropout_fwd"
    check(op, c) { op.attention().check_as(c) }
    numerics(op, arg) { op.attention().numerics(arg) }
    flops(op) { op.attention().flops() }
    operands(qkv)
}

impl AttentionDropoutFwd {
    /// The op without dropout.
    pub const fn attention(&self) -> AttentionFwd {
        let Self { out, lse, qkv, heads, kv_heads, mask, .. } = *self;
        AttentionFwd { out, lse, qkv, heads, kv_heads, mask }
    }
}

op! {
    /// Gradients of [`AttentionDropoutFwd`], recomputing the probabilities from `lse` and the mask.
    pub struct AttentionDropoutBwd {
        /// (B,T,W)
        pub d_qkv: Slot = Write,
        /// (B,T,C)
        pub d_out: Slot = Read,
        /// (B,T,W)
        pub qkv: Slot = Read,
        /// (B,T,C), the forward's result
        pub out: Slot = Read,
        /// (B,NH,T) f32
        pub lse: Slot = Read,
        /// NH
        pub heads: usize,
        /// NKV, a divisor of NH
        pub kv_heads: usize,
        /// Which of the keys up to its own a query reaches.
        pub mask: AttentionMask = Read,
        /// How often, and which mask.
        pub drop: DropSite,
    }
    name "attention_dropout_bwd"
    check(op, c) { op.attention().check_as(c) }
    numerics(op, arg) { op.attention().numerics(arg) }
    flops(op) { op.attention().flops() }
    operands(d_out, qkv)
}

impl AttentionDropoutBwd {
    /// The op without dropout.
    pub const fn attention(&self) -> AttentionBwd {
        let Self { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask, .. } = *self;
        AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask }
    }
}
