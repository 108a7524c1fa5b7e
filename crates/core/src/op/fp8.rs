//! Products of 8-bit numbers: the largest element of a tensor, the tensor in 8 bits, and the product of two of those.
//!
//! An engine that computes in f32 only runs the same ops over f32 slots that hold the numbers of the format.

use super::activation::{Act, PreAct};
use super::linear::PRODUCT;
use super::numerics::{Arithmetic, BF16_UNIT, Numerics, Product};
use super::spec::{Accum, Checker, named, op};
use crate::{DType, Fp8, Result, Slot};

/// What the rows and columns of operands are multiples of: the products of GPUs need it.
pub(super) const MULTIPLE: usize = 16;

op! {
    /// `amax = max |inp|`; NaN if an element is NaN.
    pub struct Amax {
        /// one f32
        pub amax: Slot = Write,
        /// any shape, a multiple of 16 elements
        pub inp: Slot = Read,
    }
    name "amax"
    check(op, c) {
        c.dtype("amax", &op.amax, DType::F32)?;
        c.numel("amax", &op.amax, 1)?;
        c.same_float(named!(op: inp))?;
        if !op.inp.numel().is_multiple_of(MULTIPLE) {
            return c.fail(format!("`inp` has {} elements, expected a multiple of {MULTIPLE}", op.inp.numel()));
        }
        Ok(())
    }
    numerics { Numerics::EXACT }
    flops(op) { op.inp.numel() as u64 }
}

op! {
    /// `out = fp8(x·s)` for a power of two `s`, as `out_t` transposed too, and `inverse = 1/s`. `x` is `inp`, or `act(inp)`, or with
    /// `pre` `inp·act'(pre)`. `d_bias (+)= Σ_rows x`.
    ///
    /// `s` is the largest that keeps `amax·2^margin` within the format ([`Fp8::scale_exponent`]); what is larger all the same
    /// becomes the largest number. What is not finite becomes NaN.
    pub struct Quantize {
        /// (rows,cols)
        pub out: Option<Slot> = Write,
        /// (cols,rows)
        pub out_t: Option<Slot> = Write,
        /// one f32
        pub inverse: Slot = Write,
        /// (cols)
        pub d_bias: Option<Slot> = Accumulate(accum),
        /// (..,cols)
        pub inp: Slot = Read,
        /// (..,cols), optional: the activation whose derivative to multiply by, and its input
        pub pre: Option<PreAct> = Read,
        /// one f32: what no |x| is larger than, or was not until now
        pub amax: Slot = Read,
        /// one f32, optional: becomes the largest |x| if that is larger; NaN is the largest
        pub seen: Option<Slot> = Update,
        /// The activation to apply.
        pub act: Option<Act>,
        /// The format of the result.
        pub format: Fp8,
        /// How many doublings of `amax` fit the format.
        pub margin: i32,
        /// The exponent of the scale where `amax` is 0 or not finite.
        pub unknown: i32,
        /// Whether `d_bias` is overwritten or added to.
        pub accum: Accum,
    }
    name "quantize"
    check(op, c) {
        c.same_float(named!(op: inp))?;
        let (rows, cols) = (op.inp.shape.rows(), op.inp.shape.cols());
        if !rows.is_multiple_of(MULTIPLE) || !cols.is_multiple_of(MULTIPLE) {
            return c.fail(format!("`inp` is {rows} rows of {cols}, expected multiples of {MULTIPLE}"));
        }
        c.dtypes(named!(op: amax, inverse), DType::F32)?;
        c.numels(named!(op: amax, inverse), 1)?;
        for (name, slot, [rows, cols]) in [("out", op.out, [rows, cols]), ("out_t", op.out_t, [cols, rows])] {
            if let Some(slot) = &slot {
                c.matrix(name, slot, rows, cols)?;
                is_format(c, name, slot, op.format)?;
            }
        }
        if let Some(PreAct { slot: pre, .. }) = &op.pre {
            c.matrix("pre", pre, rows, cols)?;
            c.same_float(&[("inp", &op.inp), ("pre", pre)])?;
            if op.act.is_some() {
                return c.fail("`act` and `pre` are both given, expected at most one".into());
            }
        }
        if let Some(seen) = &op.seen {
            c.dtype("seen", seen, DType::F32)?;
            c.numel("seen", seen, 1)?;
        }
        match &op.d_bias {
            Some(d_bias) => {
                c.same_float(&[("d_bias", d_bias)])?;
                c.shape("d_bias", d_bias, [cols])
            }
            None => Ok(()),
        }
    }
    numerics(op, arg) {
        match arg {
            "d_bias" => Numerics { product: None, ..PRODUCT },
            "inverse" => Numerics::EXACT,
            "seen" if op.act.is_some() || op.pre.is_some() => Numerics::new(Arithmetic::Elementwise(2e-6)),
            _ if op.act.is_none() && op.pre.is_none() => Numerics::EXACT,
            // Engines compute the activation to some 1e-6, so that now and then a value near the middle of two numbers goes to
            // the other one: such an element is off by the distance of the two. Verification detects elements that are off by
            // ten times this, and a tensor only if many are.
            _ => {
                let flip = op.format.spacing() / 8.0;
                Numerics::new(Arithmetic::Elementwise(flip)).bf16_engines(flip)
            }
        }
    }
    flops(op) { 2 * op.inp.numel() as u64 }
}

op! {
    /// For every tensor in 8 bits: the largest element of earlier steps becomes that of this step, or 15/16 of what it was if that is
    /// larger. One that is not finite is not taken over, so that a bad step leaves nothing behind. The one of this step becomes 0.
    pub struct ScaleUpdate {
        /// (n,2): of earlier steps, and of this one
        pub scales: Slot = Update,
    }
    name "scale_update"
    check(op, c) {
        c.dtype("scales", &op.scales, DType::F32)?;
        match *op.scales.shape.dims() {
            [_, 2] => Ok(()),
            _ => c.fail(format!("`scales` is {}, expected pairs", op.scales.shape)),
        }
    }
    numerics { Numerics::EXACT }
    flops(op) { op.scales.numel() as u64 }
}

impl ScaleUpdate {
    /// What is left of the largest element of earlier steps after a step in which all were smaller.
    pub const DECAY: f32 = 0.9375;

    /// The pair after a step; exact but for the rounding of one product.
    pub fn next([earlier, seen]: [f32; 2]) -> [f32; 2] {
        let kept = earlier * Self::DECAY;
        [if seen.is_finite() && seen > 0.0 { seen.max(kept) } else { earlier }, 0.0]
    }
}

op! {
    /// `out (+)= (a · bᵀ)·a_inverse·b_inverse + bias`, of operands in 8 bits whose scales are undone in the result. Products are
    /// exact in f32; sums are f32, of which an engine may keep fewer bits ([`Product::fp8_sum`]).
    pub struct MatmulFp8 {
        /// (M,N), bf16 or f32
        pub out: Slot = Accumulate(accum),
        /// (N), of the type of `out`
        pub bias: Option<Slot> = Read,
        /// (M,K)
        pub a: Slot = Read,
        /// (N,K)
        pub b: Slot = Read,
        /// one f32
        pub a_inverse: Slot = Read,
        /// one f32
        pub b_inverse: Slot = Read,
        /// Whether `out` is overwritten or added to.
        pub accum: Accum,
        /// Whether an engine may keep fewer bits of the sum ([`Product::fp8_sum`]).
        pub fast: bool,
    }
    name "matmul_fp8"
    check(op, c) {
        let (rows, inner, cols) = (op.a.shape.rows(), op.a.shape.cols(), op.b.shape.rows());
        c.matrix("b", &op.b, cols, inner)?;
        c.matrix("out", &op.out, rows, cols)?;
        c.same_float(named!(op: out))?;
        for (name, slot) in named!(op: a, b) {
            is_narrow(c, name, slot)?;
        }
        if op.a.dtype == DType::F8(Fp8::E5M2) && op.b.dtype == DType::F8(Fp8::E5M2) {
            return c.fail("`a` and `b` are both e5m2, expected e4m3 for one of them".into());
        }
        if [rows, inner, cols].iter().any(|size| !size.is_multiple_of(MULTIPLE)) {
            return c.fail(format!("{rows} by {cols} by {inner} terms, expected multiples of {MULTIPLE}"));
        }
        c.dtypes(named!(op: a_inverse, b_inverse), DType::F32)?;
        c.numels(named!(op: a_inverse, b_inverse), 1)?;
        match &op.bias {
            Some(bias) => {
                c.shape("bias", bias, [cols])?;
                c.same_float(&[("out", &op.out), ("bias", bias)])
            }
            None => Ok(()),
        }
    }
    numerics(op, _arg) {
        let sum = Product::fp8_sum(op.a.shape.cols(), op.fast);
        let product = Numerics { product: Some(Product::Fp8 { sum }), ..PRODUCT };
        let product = if op.accum == Accum::Write && op.bias.is_none() { product } else { product.inner_roundings(1.0) };
        // of an f32 result only the sum is inexact, of a bf16 result mostly the rounding
        let rounding = if op.out.dtype == DType::F32 { 0.0 } else { 1.5 * BF16_UNIT };
        product.bf16_engines((2.0 * sum).max(rounding))
    }
    flops(op) { 2 * op.out.numel() as u64 * op.a.shape.cols() as u64 }
    operands(a, b)
}

/// Checks that a slot holds numbers of one of the formats: in 8 bits, or in f32.
pub(super) fn is_narrow(c: &Checker, name: &str, slot: &Slot) -> Result<()> {
    if matches!(slot.dtype, DType::F8(_) | DType::F32) {
        return Ok(());
    }
    c.fail(format!("`{name}` is {}, expected e4m3, e5m2 or f32", slot.dtype))
}

/// Checks that a slot holds numbers of this format: in 8 bits, or in f32.
fn is_format(c: &Checker, name: &str, slot: &Slot, format: Fp8) -> Result<()> {
    if slot.dtype == DType::F8(format) || slot.dtype == DType::F32 {
        return Ok(());
    }
    c.fail(format!("`{name}` is {}, expected {format} or f32", slot.dtype))
}
