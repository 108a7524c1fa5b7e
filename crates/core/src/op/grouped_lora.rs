//! Low-rank adapters of experts: each expert has an A and a B of its own beside its frozen weight.
//!
//! Rows `offsets[e]..offsets[e+1]` belong to expert e, as in [`GroupedLinearFwd`](super::GroupedLinearFwd), which is also
//! `hidden = A[e]·x`; the gradient of A is a `grouped_linear_bwd_weight`. Parts are those of [`LoraParts`]: gate and up of
//! an expert are one product, so their A are one (P·r,C) matrix for each expert, and their B follow each other.

use super::linear::{PRODUCT, weight_gradient};
use super::lora::{ADDED, LoraParts, columns, flops};
use super::numerics::BF16_UNIT;
use super::spec::{Accum, Checker, Named, named, op};
use crate::{DType, Result, Slot};

op! {
    /// `out[r, part] += scale · hidden[r, part] · b[e, part]ᵀ` for the rows r of each expert e and each part; the other
    /// columns stay.
    pub struct GroupedLoraFwd {
        /// (rows,OC)
        pub out: Slot = Update,
        /// (rows,P·r)
        pub hidden: Slot = Read,
        /// (E,rows of the parts,r)
        pub b: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// Which columns of `out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
    }
    name "grouped_lora_fwd"
    check(op, c) {
        c.same_float(named!(op: out, hidden, b))?;
        check(c, &op.parts, named!(op: out, hidden, b), &op.offsets)
    }
    numerics { ADDED }
    flops(op) { flops(&op.hidden, &op.b, &op.parts) }
    bytes(op) {
        let small = op.hidden.bytes() + op.b.bytes() + op.offsets.bytes();
        (2 * columns(&op.out, &op.parts) + small) as u64
    }
    operands(hidden, b)
}

op! {
    /// `d_hidden[r, part] = scale · d_out[r, part] · b[e, part]` for the rows r of each expert e and each part.
    pub struct GroupedLoraBwdHidden {
        /// (rows,P·r)
        pub d_hidden: Slot = Write,
        /// (rows,OC)
        pub d_out: Slot = Read,
        /// (E,rows of the parts,r)
        pub b: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// Which columns of `d_out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
    }
    name "grouped_lora_bwd_hidden"
    check(op, c) {
        c.same_float(named!(op: d_out, d_hidden, b))?;
        check(c, &op.parts, named!(op: d_out, d_hidden, b), &op.offsets)
    }
    numerics { PRODUCT.bf16_engines(1.5 * BF16_UNIT) }
    flops(op) { flops(&op.d_hidden, &op.b, &op.parts) }
    bytes(op) {
        let small = op.d_hidden.bytes() + op.b.bytes() + op.offsets.bytes();
        (columns(&op.d_out, &op.parts) + small) as u64
    }
    operands(d_out, b)
}

op! {
    /// `d_b[e, part] (+)= scale · Σ_r d_out[r, part]ᵀ · hidden[r, part]` over the rows r of each expert e, for each part. The
    /// gradient of an expert without rows becomes 0, or stays unchanged if this adds. `d_b` may have another element type
    /// than `d_out` and `hidden`.
    pub struct GroupedLoraBwdWeight {
        /// (E,rows of the parts,r)
        pub d_b: Slot = Accumulate(accum),
        /// (rows,OC)
        pub d_out: Slot = Read,
        /// (rows,P·r)
        pub hidden: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// Which columns of `d_out` the parts are.
        pub parts: LoraParts,
        /// The factor of the product: alpha / r.
        pub scale: f32,
        /// Whether `d_b` is overwritten or added to.
        pub accum: Accum,
    }
    name "grouped_lora_bwd_weight"
    check(op, c) {
        c.same_float(named!(op: d_out, hidden))?;
        c.same_float(named!(op: d_b))?;
        check(c, &op.parts, named!(op: d_out, hidden, d_b), &op.offsets)
    }
    numerics(op, _arg) { weight_gradient(op.accum) }
    flops(op) { flops(&op.hidden, &op.d_b, &op.parts) }
    bytes(op) {
        let passes = if op.accum == Accum::Add { 2 } else { 1 };
        let small = op.hidden.bytes() + passes * op.d_b.bytes() + op.offsets.bytes();
        (columns(&op.d_out, &op.parts) + small) as u64
    }
    operands(d_out, hidden)
}

op! {
    /// `d_inp[r] += d_hidden[r] · a[e]` for the rows r of each expert e: what the adapters add to the gradient of the
    /// experts' input.
    pub struct GroupedLoraBwdInput {
        /// (rows,C)
        pub d_inp: Slot = Update,
        /// (rows,P·r)
        pub d_hidden: Slot = Read,
        /// (E,P·r,C)
        pub a: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
    }
    name "grouped_lora_bwd_input"
    check(op, c) {
        c.same_float(named!(op: d_inp, d_hidden, a))?;
        let experts = check_offsets(c, ("a", &op.a), &op.offsets)?;
        c.matrix("a", &op.a, experts * op.d_hidden.shape.cols(), op.d_inp.shape.cols())?;
        c.matrix("d_hidden", &op.d_hidden, op.d_inp.shape.rows(), op.d_hidden.shape.cols())
    }
    numerics { ADDED }
    flops(op) { 2 * op.d_inp.numel() as u64 * op.d_hidden.shape.cols() as u64 }
    operands(d_hidden, a)
}

/// How many experts a weight (E,rows,columns) has; checks `offsets` (E+1).
fn check_offsets(c: &Checker, weight: Named<'_>, offsets: &Slot) -> Result<usize> {
    let [experts, _, _] = *weight.1.shape.dims() else {
        return c.fail(format!("`{}` is {}, expected [E, rows, columns]", weight.0, weight.1.shape));
    };
    c.dtype("offsets", offsets, DType::I32)?;
    c.numel("offsets", offsets, experts + 1)?;
    Ok(experts)
}

/// Checks `out` (rows,OC), `hidden` (rows,P·r), `b` (E,ΣOC of the parts,r) and `offsets` (E+1).
fn check(c: &Checker, parts: &LoraParts, slots: &[Named<'_>; 3], offsets: &Slot) -> Result<()> {
    let experts = check_offsets(c, slots[2], offsets)?;
    parts.check(c, slots, experts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{Pool, Shape};

    fn slot(offset: usize, shape: impl Into<Shape>, dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset, shape: shape.into(), dtype }
    }

    #[test]
    fn every_expert_has_a_part_of_b_and_of_a() {
        let offsets = slot(0, [5], DType::I32);
        let parts = LoraParts::new(&[0..6, 8..10]).unwrap();
        let (out, hidden) = (slot(64, [7, 10], DType::F32), slot(4096, [7, 6], DType::F32));
        let b = slot(8192, [4, 8, 3], DType::F32);
        let good = GroupedLoraFwd { out, hidden, b, offsets, parts, scale: 2.0 };
        good.check().unwrap();
        assert_eq!(good.flops(), 2 * 7 * 8 * 3, "by rows, not by experts");
        assert_eq!(good.bytes(), Some(4 * (2 * 56 + 42 + 96 + 5)));
        let refused = |op: GroupedLoraFwd| op.check().unwrap_err().to_string();
        assert_eq!(
            refused(GroupedLoraFwd { b: slot(8192, [8, 3], DType::F32), ..good }),
            "grouped_lora_fwd: `b` is [8, 3], expected [E, rows, columns]"
        );
        assert_eq!(
            refused(GroupedLoraFwd { offsets: slot(0, [4], DType::I32), ..good }),
            "grouped_lora_fwd: `offsets` has 4 elements, expected 5"
        );
        assert_eq!(
            refused(GroupedLoraFwd { b: slot(8192, [4, 7, 3], DType::F32), ..good }),
            "grouped_lora_fwd: `b` is [4, 7, 3], expected 32 rows of 3"
        );
        let (d_inp, a) = (slot(64, [7, 5], DType::F32), slot(8192, [4, 6, 5], DType::F32));
        let input = GroupedLoraBwdInput { d_inp, d_hidden: hidden, a, offsets };
        input.check().unwrap();
        let wrong = GroupedLoraBwdInput { d_hidden: slot(4096, [7, 3], DType::F32), ..input };
        let text = wrong.check().unwrap_err().to_string();
        assert_eq!(text, "grouped_lora_bwd_input: `a` is [4, 6, 5], expected 12 rows of 5");
    }
}
