//! Causal self-attention over packed queries, keys and values, with an online softmax that needs no T×T buffer.

use super::mask::AttentionMask;
use super::numerics::{Arithmetic, BF16_UNIT, Numerics, Product};
use super::spec::{Checker, named, op};
use crate::{DType, Result, Slot};

/// exp(score - lse) turns the absolute error of a score into a relative one; test cases have scores up to 110.
const SCORES: Numerics = Numerics::new(Arithmetic::Sum(1e-5));

op! {
    /// Per head: `out = softmax(q·kᵀ/√HD, causal)·v`. `qkv` packs q of all NH heads, then k, then v of NKV heads each: head
    /// `h` of the queries uses head `h / (NH/NKV)` of keys and values. With W = (NH + 2·NKV)·HD, NKV = NH makes it 3C.
    pub struct AttentionFwd {
        /// (B,T,C), heads side by side
        pub out: Slot = Write,
        /// (B,NH,T) f32, the logarithm of the sum of exponentials of each row, from which the backward recomputes the
        /// softmax
        pub lse: Slot = Write,
        /// (B,T,W)
        pub qkv: Slot = Read,
        /// NH
        pub heads: usize,
        /// NKV, a divisor of NH
        pub kv_heads: usize,
        /// Which of the keys up to its own a query reaches.
        pub mask: AttentionMask = Read,
    }
    name "attention_fwd"
    check(op, c) { op.check_as(c) }
    numerics(_op, arg) {
        let scores = SCORES.product(Product::Attention);
        match arg {
            "lse" => scores.bf16_engines(1e-4),
            // Probabilities are rounded before tensor cores multiply them with the values.
            _ => scores.inner_roundings(1.0).bf16_engines(2.0 * BF16_UNIT),
        }
    }
    flops(op) { 2 * pair_flops(&op.out, &op.mask) }
    operands(qkv)
}

op! {
    /// Gradients of [`AttentionFwd`], recomputing the probabilities from `lse`.
    pub struct AttentionBwd {
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
        /// The mask of the forward.
        pub mask: AttentionMask = Read,
    }
    name "attention_bwd"
    check(op, c) { op.check_as(c) }
    numerics {
        // Probabilities (for d_v, and by some kernels also those in the score gradients) and score gradients (for d_q and
        // d_k) are rounded. A library may round the latter
        // twice, or round each head's contribution to d_k and d_v where heads share keys and values.
        SCORES.product(Product::Attention).inner_roundings(2.0).bf16_engines(2.0 * BF16_UNIT)
    }
    flops(op) { 5 * pair_flops(&op.out, &op.mask) }
    operands(d_out, qkv)
}

op! {
    /// Attention of one new position (the scalar `position`) over a cache of all earlier positions. It appends its own key
    /// and value to the cache.
    ///
    /// With `rows` and `positions` the B tokens are of any of the S sequences of the cache, at any position, several of one
    /// sequence too: all keys and values are appended first. A token at position -1 is not used: it stores nothing, and its
    /// result is 0.
    pub struct AttentionCached {
        /// (B,1,C)
        pub out: Slot = Write,
        /// (S,maxT,NKV·HD); S is B without `rows`
        pub keys: Slot = Update,
        /// (S,maxT,NKV·HD)
        pub values: Slot = Update,
        /// (B,1,W)
        pub qkv: Slot = Read,
        /// (B,1) i32, the sequence of the cache that each token belongs to
        pub rows: Option<Slot> = Read,
        /// (B,1) i32, the position of each token, in order of rows and positions: see
        /// [`check_cache_rows`](super::check_cache_rows)
        pub positions: Option<Slot> = Read,
        /// NH
        pub heads: usize,
        /// NKV, a divisor of NH
        pub kv_heads: usize,
        /// How many positions it attends to at most, its own included.
        pub window: Option<usize>,
    }
    name "attention_cached"
    check(op, c) {
        c.same_float(named!(op: qkv, keys, values, out))?;
        check_packed(c, &op.qkv, &op.out, [op.heads, op.kv_heads])?;
        let [batch, seq, width] = *op.out.shape.dims() else {
            return c.fail(format!("`out` is {}, expected [B, 1, C]", op.out.shape));
        };
        if seq != 1 {
            return c.fail(format!("`out` is {}, expected one position", op.out.shape));
        }
        let sequences = match (&op.rows, &op.positions) {
            (Some(rows), Some(positions)) => {
                for (name, slot) in [("rows", rows), ("positions", positions)] {
                    c.dtype(name, slot, DType::I32)?;
                    c.shape(name, slot, [batch, 1])?;
                }
                op.keys.shape.dims().first().copied().unwrap_or(0)
            }
            (None, None) => batch,
            _ => return c.fail("`rows` and `positions` need each other".into()),
        };
        let context = op.context();
        let width = width / op.heads * op.kv_heads;
        c.shapes(named!(op: keys, values), [sequences, context, width])?;
        AttentionMask { positions: None, window: op.window }.check(c, &op.out)
    }
    numerics(_op, arg) {
        match arg {
            "keys" | "values" => Numerics::EXACT,
            _ => SCORES.product(Product::CachedAttention).inner_roundings(1.0).bf16_engines(2.0 * BF16_UNIT),
        }
    }
    flops(op) { 4 * (op.out.numel() * op.window.map_or(op.context(), |window| window.min(op.context()))) as u64 }
    operands(qkv)
    positions(op) { op.positions.is_none().then(|| op.context()) }
}

impl AttentionFwd {
    /// Checks the slots; an error names the op of the checker.
    pub(super) fn check_as(&self, c: &Checker) -> Result<()> {
        c.same_float(named!(self: qkv, out))?;
        check_packed(c, &self.qkv, &self.out, [self.heads, self.kv_heads])?;
        check_lse(c, &self.lse, &self.out, self.heads)?;
        self.mask.check(c, &self.out)
    }
}

impl AttentionBwd {
    /// Checks the slots; an error names the op of the checker.
    pub(super) fn check_as(&self, c: &Checker) -> Result<()> {
        c.same_float(named!(self: qkv, d_qkv, d_out, out))?;
        check_packed(c, &self.qkv, &self.out, [self.heads, self.kv_heads])?;
        c.shape("d_qkv", &self.d_qkv, self.qkv.shape)?;
        c.shape("d_out", &self.d_out, self.out.shape)?;
        check_lse(c, &self.lse, &self.out, self.heads)?;
        self.mask.check(c, &self.out)
    }
}

impl AttentionCached {
    /// maxT, the positions that the cache holds.
    fn context(&self) -> usize {
        self.keys.shape.dims().get(1).copied().unwrap_or(0)
    }
}

/// Checks that the head counts divide each other and the width, and that `qkv` has the shape that follows from them.
fn check_packed(c: &Checker, qkv: &Slot, out: &Slot, [heads, kv_heads]: [usize; 2]) -> Result<()> {
    let [batch, seq, width] = *out.shape.dims() else {
        return c.fail(format!("`out` is {}, expected [B, T, C]", out.shape));
    };
    if heads == 0 || width % heads != 0 {
        return c.fail(format!("{heads} heads do not divide the width {width}"));
    }
    if kv_heads == 0 || heads % kv_heads != 0 {
        return c.fail(format!("{kv_heads} heads of keys and values do not divide {heads} heads"));
    }
    c.shape("qkv", qkv, [batch, seq, (heads + 2 * kv_heads) * (width / heads)])
}

fn check_lse(c: &Checker, lse: &Slot, out: &Slot, heads: usize) -> Result<()> {
    c.dtype("lse", lse, DType::F32)?;
    c.numel("lse", lse, out.shape.rows() * heads)
}

/// Operations of one matrix product over the pairs of query and key of all heads, as if each sequence were one document.
fn pair_flops(out: &Slot, mask: &AttentionMask) -> u64 {
    let seq = out.shape.dims().get(1).copied().unwrap_or(1) as u64;
    (out.numel() as u64).checked_div(seq).unwrap_or(0) * 2 * mask.pairs(seq)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::op::OpSpec;

    fn slot(shape: [usize; 3]) -> Slot {
        Slot { pool: Pool::Io, offset: 0, shape: shape.into(), dtype: DType::F32 }
    }

    fn fwd([heads, kv_heads]: [usize; 2], width: usize) -> AttentionFwd {
        let (out, lse, qkv) = (slot([2, 5, 24]), slot([2, heads, 5]), slot([2, 5, width]));
        AttentionFwd { out, lse, qkv, heads, kv_heads, mask: AttentionMask::CAUSAL }
    }

    #[test]
    fn keys_and_values_may_have_fewer_heads() {
        for (heads, width) in [([6, 6], 72), ([6, 3], 48), ([6, 2], 40), ([6, 1], 32)] {
            fwd(heads, width).check().unwrap();
        }
        let text = |op: AttentionFwd| op.check().unwrap_err().to_string();
        assert_eq!(text(fwd([6, 2], 72)), "attention_fwd: `qkv` is [2, 5, 72], expected [2, 5, 40]");
        for kv_heads in [0, 4, 12] {
            let what = format!("attention_fwd: {kv_heads} heads of keys and values do not divide 6 heads");
            assert_eq!(text(fwd([6, kv_heads], 72)), what);
        }
        let AttentionFwd { out, lse, qkv, heads, kv_heads, mask } = fwd([6, 4], 72);
        let bwd = AttentionBwd { d_qkv: qkv, d_out: out, qkv, out, lse, heads, kv_heads, mask };
        assert!(bwd.check().unwrap_err().to_string().contains("4 heads of keys and values"));
    }

    #[test]
    fn the_cache_is_as_wide_as_its_heads() {
        let (out, qkv) = (slot([2, 1, 24]), slot([2, 1, 40]));
        let op = |keys, values| AttentionCached {
            out,
            keys,
            values,
            qkv,
            rows: None,
            positions: None,
            heads: 6,
            kv_heads: 2,
            window: None,
        };
        let (narrow, wide) = (slot([2, 9, 8]), slot([2, 9, 24]));
        op(narrow, narrow).check().unwrap();
        let text = op(narrow, wide).check().unwrap_err().to_string();
        assert_eq!(text, "attention_cached: `values` is [2, 9, 24], expected [2, 9, 8]");
        assert_eq!(op(narrow, narrow).flops(), 4 * 2 * 9 * 24); // of all heads of the queries
        assert_eq!(AttentionCached { window: Some(4), ..op(narrow, narrow) }.flops(), 4 * 2 * 4 * 24);
        let each = Slot { shape: [2, 1].into(), dtype: DType::I32, ..out };
        let of_tokens = Some(each);
        let seven = slot([7, 9, 8]);
        let placed = AttentionCached { rows: of_tokens, positions: of_tokens, ..op(seven, seven) };
        placed.check().unwrap();
        assert_eq!((op(narrow, narrow).positions(), placed.positions), (Some(9), of_tokens));
        let text = |op: AttentionCached| op.check().unwrap_err().to_string();
        assert_eq!(text(op(seven, seven)), "attention_cached: `keys` is [7, 9, 8], expected [2, 9, 8]");
        assert_eq!(
            text(AttentionCached { positions: None, ..placed }),
            "attention_cached: `rows` and `positions` need each other"
        );
        let floats = Some(Slot { dtype: DType::F32, ..each });
        assert_eq!(
            text(AttentionCached { rows: floats, ..placed }),
            "attention_cached: `rows` is f32, expected i32"
        );
    }

    #[test]
    fn masks_are_of_the_tokens() {
        let positions = |shape: [usize; 2], dtype| Slot { shape: shape.into(), dtype, ..slot([0; 3]) };
        let with =
            |positions, window| AttentionFwd { mask: AttentionMask { positions, window }, ..fwd([6, 2], 40) };
        with(Some(positions([2, 5], DType::I32)), Some(7)).check().unwrap();
        let text = |op: AttentionFwd| op.check().unwrap_err().to_string();
        assert_eq!(
            text(with(Some(positions([2, 4], DType::I32)), None)),
            "attention_fwd: `positions` is [2, 4], expected [2, 5]"
        );
        assert_eq!(
            text(with(Some(positions([2, 5], DType::F32)), None)),
            "attention_fwd: `positions` is f32, expected i32"
        );
        assert_eq!(text(with(None, Some(0))), "attention_fwd: the window is 0 keys, expected 1 or more");
        assert_eq!(with(None, None).flops(), 4 * 2 * 24 * 15);
        assert_eq!(with(None, Some(2)).flops(), 4 * 2 * 24 * 9); // 1 + 2 + 2 + 2 + 2 keys
    }
}
