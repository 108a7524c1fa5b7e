//! Matrix products in f32: by cuBLASLt, or by a kernel of ours where that is missing or has no algorithm.

use super::cublas;
use super::layout::{address, pointers};
use super::{Launch, OnStream};
use crate::args::Grid;
use crate::kernels::Spec;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, Gemm, GemmShape, GroupedGemm, Unary, UnaryFn};

const FILE: &str = "product/eager_gemm.cu";
/// Rows and columns of C per block: `TILE` of product/eager_gemm.cu.
const TILE: usize = 64;

impl Launch for Gemm {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { a, b, c, shape } = *self;
        let n = shape.batch * shape.m * shape.n;
        if n == 0 {
            return Ok(());
        }
        if shape.alpha == 0.0 || shape.k == 0 {
            return match shape.beta {
                0.0 => at.fill_zero([c], n),
                1.0 => Ok(()),
                // SAFETY: guaranteed by the caller of `launch`: `c` has `n` elements.
                beta => unsafe { Unary { op: UnaryFn::Scale(beta.into()), x: c, y: c, n }.launch(at) },
            };
        }
        let addresses = [a, b, c].map(address);
        match cublas::find(at, &shape, addresses)? {
            Some(plan) => plan.enqueue(at, &shape, addresses),
            None => by_our_kernel(at, self),
        }
    }
}

fn by_our_kernel(at: &OnStream<'_>, gemm: &Gemm) -> Result<()> {
    let GemmShape { batch, m, n, k, alpha, beta, transpose_a, transpose_b } = gemm.shape;
    let blocks = batch * m.div_ceil(TILE) * n.div_ceil(TILE);
    if blocks > i32::MAX as usize {
        return Err(Error::Unsupported(format!("gemm: {blocks} blocks are more than a grid holds")));
    }
    // Distances from one row and from one column of A and of B to the next.
    let apart = |rows: usize, cols: usize, transposed| if transposed { (1, rows) } else { (cols, 1) };
    let (a, b) = (apart(m, k, transpose_a), apart(k, n, transpose_b));
    let args = pointers([gemm.c, gemm.a, gemm.b]).u64s([m, n, k, a.0, a.1, b.0, b.1]);
    at.launch(&Spec::new(FILE).kernel("gemm"), Grid::linear(blocks, 256), args.f32(alpha).f32(beta))
}

impl Launch for GroupedGemm<'_> {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let from =
            |x: Array, elements: usize| Array { at: x.at.wrapping_byte_add(elements * x.float.size()), ..x };
        self.parts.iter().try_for_each(|part| {
            let (a, b, c) = (from(self.a, part.a), from(self.b, part.b), from(self.c, part.c));
            // SAFETY: guaranteed by the caller of `launch`: every part is within the arrays.
            unsafe { Gemm { a, b, c, shape: part.shape }.launch(at) }
        })
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Spec::new(FILE)]
}
