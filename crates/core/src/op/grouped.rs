//! Grouped linear layers: each expert multiplies its own rows with its own weight.
//!
//! Rows `offsets[e]..offsets[e+1]` belong to expert e. `offsets` (E+1) must start at 0, not decrease, and end at the
//! number of rows; anything else is an input error.

use super::linear;
use super::numerics::{BF16_UNIT, Numerics};
use super::spec::{Accum, Checker, OpSpec, slots};
use super::swiglu::SwigluFwd;
use crate::{DType, Result, Slot};

/// `out[r] = weight[e]·inp[r]` for the rows r of each expert e; if `act` is given, it receives SwiGLU of `out`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedLinearFwd {
    /// (rows,OC)
    pub out: Slot,
    /// (rows,OC/2), optional: `silu(gate)·up`, where a row of `out` is gate followed by up
    pub act: Option<Slot>,
    /// (rows,C)
    pub inp: Slot,
    /// (E,OC,C)
    pub weight: Slot,
    /// (E+1) i32
    pub offsets: Slot,
}

impl OpSpec for GroupedLinearFwd {
    const NAME: &'static str = "grouped_linear_fwd";
    slots!(Write out, Write act, Read inp, Read weight, Read offsets);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("out", &self.out), ("inp", &self.inp), ("weight", &self.weight)])?;
        if let Some(out) = self.act {
            SwigluFwd { out, inp: self.out }.check_as(&c, ["act", "out"])?;
        }
        check_groups(&c, ("out", &self.out), ("inp", &self.inp), ("weight", &self.weight), &self.offsets)
    }

    fn numerics(&self, arg: &str) -> Numerics {
        let product = linear::PRODUCT;
        match arg {
            // SwiGLU of gate and up, either as stored or before rounding: like GELU in `LinearFwd`, plus the rounding
            // of up.
            "act" => product.inner_roundings(2.3).fast_tanh().bf16_engines(1.5 * BF16_UNIT),
            _ => product,
        }
    }

    fn flops(&self) -> u64 {
        let swiglu = self.act.map_or(0, |out| SwigluFwd { out, inp: self.out }.flops());
        2 * self.out.numel() as u64 * self.inp.shape.cols() as u64 + swiglu
    }
}

/// `d_inp[r] = d_out[r]·weight[e]` for the rows r of each expert e.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedLinearBwdInput {
    /// (rows,C)
    pub d_inp: Slot,
    /// (rows,OC)
    pub d_out: Slot,
    /// (E,OC,C)
    pub weight: Slot,
    /// (E+1) i32
    pub offsets: Slot,
}

impl OpSpec for GroupedLinearBwdInput {
    const NAME: &'static str = "grouped_linear_bwd_input";
    slots!(Write d_inp, Read d_out, Read weight, Read offsets);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out), ("d_inp", &self.d_inp), ("weight", &self.weight)])?;
        check_groups(
            &c,
            ("d_out", &self.d_out),
            ("d_inp", &self.d_inp),
            ("weight", &self.weight),
            &self.offsets,
        )
    }

    fn numerics(&self, _: &str) -> Numerics {
        linear::PRODUCT
    }

    fn flops(&self) -> u64 {
        2 * self.d_out.numel() as u64 * self.d_inp.shape.cols() as u64
    }
}

/// `d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r]` over the rows r of each expert e. The gradient of an expert without rows
/// becomes 0, or stays unchanged if this adds. `d_weight` may have another element type than `d_out` and `inp`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedLinearBwdWeight {
    /// (E,OC,C)
    pub d_weight: Slot,
    /// (rows,OC)
    pub d_out: Slot,
    /// (rows,C)
    pub inp: Slot,
    /// (E+1) i32
    pub offsets: Slot,
    /// Whether `d_weight` is overwritten or added to.
    pub accum: Accum,
}

impl OpSpec for GroupedLinearBwdWeight {
    const NAME: &'static str = "grouped_linear_bwd_weight";
    slots!(Accumulate(accum) d_weight, Read d_out, Read inp, Read offsets);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("d_out", &self.d_out), ("inp", &self.inp)])?;
        c.same_float(&[("d_weight", &self.d_weight)])?;
        check_groups(
            &c,
            ("d_out", &self.d_out),
            ("inp", &self.inp),
            ("d_weight", &self.d_weight),
            &self.offsets,
        )
    }

    fn numerics(&self, _: &str) -> Numerics {
        linear::weight_gradient(self.accum)
    }

    fn flops(&self) -> u64 {
        2 * self.d_out.numel() as u64 * self.inp.shape.cols() as u64
    }

    fn bytes(&self) -> Option<u64> {
        let read = self.d_out.bytes() + self.inp.bytes() + self.offsets.bytes();
        let passes = if self.accum == Accum::Add { 2 } else { 1 };
        Some((read + passes * self.d_weight.bytes()) as u64)
    }
}

type Named<'a> = (&'a str, &'a Slot);

/// Checks the shapes `out` (rows,OC), `inp` (rows,C), `weight` (E,OC,C), `offsets` (E+1).
fn check_groups(c: &Checker, out: Named, inp: Named, weight: Named, offsets: &Slot) -> Result<()> {
    let [experts, oc, ic] = *weight.1.shape.dims() else {
        return c.fail(format!("`{}` is {}, expected [E, OC, C]", weight.0, weight.1.shape));
    };
    c.matrix(inp.0, inp.1, inp.1.shape.rows(), ic)?;
    c.matrix(out.0, out.1, inp.1.shape.rows(), oc)?;
    c.dtype("offsets", offsets, DType::I32)?;
    c.numel("offsets", offsets, experts + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pool, Shape};

    fn slot(shape: impl Into<Shape>, dtype: DType) -> Slot {
        Slot { pool: Pool::Io, offset: 0, shape: shape.into(), dtype }
    }

    #[test]
    fn work_is_counted_by_rows_not_by_experts() {
        let op = |experts: usize| GroupedLinearFwd {
            out: slot([10, 3], DType::F32),
            act: None,
            inp: slot([10, 5], DType::F32),
            weight: slot([experts, 3, 5], DType::F32),
            offsets: slot([experts + 1], DType::I32),
        };
        op(4).check().unwrap();
        assert_eq!((op(4).flops(), op(64).flops()), (300, 300));
        let wrong = GroupedLinearFwd { offsets: slot([4], DType::I32), ..op(4) };
        let text = wrong.check().unwrap_err().to_string();
        assert_eq!(text, "grouped_linear_fwd: `offsets` has 4 elements, expected 5");
        let flat = GroupedLinearFwd { weight: slot([12, 5], DType::F32), ..op(4) };
        let text = flat.check().unwrap_err().to_string();
        assert_eq!(text, "grouped_linear_fwd: `weight` is [12, 5], expected [E, OC, C]");
    }

    #[test]
    fn a_gate_and_what_it_opens_for_are_halves_of_a_row() {
        let op = |oc: usize, width: usize| GroupedLinearFwd {
            out: slot([10, oc], DType::F32),
            act: Some(slot([10, width], DType::F32)),
            inp: slot([10, 5], DType::F32),
            weight: slot([2, oc, 5], DType::F32),
            offsets: slot([3], DType::I32),
        };
        op(4, 2).check().unwrap();
        assert_eq!(op(4, 2).flops(), 400 + 240);
        for (oc, width) in [(4, 4), (3, 1), (4, 1)] {
            let text = op(oc, width).check().unwrap_err().to_string();
            assert!(text.starts_with("grouped_linear_fwd: `out`"), "{text}");
        }
    }
}
