//! Products of 8-bit numbers of many experts, each of which multiplies its own rows with its own weight.
//!
//! Rows `offsets[e]..offsets[e+1]` belong to expert e, as in [`GroupedLinearFwd`](super::GroupedLinearFwd). A tensor of all experts
//! has one scale. The terms of a sum are contiguous in both operands, so that a product needs them in rows or in columns, as
//! [`Quantize`](super::Quantize) writes both.

use super::fp8::{MULTIPLE, is_narrow};
use super::linear;
use super::numerics::{BF16_UNIT, Numerics, Product};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{DType, Fp8, Result, Slot};

op! {
    /// `out[r] = (a[r] · b[e]ᵀ)·a_inverse·b_inverse` for the rows r of each expert e. Sums as in [`MatmulFp8`](super::MatmulFp8).
    pub struct GroupedFp8 {
        /// (rows,N), bf16 or f32
        pub out: Slot = Write,
        /// (rows,K)
        pub a: Slot = Read,
        /// (E,N,K); or, if `beside`, (N,E·K), the experts side by side: a tensor (E,K,N) in columns
        pub b: Slot = Read,
        /// one f32
        pub a_inverse: Slot = Read,
        /// one f32
        pub b_inverse: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// How `b` is laid out.
        pub beside: bool,
        /// Whether an engine may keep fewer bits of the sum ([`Product::fp8_sum`]).
        pub fast: bool,
    }
    name "grouped_fp8"
    check(op, c) {
        c.same_float(named!(op: out))?;
        let [rows, inner, cols] = [op.a.shape.rows(), op.a.shape.cols(), op.out.shape.cols()];
        c.matrix("out", &op.out, rows, cols)?;
        check_sizes(c, [inner, cols])?;
        check_operands(c, named!(op: a, b))?;
        check_offsets(c, named!(op: a_inverse, b_inverse), &op.offsets)?;
        let experts = op.offsets.numel() - 1;
        if op.beside {
            c.matrix("b", &op.b, cols, experts * inner)
        } else {
            c.shape("b", &op.b, [experts, cols, inner])
        }
    }
    numerics(op, _arg) { rounded_sum(&op.out, op.a.shape.cols(), op.fast, linear::PRODUCT) }
    flops(op) { 2 * op.out.numel() as u64 * op.a.shape.cols() as u64 }
    operands(a, b)
}

op! {
    /// `d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r]·d_out_inverse·inp_inverse` over the rows r of each expert e, of operands in columns. The
    /// gradient of an expert without rows becomes 0, or stays unchanged if this adds.
    pub struct GroupedFp8BwdWeight {
        /// (E,OC,C), bf16 or f32
        pub d_weight: Slot = Accumulate(accum),
        /// (OC,rows)
        pub d_out: Slot = Read,
        /// (C,rows)
        pub inp: Slot = Read,
        /// one f32
        pub d_out_inverse: Slot = Read,
        /// one f32
        pub inp_inverse: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// Whether `d_weight` is overwritten or added to.
        pub accum: Accum,
    }
    name "grouped_fp8_bwd_weight"
    check(op, c) {
        c.same_float(named!(op: d_weight))?;
        let [oc, ic, rows] = [op.d_out.shape.rows(), op.inp.shape.rows(), op.inp.shape.cols()];
        c.matrix("d_out", &op.d_out, oc, rows)?;
        check_sizes(c, [oc, ic])?;
        if !rows.is_multiple_of(MULTIPLE) {
            return c.fail(format!("{rows} rows, expected a multiple of {MULTIPLE}"));
        }
        check_operands(c, named!(op: d_out, inp))?;
        check_offsets(c, named!(op: d_out_inverse, inp_inverse), &op.offsets)?;
        c.shape("d_weight", &op.d_weight, [op.offsets.numel() - 1, oc, ic])
    }
    numerics(op, _arg) {
        rounded_sum(&op.d_weight, op.inp.shape.cols(), false, linear::weight_gradient(op.accum))
    }
    flops(op) { 2 * op.d_out.numel() as u64 * op.inp.shape.rows() as u64 }
    bytes(op) { linear::weight_gradient_bytes(op.accum, &op.d_weight, &[op.d_out, op.inp, op.offsets]) }
    operands(d_out, inp)
}

/// The accuracy of a sum of `terms` terms: of an f32 result only the sum is inexact, of a bf16 result mostly the rounding.
fn rounded_sum(out: &Slot, terms: usize, fast: bool, product: Numerics) -> Numerics {
    let sum = Product::fp8_sum(terms, fast);
    let rounding = if out.dtype == DType::F32 { 0.0 } else { 1.5 * BF16_UNIT };
    product.product(Product::Fp8 { sum }).bf16_engines((2.0 * sum).max(rounding))
}

fn check_sizes(c: &Checker, sizes: [usize; 2]) -> Result<()> {
    if sizes.iter().all(|size| size.is_multiple_of(MULTIPLE)) {
        return Ok(());
    }
    c.fail(format!("weights of {} by {}, expected multiples of {MULTIPLE}", sizes[0], sizes[1]))
}

fn check_operands(c: &Checker, operands: &[Named<'_>; 2]) -> Result<()> {
    for (name, slot) in operands {
        is_narrow(c, name, slot)?;
    }
    if operands.iter().all(|(_, slot)| slot.dtype == DType::F8(Fp8::E5M2)) {
        let [(a, _), (b, _)] = operands;
        return c.fail(format!("`{a}` and `{b}` are both e5m2, expected e4m3 for one of them"));
    }
    Ok(())
}

fn check_offsets(c: &Checker, inverses: &[Named<'_>; 2], offsets: &Slot) -> Result<()> {
    c.dtypes(inverses, DType::F32)?;
    c.numels(inverses, 1)?;
    c.dtype("offsets", offsets, DType::I32)?;
    if offsets.numel() < 2 {
        return c.fail(format!("`offsets` is {}, expected [E + 1] with at least one expert", offsets.shape));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{Pool, Shape};

    fn slot(shape: impl Into<Shape>, dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset: 0, shape: shape.into(), dtype }
    }

    fn one() -> Slot {
        slot([1], DType::F32)
    }

    const E4M3: DType = DType::F8(Fp8::E4M3);
    const E5M2: DType = DType::F8(Fp8::E5M2);

    fn product(b: Shape, beside: bool) -> GroupedFp8 {
        GroupedFp8 {
            out: slot([10, 32], DType::BF16),
            a: slot([10, 48], E4M3),
            b: slot(b, E4M3),
            a_inverse: one(),
            b_inverse: one(),
            offsets: slot([4], DType::I32),
            beside,
            fast: true,
        }
    }

    #[test]
    fn experts_are_one_below_or_one_beside_the_other() {
        product([3, 32, 48].into(), false).check().unwrap();
        product([32, 3 * 48].into(), true).check().unwrap();
        assert_eq!(product([3, 32, 48].into(), false).flops(), 2 * 10 * 32 * 48);
        let refused = |op: GroupedFp8, text: &str| assert_eq!(op.check().unwrap_err().to_string(), text);
        refused(product([32, 3 * 48].into(), false), "grouped_fp8: `b` is [32, 144], expected [3, 32, 48]");
        let wide = GroupedFp8 { a: slot([10, 40], E4M3), ..product([3, 32, 40].into(), false) };
        refused(wide, "grouped_fp8: weights of 40 by 32, expected multiples of 16");
        let both =
            GroupedFp8 { a: slot([10, 48], E5M2), b: slot([3, 32, 48], E5M2), ..product([1].into(), false) };
        refused(both, "grouped_fp8: `a` and `b` are both e5m2, expected e4m3 for one of them");
    }

    #[test]
    fn a_gradient_of_weights_sums_over_rows_that_are_contiguous() {
        let op = |rows: usize| GroupedFp8BwdWeight {
            d_weight: slot([3, 32, 48], DType::F32),
            d_out: slot([32, rows], E5M2),
            inp: slot([48, rows], E4M3),
            d_out_inverse: one(),
            inp_inverse: one(),
            offsets: slot([4], DType::I32),
            accum: Accum::Write,
        };
        op(64).check().unwrap();
        assert_eq!(op(64).flops(), 2 * 64 * 32 * 48);
        let text = op(40).check().unwrap_err().to_string();
        assert_eq!(text, "grouped_fp8_bwd_weight: 40 rows, expected a multiple of 16");
    }
}
