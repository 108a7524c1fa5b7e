//! Products of batches of matrices: one call of cuBLASLt, else our kernel.

use super::linear::{library_scaled, own_product};
use super::lower::Lower;
use crate::Result;
use crate::gemm::{Addresses, Problem, Sizes};
use ironhorse_core::op::Matmul;

pub(crate) fn matmul(cx: &mut Lower<'_>, op: &Matmul) -> Result<()> {
    let &[count, rows, oc] = op.out.shape.dims() else { return Ok(()) };
    if op.out.numel() == 0 {
        return Ok(());
    }
    let (inputs, tf32) = (op.a.dtype, cx.settings.tf32);
    let sizes = Sizes { rows, ic: op.inner(), oc, inputs, output: op.out.dtype, tf32 };
    let (a, b, c) = (cx.ptr(op.b)?, cx.ptr(op.a)?, cx.optional(op.add)?);
    let at = Addresses { a, b, d: cx.ptr(op.out)?, c, ..Addresses::default() };
    let problem = Problem::matmul(&sizes, count, op.transposed, &at).adds(op.add.is_some());
    let factors = [op.alpha, if op.add.is_some() { op.beta } else { 0.0 }];
    if library_scaled(cx, "matmul", &problem, &at, factors)? {
        return Ok(());
    }
    own_product(cx, &problem, &at, factors)
}
