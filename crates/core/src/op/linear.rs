//! Linear layers: forward with bias and optional activation, and the two gradients.

use super::activation::PreAct;
use super::numerics::{Arithmetic, BF16_UNIT, Numerics, Product};
use super::spec::{Accum, Checker, Named, named, op};
use crate::{Result, Slot};

/// Dot products of up to 3072 terms.
pub(super) const PRODUCT: Numerics = Numerics::new(Arithmetic::Sum(3e-6)).product(Product::Linear);

/// The gradient of a weight. If an engine adds the old gradient after the product's kernel, the product is rounded
/// first.
pub(super) fn weight_gradient(accum: Accum) -> Numerics {
    if accum == Accum::Write { PRODUCT } else { PRODUCT.inner_roundings(1.0) }
}

op! {
    /// `out = inp · weightᵀ + bias`; if `pre` is given, `pre = inp · weightᵀ + bias` and `out = act(pre)`.
    pub struct LinearFwd {
        /// (..,OC)
        pub out: Slot = Write,
        /// (..,OC), optional: the activation to apply and the slot for the values before it
        pub pre: Option<PreAct> = Write,
        /// (..,C)
        pub inp: Slot = Read,
        /// (OC,C)
        pub weight: Slot = Read,
        /// (OC)
        pub bias: Option<Slot> = Read,
    }
    name "linear_fwd"
    check(op, c) {
        let (rows, oc) = check_product(c, named!(op: out, inp, weight))?;
        if let Some(PreAct { slot: pre, .. }) = &op.pre {
            c.matrix("pre", pre, rows, oc)?;
            c.same_float(&[("out", &op.out), ("pre", pre)])?;
        }
        if let Some(bias) = &op.bias {
            c.shape("bias", bias, [oc])?;
            c.same_float(&[("weight", &op.weight), ("bias", bias)])?;
        }
        Ok(())
    }
    numerics(op, arg) {
        let product = PRODUCT.bf16_engines(1.5 * BF16_UNIT);
        match (arg, op.pre) {
            // The activation is computed from `pre` either as stored or before rounding.
            ("out", Some(pre)) => pre.act.after(product.inner_roundings(pre.act.gain())),
            // If the bias is added after the product's kernel, the product is rounded first. Some kernels of cuBLASLt,
            // and so PyTorch's addmm, do this.
            _ if op.bias.is_some() => product.inner_roundings(1.0),
            _ => product,
        }
    }
    flops(op) { product_flops(&op.out, &op.inp) }
    operands(inp, weight)
}

op! {
    /// `d_inp = d_out · weight`; if `pre` is given, the input was `act(pre)` and `d_inp = (d_out · weight) · act'(pre)`.
    pub struct LinearBwdInput {
        /// (..,C)
        pub d_inp: Slot = Write,
        /// (..,OC)
        pub d_out: Slot = Read,
        /// (OC,C)
        pub weight: Slot = Read,
        /// (..,C)
        pub pre: Option<PreAct> = Read,
    }
    name "linear_bwd_input"
    check(op, c) {
        check_product(c, named!(op: d_out, d_inp, weight))?;
        if let Some(PreAct { slot: pre, .. }) = &op.pre {
            c.matrix("pre", pre, op.d_inp.shape.rows(), op.d_inp.shape.cols())?;
            c.same_float(&[("d_inp", &op.d_inp), ("pre", pre)])?;
        }
        Ok(())
    }
    numerics(op, _arg) {
        let product = PRODUCT.bf16_engines(1.5 * BF16_UNIT);
        match op.pre {
            // The product may be rounded before it is multiplied by act'.
            Some(pre) => pre.act.after(product.inner_roundings(1.0)),
            None => product,
        }
    }
    flops(op) { product_flops(&op.d_out, &op.d_inp) }
    operands(d_out, weight)
}

op! {
    /// `d_weight (+)= d_outᵀ · inp` and `d_bias (+)= Σ_rows d_out`. Both may have another element type than `d_out` and
    /// `inp`.
    pub struct LinearBwdWeight {
        /// (OC,C)
        pub d_weight: Slot = Accumulate(accum),
        /// (OC)
        pub d_bias: Option<Slot> = Accumulate(accum),
        /// (..,OC)
        pub d_out: Slot = Read,
        /// (..,C)
        pub inp: Slot = Read,
        /// Whether both gradients are overwritten or added to.
        pub accum: Accum,
    }
    name "linear_bwd_weight"
    check(op, c) {
        c.same_float(named!(op: d_out, inp))?;
        c.same_float(named!(op: d_weight))?;
        let (_, oc) = check_shapes(c, named!(op: d_out, inp, d_weight))?;
        if let Some(d_bias) = &op.d_bias {
            c.shape("d_bias", d_bias, [oc])?;
            c.same_float(&[("d_weight", &op.d_weight), ("d_bias", d_bias)])?;
        }
        Ok(())
    }
    numerics(op, arg) { if arg == "d_weight" { weight_gradient(op.accum) } else { PRODUCT } }
    flops(op) { product_flops(&op.d_out, &op.inp) }
    bytes(op) { weight_gradient_bytes(op.accum, &op.d_weight, &[op.d_out, op.inp]) }
    operands(d_out, inp)
}

/// Checks `out` (rows,OC) = `inp` (rows,C) · `weight` (OC,C)ᵀ; returns (rows, OC).
fn check_product(c: &Checker, slots: &[Named<'_>; 3]) -> Result<(usize, usize)> {
    c.same_float(slots)?;
    check_shapes(c, slots)
}

/// As [`check_product`], but does not check the element types.
fn check_shapes(c: &Checker, &[out, inp, weight]: &[Named<'_>; 3]) -> Result<(usize, usize)> {
    let (rows, ic) = (inp.1.shape.rows(), inp.1.shape.cols());
    let oc = weight.1.shape.rows();
    c.matrix(weight.0, weight.1, oc, ic)?;
    c.matrix(out.0, out.1, rows, oc)?;
    Ok((rows, oc))
}

/// The operations of a product of rows (..,C) with a matrix, whose result is (..,OC), or of its gradients.
pub(super) fn product_flops(out: &Slot, inp: &Slot) -> u64 {
    2 * out.numel() as u64 * inp.shape.cols() as u64
}

/// The bytes moved for the gradient of a weight: the engine reads the old one only where it always adds.
pub(super) fn weight_gradient_bytes(accum: Accum, d_weight: &Slot, read: &[Slot]) -> u64 {
    let passes = if accum == Accum::Add { 2 } else { 1 };
    (read.iter().map(Slot::bytes).sum::<usize>() + passes * d_weight.bytes()) as u64
}
