//! Low-rank adapters (LoRA): `y += scale · B·A·x` beside a linear layer whose own weight is frozen.
//!
//! The weight that an adapter belongs to may be a part of a larger one: q, k and v are one product, and so are gate and
//! up. All adapters of a product share its input, so their A are one (P·r,C) matrix and `hidden = A·x` is one
//! `linear_fwd`; part i has columns `i·r..(i+1)·r` of it. Their B follow each other in one matrix, and each changes its
//! own columns of the product's result ([`LoraParts`]). The gradient of A is a `linear_bwd_weight`.

use super::linear::{PRODUCT, weight_gradient};
use super::numerics::{BF16_UNIT, Numerics};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{Result, Slot};
use std::ops::Range;

/// The columns of a layer's result that its adapters change, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoraParts {
    count: usize,
    spans: [[usize; 2]; Self::MOST],
}

/// The rows and columns of a layer's tensors that belong to one of its adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraPart {
    /// Columns of the layer's result.
    pub out: Range<usize>,
    /// Rows of B.
    pub b: Range<usize>,
    /// Columns of `hidden`.
    pub hidden: Range<usize>,
}

impl LoraParts {
    /// The most adapters of one layer: q, k and v.
    pub const MOST: usize = 3;

    /// One adapter for each of these ranges of columns; `None` if there are too many.
    pub fn new(columns: &[Range<usize>]) -> Option<Self> {
        let mut parts = Self { count: columns.len(), ..Self::default() };
        for (i, span) in columns.iter().enumerate() {
            *parts.spans.get_mut(i)? = [span.start, span.end];
        }
        Some(parts)
    }

    /// How many adapters there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows of all B together.
    pub fn rows(&self) -> usize {
        self.columns().map(|columns| columns.len()).sum()
    }

    fn columns(&self) -> impl Iterator<Item = Range<usize>> {
        self.spans.into_iter().take(self.count).map(|[first, end]| first..end)
    }

    /// The adapters in turn, each with `rank` columns of `hidden`.
    pub fn each(&self, rank: usize) -> impl Iterator<Item = LoraPart> {
        self.columns().enumerate().scan(0, move |row, (i, out)| {
            let b = *row..*row + out.len();
            *row = b.end;
            Some(LoraPart { out, b, hidden: i * rank..(i + 1) * rank })
        })
    }

    /// Checks `out` (rows,OC), `hidden` (rows,P·r) and `b` (ΣOC of the parts,r), or as many `b` as there are `experts`.
    pub(super) fn check(
        &self,
        c: &Checker,
        &[out, hidden, b]: &[Named<'_>; 3],
        experts: usize,
    ) -> Result<()> {
        let (rows, rank) = (out.1.shape.rows(), b.1.shape.cols());
        let mut end = 0;
        for span in self.columns() {
            if span.start < end || span.end < span.start || span.end > out.1.shape.cols() {
                let cols = out.1.shape.cols();
                return c.fail(format!("a part has columns {span:?}, expected some of {end}..{cols}"));
            }
            end = span.end;
        }
        c.matrix(b.0, b.1, experts * self.rows(), rank)?;
        c.matrix(hidden.0, hidden.1, rows, self.count * rank)
    }
}

/// A product whose result is added to what was there, which an engine may do after rounding it.
pub(super) const ADDED: Numerics = PRODUCT.inner_roundings(1.0).bf16_engines(1.5 * BF16_UNIT);

op! {
    /// `out[:, part] += scale · hidden[:, part] · b[part]ᵀ` for each part; the other columns stay.
    pub struct LoraFwd {
        /// (..,OC)
        pub out: Slot = Update,
        /// (..,P·r)
        pub hidden: Slot = Read,
        /// (rows of the parts,r)
        pub b: Slot = Read,
        /// Which columns of `out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
    }
    name "lora_fwd"
    check(op, c) {
        c.same_float(named!(op: out, hidden, b))?;
        op.parts.check(c, named!(op: out, hidden, b), 1)
    }
    numerics { ADDED }
    flops(op) { flops(&op.hidden, &op.b, &op.parts) }
    bytes(op) { (2 * columns(&op.out, &op.parts) + op.hidden.bytes() + op.b.bytes()) as u64 }
    operands(hidden, b)
}

op! {
    /// `d_hidden[:, part] = scale · d_out[:, part] · b[part]` for each part.
    pub struct LoraBwdHidden {
        /// (..,P·r)
        pub d_hidden: Slot = Write,
        /// (..,OC)
        pub d_out: Slot = Read,
        /// (rows of the parts,r)
        pub b: Slot = Read,
        /// Which columns of `d_out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
    }
    name "lora_bwd_hidden"
    check(op, c) {
        c.same_float(named!(op: d_out, d_hidden, b))?;
        op.parts.check(c, named!(op: d_out, d_hidden, b), 1)
    }
    numerics { PRODUCT.bf16_engines(1.5 * BF16_UNIT) }
    flops(op) { flops(&op.d_hidden, &op.b, &op.parts) }
    bytes(op) { (columns(&op.d_out, &op.parts) + op.d_hidden.bytes() + op.b.bytes()) as u64 }
    operands(d_out, b)
}

op! {
    /// `d_b[part] (+)= scale · d_out[:, part]ᵀ · hidden[:, part]` for each part. `d_b` may have another element type than
    /// `d_out` and `hidden`.
    pub struct LoraBwdWeight {
        /// (rows of the parts,r)
        pub d_b: Slot = Accumulate(accum),
        /// (..,OC)
        pub d_out: Slot = Read,
        /// (..,P·r)
        pub hidden: Slot = Read,
        /// Which columns of `d_out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
        /// Whether `d_b` is overwritten or added to.
        pub accum: Accum,
    }
    name "lora_bwd_weight"
    check(op, c) {
        c.same_float(named!(op: d_out, hidden))?;
        c.same_float(named!(op: d_b))?;
        op.parts.check(c, named!(op: d_out, hidden, d_b), 1)
    }
    numerics(op, _arg) { weight_gradient(op.accum) }
    flops(op) { flops(&op.hidden, &op.d_b, &op.parts) }
    bytes(op) {
        let passes = if op.accum == Accum::Add { 2 } else { 1 };
        (columns(&op.d_out, &op.parts) + op.hidden.bytes() + passes * op.d_b.bytes()) as u64
    }
    operands(d_out, hidden)
}

op! {
    /// `d_inp += d_hidden · a`: what the adapters add to the gradient of the layer's input.
    pub struct LoraBwdInput {
        /// (..,C)
        pub d_inp: Slot = Update,
        /// (..,P·r)
        pub d_hidden: Slot = Read,
        /// (P·r,C)
        pub a: Slot = Read,
    }
    name "lora_bwd_input"
    check(op, c) {
        c.same_float(named!(op: d_inp, d_hidden, a))?;
        c.matrix("a", &op.a, op.d_hidden.shape.cols(), op.d_inp.shape.cols())?;
        c.matrix("d_hidden", &op.d_hidden, op.d_inp.shape.rows(), op.a.shape.rows())
    }
    numerics { ADDED }
    flops(op) { 2 * op.d_inp.numel() as u64 * op.a.shape.rows() as u64 }
    operands(d_hidden, a)
}

/// The operations of the products with B: each row of it with the part of `hidden` that it belongs to.
pub(super) fn flops(hidden: &Slot, b: &Slot, parts: &LoraParts) -> u64 {
    2 * hidden.shape.rows() as u64 * parts.rows() as u64 * b.shape.cols() as u64
}

/// The bytes of the columns that the parts are.
pub(super) fn columns(out: &Slot, parts: &LoraParts) -> usize {
    out.shape.rows() * parts.rows() * out.dtype.size()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a layer with one adapter has one range of columns
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{DType, Pool, Shape};

    fn slot(offset: usize, shape: impl Into<Shape>) -> Slot {
        Slot { pool: Pool::Io, offset, shape: shape.into(), dtype: DType::F32 }
    }

    fn parts(columns: &[Range<usize>]) -> LoraParts {
        LoraParts::new(columns).unwrap()
    }

    #[test]
    fn parts_find_their_rows_and_columns() {
        let qv = parts(&[0..6, 8..10]);
        assert_eq!((qv.count(), qv.rows()), (2, 8));
        let each: Vec<LoraPart> = qv.each(3).collect();
        assert_eq!(each[0], LoraPart { out: 0..6, b: 0..6, hidden: 0..3 });
        assert_eq!(each[1], LoraPart { out: 8..10, b: 6..8, hidden: 3..6 });
        assert_eq!(LoraParts::new(&[0..1, 1..2, 2..3, 3..4]), None);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let (out, hidden, b) = (slot(0, [2, 5, 10]), slot(4096, [2, 5, 6]), slot(8192, [8, 3]));
        let good = LoraFwd { out, hidden, b, parts: parts(&[0..6, 8..10]), scale: 2.0 };
        good.check().unwrap();
        assert_eq!(good.flops(), 2 * 10 * 8 * 3);
        assert_eq!(good.bytes(), Some(4 * (2 * 80 + 60 + 24)));
        let refused = |op: LoraFwd| op.check().unwrap_err().to_string();
        assert_eq!(
            refused(LoraFwd { parts: parts(&[0..6, 9..11]), ..good }),
            "lora_fwd: a part has columns 9..11, expected some of 6..10"
        );
        assert_eq!(
            refused(LoraFwd { parts: parts(&[0..6, 5..7]), ..good }),
            "lora_fwd: a part has columns 5..7, expected some of 6..10"
        );
        assert_eq!(
            refused(LoraFwd { parts: parts(&[0..6]), ..good }),
            "lora_fwd: `b` is [8, 3], expected 6 rows of 3"
        );
        assert_eq!(
            refused(LoraFwd { hidden: slot(4096, [2, 5, 3]), ..good }),
            "lora_fwd: `hidden` is [2, 5, 3], expected 10 rows of 6"
        );
        let (d_inp, a) = (slot(0, [2, 5, 7]), slot(8192, [6, 7]));
        LoraBwdInput { d_inp, d_hidden: hidden, a }.check().unwrap();
        let text = LoraBwdInput { d_inp, d_hidden: slot(4096, [2, 5, 5]), a }.check().unwrap_err();
        assert_eq!(text.to_string(), "lora_bwd_input: `a` is [6, 7], expected 5 rows of 7");
    }
}
