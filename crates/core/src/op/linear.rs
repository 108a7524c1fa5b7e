//! Linear layers: forward with bias and optional activation, and the two gradients.

use super::activation::PreAct;
use super::numerics::{Arithmetic, BF16_UNIT, Numerics, Product};
use super::spec::{Accum, Checker, OpSpec, slots};
use crate::{Result, Slot};

/// Dot products of up to 3072 terms.
pub(super) const PRODUCT: Numerics = Numerics::new(Arithmetic::Sum(3e-6)).product(Product::Linear);

/// The gradient of a weight. If an engine adds the old gradient after the product's kernel, the product is rounded
/// first.
pub(super) fn weight_gradient(accum: Accum) -> Numerics {
    if accum == Accum::Write { PRODUCT } else { PRODUCT.inner_roundings(1.0) }
}

/// `out = inp · weightᵀ + bias`; if `pre` is given, `pre = inp · weightᵀ + bias` and `out = act(pre)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearFwd {
    /// (..,OC)
    pub out: Slot,
    /// (..,OC), optional: the activation to apply and the slot for the values before it
    pub pre: Option<PreAct>,
    /// (..,C)
    pub inp: Slot,
    /// (OC,C)
    pub weight: Slot,
    /// (OC)
    pub bias: Option<Slot>,
}

impl OpSpec for LinearFwd {
    const NAME: &'static str = "linear_fwd";
    slots!(Write out, Write pre, Read inp, Read weight, Read bias);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        let (rows, oc) = check_product(&c, ("out", &self.out), ("inp", &self.inp), ("weight", &self.weight))?;
        if let Some(PreAct { slot: pre, .. }) = &self.pre {
            c.matrix("pre", pre, rows, oc)?;
            c.same_float(&[("out", &self.out), ("pre", pre)])?;
        }
        if let Some(bias) = &self.bias {
            c.shape("bias", bias, [oc])?;
            c.same_float(&[("weight", &self.weight), ("bias", bias)])?;
        }
        Ok(())
    }

    fn numerics(&self, arg: &str) -> Numerics {
        let product = PRODUCT.bf16_engines(1.5 * BF16_UNIT);
        match (arg, self.pre) {
            // The activation is computed from `pre` either as stored or before rounding.
            ("out", Some(pre)) => pre.act.after(product.inner_roundings(pre.act.gain())),
            // If the bias is added after the product's kernel, the product is rounded first. Some kernels of cuBLASLt,
            // and so PyTorch's addmm, do this.
            _ if self.bias.is_some() => product.inner_roundings(1.0),
            _ => product,
        }
    }

    fn flops(&self) -> u64 {
        product_flops(&self.out, self.inp.shape.cols())
    }
}

/// `d_inp = d_out · weight`; if `pre` is given, the input was `act(pre)` and `d_inp = (d_out · weight) · act'(pre)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearBwdInput {
    /// (..,C)
    pub d_inp: Slot,
    /// (..,OC)
    pub d_out: Slot,
    /// (OC,C)
    pub weight: Slot,
    /// (..,C)
    pub pre: Option<PreAct>,
}

impl OpSpec for LinearBwdInput {
    const NAME: &'static str = "linear_bwd_input";
    slots!(Write d_inp, Read d_out, Read weight, Read pre);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        check_product(&c, ("d_out", &self.d_out), ("d_inp", &self.d_inp), ("weight", &self.weight))?;
        if let Some(PreAct { slot: pre, .. }) = &self.pre {
            c.matrix("pre", pre, self.d_inp.shape.rows(), self.d_inp.shape.cols())?;
            c.same_float(&[("d_inp", &self.d_inp), ("pre", pre)])?;
        }
        Ok(())
    }

    fn numerics(&self, _: &str) -> Numerics {
        let product = PRODUCT.bf16_engines(1.5 * BF16_UNIT);
        match self.pre {
            // The product may be rounded before it is multiplied by act'.
            Some(pre) => pre.act.after(product.inner_roundings(1.0)),
            None => product,
        }
    }

    fn flops(&self) -> u64 {
        product_flops(&self.d_out, self.d_inp.shape.cols())
    }
}

/// `d_weight (+)= d_outᵀ · inp` and `d_bias (+)= Σ_rows d_out`. Both may have another element type than `d_out` and
/// `inp`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearBwdWeight {
    /// (OC,C)
    pub d_weight: Slot,
    /// (OC)
    pub d_bias: Option<Slot>,
    /// (..,OC)
    pub d_out: Slot,
    /// (..,C)
    pub inp: Slot,
    /// Whether both gradients are overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for LinearBwdWeight {
    const NAME: &'static str = "linear_bwd_weight";
    slots!(Accumulate(accum) d_weight, Accumulate(accum) d_bias, Read d_out, Read inp);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out), ("inp", &self.inp)])?;
        c.same_float(&[("d_weight", &self.d_weight)])?;
        let (_, oc) =
            check_shapes(&c, ("d_out", &self.d_out), ("inp", &self.inp), ("d_weight", &self.d_weight))?;
        if let Some(d_bias) = &self.d_bias {
            c.shape("d_bias", d_bias, [oc])?;
            c.same_float(&[("d_weight", &self.d_weight), ("d_bias", d_bias)])?;
        }
        Ok(())
    }

    fn numerics(&self, arg: &str) -> Numerics {
        if arg == "d_weight" { weight_gradient(self.accum) } else { PRODUCT }
    }

    fn flops(&self) -> u64 {
        product_flops(&self.d_out, self.inp.shape.cols())
    }

    fn bytes(&self) -> Option<u64> {
        let read = self.d_out.bytes() + self.inp.bytes();
        let passes = if self.accum == Accum::Add { 2 } else { 1 };
        Some((read + passes * self.d_weight.bytes()) as u64)
    }
}

type Named<'a> = (&'a str, &'a Slot);

/// Checks `out` (rows,OC) = `inp` (rows,C) · `weight` (OC,C)ᵀ; returns (rows, OC).
fn check_product(c: &Checker, out: Named, inp: Named, weight: Named) -> Result<(usize, usize)> {
    c.same_float(&[out, inp, weight])?;
    check_shapes(c, out, inp, weight)
}

fn check_shapes(c: &Checker, out: Named, inp: Named, weight: Named) -> Result<(usize, usize)> {
    let (rows, ic) = (inp.1.shape.rows(), inp.1.shape.cols());
    let oc = weight.1.shape.rows();
    c.matrix(weight.0, weight.1, oc, ic)?;
    c.matrix(out.0, out.1, rows, oc)?;
    Ok((rows, oc))
}

fn product_flops(out: &Slot, inner: usize) -> u64 {
    2 * out.numel() as u64 * inner as u64
}
