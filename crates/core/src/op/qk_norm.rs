//! RMS normalisation of every head of packed queries and keys.

use super::norm::{Gain, RMSNORM};
use super::spec::{Accum, Checker, named, op};
use crate::{DType, Result, Slot};

op! {
    /// For each head of queries and keys `out = inp · rstd · weight` with `rstd = 1 / √(mean(inp²) + eps)` over the head;
    /// values are copied. Queries have one weight for all their heads, keys another. `gain` may put 1 + weight in a weight's
    /// place; queries are also multiplied by `q_scale`.
    pub struct QkNormFwd {
        /// (B,T,W), W = (NH + 2·NKV)·HD: packed as for attention
        pub out: Slot = Write,
        /// (B,T,NH+NKV) f32
        pub rstd: Slot = Write,
        /// (B,T,W)
        pub inp: Slot = Read,
        /// (HD)
        pub q_weight: Slot = Read,
        /// (HD)
        pub k_weight: Slot = Read,
        /// NH
        pub heads: usize,
        /// NKV
        pub kv_heads: usize,
        /// Added to the mean of the squares.
        pub eps: f32,
        /// The weights, or 1 + weight.
        pub gain: Gain,
        /// What queries are multiplied by once more: a scale of their products with keys.
        pub q_scale: f32,
    }
    name "qk_norm_fwd"
    check(op, c) {
        c.same_float(named!(op: inp, out))?;
        c.shape("out", &op.out, op.inp.shape)?;
        check_scale(c, op.q_scale)?;
        check_heads(c, &op.parts(), &op.rstd)
    }
    numerics { RMSNORM }
    flops(op) { 4 * op.parts().normed() }
    in_place (out, inp)
}

op! {
    /// Gradients of [`QkNormFwd`]: `d_qkv` is that of its result and becomes that of its input, as in
    /// [`RmsNormBwd`](super::RmsNormBwd) for each head; the part of the values stays. Over all heads
    /// `d_q_weight (+)= Σ d·x̂·q_scale` of the queries, `d_k_weight (+)= Σ d·x̂` of the keys.
    pub struct QkNormBwd {
        /// (B,T,W)
        pub d_qkv: Slot = Update,
        /// (HD)
        pub d_q_weight: Slot = Accumulate(accum),
        /// (HD)
        pub d_k_weight: Slot = Accumulate(accum),
        /// (B,T,W), the input of the forward
        pub inp: Slot = Read,
        /// (B,T,NH+NKV) f32
        pub rstd: Slot = Read,
        /// (HD)
        pub q_weight: Slot = Read,
        /// (HD)
        pub k_weight: Slot = Read,
        /// NH
        pub heads: usize,
        /// NKV
        pub kv_heads: usize,
        /// Whether the gradients of the weights are overwritten or added to.
        pub accum: Accum,
        /// The weights, or 1 + weight.
        pub gain: Gain,
        /// What queries are multiplied by once more: a scale of their products with keys.
        pub q_scale: f32,
    }
    name "qk_norm_bwd"
    check(op, c) {
        c.same_float(named!(op: inp, d_qkv))?;
        c.shape("d_qkv", &op.d_qkv, op.inp.shape)?;
        check_scale(c, op.q_scale)?;
        check_heads(c, &op.parts(), &op.rstd)?;
        c.same_float(named!(op: d_q_weight, d_k_weight))?;
        c.shapes(named!(op: d_q_weight, d_k_weight), op.q_weight.shape)
    }
    numerics { RMSNORM }
    flops(op) { 11 * op.parts().normed() }
}

/// How packed queries, keys and values divide into heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkHeads {
    /// (B,T,W)
    pub qkv: Slot,
    /// (HD)
    pub q_weight: Slot,
    /// (HD)
    pub k_weight: Slot,
    /// NH
    pub heads: usize,
    /// NKV
    pub kv_heads: usize,
}

impl QkHeads {
    /// B·T
    pub fn tokens(&self) -> usize {
        self.qkv.shape.rows()
    }

    /// HD
    pub fn dim(&self) -> usize {
        self.q_weight.numel()
    }

    /// Heads of a token that are normalised: NH + NKV.
    pub fn normed_heads(&self) -> usize {
        self.heads + self.kv_heads
    }

    /// All heads of a token: NH + 2·NKV.
    pub fn all_heads(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    /// The number of elements of queries and keys.
    fn normed(&self) -> u64 {
        (self.tokens() * self.normed_heads() * self.dim()) as u64
    }
}

impl QkNormFwd {
    /// How its input divides into heads.
    pub fn parts(&self) -> QkHeads {
        let Self { inp: qkv, q_weight, k_weight, heads, kv_heads, .. } = *self;
        QkHeads { qkv, q_weight, k_weight, heads, kv_heads }
    }
}

impl QkNormBwd {
    /// How its input divides into heads.
    pub fn parts(&self) -> QkHeads {
        let Self { inp: qkv, q_weight, k_weight, heads, kv_heads, .. } = *self;
        QkHeads { qkv, q_weight, k_weight, heads, kv_heads }
    }
}

fn check_scale(c: &Checker, q_scale: f32) -> Result<()> {
    if q_scale.is_finite() && q_scale > 0.0 {
        return Ok(());
    }
    c.fail(format!("`q_scale` is {q_scale}, expected a number above 0"))
}

fn check_heads(c: &Checker, parts: &QkHeads, rstd: &Slot) -> Result<()> {
    let (heads, kv_heads, width) = (parts.heads, parts.kv_heads, parts.qkv.shape.cols());
    if heads == 0 || kv_heads == 0 {
        return c
            .fail(format!("{heads} heads of queries and {kv_heads} of keys, expected at least 1 of each"));
    }
    if width == 0 || !width.is_multiple_of(parts.all_heads()) {
        return c.fail(format!("{heads} + 2·{kv_heads} heads do not divide the width {width}"));
    }
    let weights = named!(parts: q_weight, k_weight);
    c.same_float(weights)?;
    c.shapes(weights, [width / parts.all_heads()])?;
    c.dtype("rstd", rstd, DType::F32)?;
    c.numel("rstd", rstd, parts.tokens() * parts.normed_heads())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::op::Op;

    fn slot<const N: usize>(offset: usize, dims: [usize; N], dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset, shape: dims.into(), dtype }
    }

    fn norm(width: usize, dim: usize, [heads, kv_heads]: [usize; 2]) -> QkNormFwd {
        QkNormFwd {
            out: slot(0, [2, 3, width], DType::F32),
            rstd: slot(1 << 16, [2, 3, heads + kv_heads], DType::F32),
            inp: slot(1 << 17, [2, 3, width], DType::F32),
            q_weight: slot(1 << 18, [dim], DType::F32),
            k_weight: slot(1 << 19, [dim], DType::F32),
            heads,
            kv_heads,
            eps: 1e-6,
            gain: Gain::Weight,
            q_scale: 1.0,
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let op = norm(40, 4, [6, 2]);
        Op::from(op).check().unwrap();
        Op::from(QkNormFwd { out: op.inp, ..op }).check().unwrap(); // in place
        let text = |op: QkNormFwd| Op::from(op).check().unwrap_err().to_string();
        assert_eq!(text(norm(41, 4, [6, 2])), "qk_norm_fwd: 6 + 2·2 heads do not divide the width 41");
        assert_eq!(text(norm(40, 5, [6, 2])), "qk_norm_fwd: `q_weight` is [5], expected [4]");
        assert_eq!(
            text(norm(40, 4, [0, 2])),
            "qk_norm_fwd: 0 heads of queries and 2 of keys, expected at least 1 of each"
        );
        let few = QkNormFwd { rstd: slot(1 << 16, [2, 3, 6], DType::F32), ..op };
        assert_eq!(text(few), "qk_norm_fwd: `rstd` has 36 elements, expected 48");
        let still = QkNormFwd { q_scale: 0.0, ..op };
        assert_eq!(text(still), "qk_norm_fwd: `q_scale` is 0, expected a number above 0");
        let Slot { pool, shape, dtype, .. } = op.inp;
        let shifted = QkNormFwd { out: Slot { pool, offset: (1 << 17) + 64, shape, dtype }, ..op };
        assert_eq!(text(shifted), "qk_norm_fwd: `out` and `inp` share memory");
        assert_eq!((op.parts().dim(), op.parts().normed_heads(), op.parts().all_heads()), (4, 8, 10));
    }
}
