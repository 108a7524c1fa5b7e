//! Grouped linear layers: each expert multiplies its own rows with its own weight.
//!
//! Rows `offsets[e]..offsets[e+1]` belong to expert e. `offsets` (E+1) must start at 0, not decrease, and end at the
//! number of rows; anything else is an input error.

use super::linear;
use super::numerics::BF16_UNIT;
use super::spec::{Accum, Checker, Named, named, op};
use super::swiglu::{Gate, SwigluFwd};
use crate::{DType, Result, Slot};

op! {
    /// `out[r] = weight[e]·inp[r]` for the rows r of each expert e; if `act` is given, it receives SwiGLU of `out`.
    pub struct GroupedLinearFwd {
        /// (rows,OC)
        pub out: Slot = Write,
        /// (rows,OC/2), optional: `silu(gate)·up`, where a row of `out` is gate followed by up
        pub act: Option<Slot> = Write,
        /// (rows,C)
        pub inp: Slot = Read,
        /// (E,OC,C)
        pub weight: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
    }
    name "grouped_linear_fwd"
    check(op, c) {
        c.same_float(named!(op: out, inp, weight))?;
        if let Some(out) = op.act {
            SwigluFwd { out, inp: op.out, gate: Gate::Silu }.check_as(c, ["act", "out"])?;
        }
        check_groups(c, named!(op: out, inp, weight), &op.offsets)
    }
    numerics(_op, arg) {
        let product = linear::PRODUCT;
        match arg {
            // SwiGLU of gate and up, either as stored or before rounding: like GELU in `LinearFwd`, plus the rounding
            // of up.
            "act" => product.inner_roundings(2.3).fast_tanh().bf16_engines(1.5 * BF16_UNIT),
            _ => product,
        }
    }
    flops(op) {
        let swiglu = op.act.map_or(0, |out| SwigluFwd { out, inp: op.out, gate: Gate::Silu }.flops());
        linear::product_flops(&op.out, &op.inp) + swiglu
    }
    operands(inp, weight)
}

op! {
    /// `d_inp[r] = d_out[r]·weight[e]` for the rows r of each expert e.
    pub struct GroupedLinearBwdInput {
        /// (rows,C)
        pub d_inp: Slot = Write,
        /// (rows,OC)
        pub d_out: Slot = Read,
        /// (E,OC,C)
        pub weight: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
    }
    name "grouped_linear_bwd_input"
    check(op, c) {
        c.same_float(named!(op: d_out, d_inp, weight))?;
        check_groups(c, named!(op: d_out, d_inp, weight), &op.offsets)
    }
    numerics { linear::PRODUCT }
    flops(op) { linear::product_flops(&op.d_out, &op.d_inp) }
    operands(d_out, weight)
}

op! {
    /// `d_weight[e] (+)= Σ_r d_out[r]ᵀ·inp[r]` over the rows r of each expert e. The gradient of an expert without rows
    /// becomes 0, or stays unchanged if this adds. `d_weight` may have another element type than `d_out` and `inp`.
    pub struct GroupedLinearBwdWeight {
        /// (E,OC,C)
        pub d_weight: Slot = Accumulate(accum),
        /// (rows,OC)
        pub d_out: Slot = Read,
        /// (rows,C)
        pub inp: Slot = Read,
        /// (E+1) i32
        pub offsets: Slot = Read,
        /// Whether `d_weight` is overwritten or added to.
        pub accum: Accum,
    }
    name "grouped_linear_bwd_weight"
    check(op, c) {
        c.same_float(named!(op: d_out, inp))?;
        c.same_float(named!(op: d_weight))?;
        check_groups(c, named!(op: d_out, inp, d_weight), &op.offsets)
    }
    numerics(op, _arg) { linear::weight_gradient(op.accum) }
    flops(op) { linear::product_flops(&op.d_out, &op.inp) }
    bytes(op) { linear::weight_gradient_bytes(op.accum, &op.d_weight, &[op.d_out, op.inp, op.offsets]) }
    operands(d_out, inp)
}

/// Checks the shapes `out` (rows,OC), `inp` (rows,C), `weight` (E,OC,C), `offsets` (E+1).
fn check_groups(c: &Checker, &[out, inp, weight]: &[Named<'_>; 3], offsets: &Slot) -> Result<()> {
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
    use crate::op::OpSpec;
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
