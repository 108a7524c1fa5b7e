//! Matrix products in f32: by cuBLASLt, or by a kernel of our own where that is missing or has nothing.

use super::cublas::{self, Found};
use super::elementwise::unary;
use super::gpu::{At, Kernel};
use crate::args::Args;
use crate::kernels::Spec;
use crate::lower::Grid;
use crate::{Error, Result};
use ironhorse_core::eager::{Array, UnaryFn};

const FILE: &str = "product/eager_gemm.cu";
/// Rows and columns of C per block: `TILE` of product/eager_gemm.cu.
const TILE: usize = 64;

/// C = alpha A B + beta C with A (m, k), B (k, n), C (m, n), row-major; `batch` of each lie one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Products.
    pub batch: usize,
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// Factor of the product; with 0 neither A nor B is read.
    pub alpha: f32,
    /// Factor of the old C; with 0 it is not read.
    pub beta: f32,
    /// Whether A lies in memory as (k, m), and B as (n, k).
    pub transposed: [bool; 2],
}

/// The products of `shape`, in full f32.
///
/// # Safety
/// See [the module](super); f32 arrays of the sizes of `shape`.
pub unsafe fn gemm(at: &At<'_>, [a, b]: [Array; 2], c: Array, shape: &Gemm) -> Result<()> {
    let elements = shape.batch * shape.m * shape.n;
    if elements == 0 {
        return Ok(());
    }
    if shape.alpha == 0.0 || shape.k == 0 {
        // SAFETY: C is all of it.
        return unsafe {
            if shape.beta == 0.0 {
                at.zero(c.at, elements * size_of::<f32>())
            } else if shape.beta == 1.0 {
                Ok(())
            } else {
                unary(at, UnaryFn::Scale(shape.beta.into()), c, c, elements)
            }
        };
    }
    let [a, b, c] = [a, b, c].map(|array| array.at.addr() as u64);
    match cublas::find(at, shape, [a, b, c])? {
        Some(Found { plan, workspace }) => {
            let scratch = at.scratch(workspace)?;
            plan.enqueue(at, shape, [a, b, c], (scratch, workspace))
        }
        None => own(at, shape, [a, b, c]),
    }
}

/// By our kernel.
fn own(at: &At<'_>, shape: &Gemm, [a, b, c]: [u64; 3]) -> Result<()> {
    let Gemm { batch, m, n, k, alpha, beta, transposed } = *shape;
    let blocks = batch * m.div_ceil(TILE) * n.div_ceil(TILE);
    if blocks > i32::MAX as usize {
        return Err(Error::Unsupported(format!("gemm: {blocks} blocks are more than a grid holds")));
    }
    let args = Args::new().ptr(c).ptr(a).ptr(b).u64(m as u64).u64(n as u64).u64(k as u64);
    // From one row and one column of A and of B to the next.
    let apart = |rows: usize, cols: usize, transposed| if transposed { (1, rows) } else { (cols, 1) };
    let (a, b) = (apart(m, k, transposed[0]), apart(k, n, transposed[1]));
    let args = args.u64(a.0 as u64).u64(a.1 as u64).u64(b.0 as u64).u64(b.1 as u64);
    at.launch(&Kernel::new(FILE, "gemm"), Grid::linear(blocks, 256), args.f32(alpha).f32(beta))
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Kernel::new(FILE, "").spec()]
}
