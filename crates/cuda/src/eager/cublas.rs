//! cuBLASLt for eager products: started once per GPU; descriptors and the library's first proposal are kept per shape, for
//! all threads.

use super::OnStream;
use crate::cublaslt::{Description, Epilogue, Handle, Matrix, Operands, Product, Wanted};
use crate::ffi::cublaslt::{Found, reduction};
use crate::{Error, Result};
use ironhorse_core::DType;
use ironhorse_core::eager::GemmShape;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The most workspace a proposal may ask for.
const WORKSPACE: usize = 32 << 20;
/// Shapes kept; a program with more of them pays for the library's proposal again.
const MOST_PLANS: usize = 4096;
/// The largest alignment of addresses that is told to the library: more does not make a proposal better.
const ALIGN: u32 = 64;

/// Everything that decides a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    gpu: usize,
    what: Description,
    /// The alignment of the library's A, B and D: our B, A and C.
    align: [u32; 3],
}

/// What is known of products so far.
#[derive(Default)]
struct Known {
    /// The library on each GPU, or why it cannot be used.
    handles: HashMap<usize, Result<Arc<Handle>>>,
    /// `None`: the library has no algorithm.
    plans: HashMap<Key, Option<Arc<Plan>>>,
}

/// How a product is computed.
#[derive(Debug)]
pub(super) struct Plan {
    product: Product,
    proposal: Found,
}

/// The plan of a product at these addresses of A, B and C; `None` if the library is missing or has no algorithm.
pub(super) fn find(at: &OnStream<'_>, shape: &GemmShape, [a, b, c]: [u64; 3]) -> Result<Option<Arc<Plan>>> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let Some(what) = describe(shape) else { return Ok(None) };
    let align = [b, a, c].map(|address| 1 << address.trailing_zeros().min(ALIGN.trailing_zeros()));
    let key = Key { gpu: at.info().index, what, align };
    let mut guard = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let Known { handles, plans } = guard.get_or_insert_default();
    if let Some(plan) = plans.get(&key) {
        return Ok(plan.clone());
    }
    let handle = handles.entry(key.gpu).or_insert_with(|| {
        let handle = Handle::new(at.stream.device());
        handle.inspect_err(|error| tracing::warn!("matrix products by a slow kernel: {error}"))
    });
    let handle = match handle {
        Ok(handle) => handle,
        Err(Error::LibraryMissing { .. } | Error::SymbolMissing { .. }) => return Ok(None),
        Err(error) => return Err(error.clone()),
    };
    let product = Product::new(handle, &what)?;
    // Sums of split products in f32 in a workspace, in a fixed order.
    let wanted = Wanted { workspace: WORKSPACE, reductions: reduction::COMPUTE_TYPE, align, count: 1 };
    let proposal = product.propose(&wanted)?.first().copied();
    let plan = proposal.map(|proposal| Arc::new(Plan { product, proposal }));
    if plans.len() >= MOST_PLANS {
        plans.clear();
    }
    plans.insert(key, plan.clone());
    Ok(plan)
}

/// A product in the library's column-major terms: a row-major matrix is its transpose there, so Cᵀ = Bᵀ Aᵀ. `None` if there
/// are more products than the library counts.
fn describe(shape: &GemmShape) -> Option<Description> {
    let GemmShape { batch, m, n, k, transpose_a, transpose_b, .. } = *shape;
    let matrix = |rows: usize, cols: usize, swapped: bool| {
        let (rows, cols) = if swapped { (cols, rows) } else { (rows, cols) };
        Matrix { dtype: DType::F32, rows, cols, ld: rows }
    };
    Some(Description {
        a: matrix(n, k, transpose_b),
        b: matrix(k, m, transpose_a),
        d: matrix(n, m, false),
        batch: i32::try_from(batch).ok()?,
        transposed: [transpose_b, transpose_a],
        tf32: false,
        epilogue: Epilogue::default(),
        scales: [0; 2],
        fast_sums: false,
    })
}

impl Plan {
    /// Puts the product on the stream.
    pub(super) fn enqueue(&self, at: &OnStream<'_>, shape: &GemmShape, [a, b, c]: [u64; 3]) -> Result<()> {
        let Found { algo, workspace: workspace_bytes, .. } = self.proposal;
        let (alpha, beta, workspace) = (shape.alpha, shape.beta, at.scratch(workspace_bytes)?);
        let operands = Operands { a: b, b: a, c, d: c, alpha, beta, workspace, workspace_bytes };
        self.product.enqueue(&algo, &operands, &at.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_major_product_is_the_transposed_column_major_one() {
        let shape = GemmShape {
            batch: 2,
            m: 3,
            n: 5,
            k: 7,
            alpha: 1.0,
            beta: 0.0,
            transpose_a: true,
            transpose_b: false,
        };
        let what = describe(&shape).unwrap();
        let size = |matrix: Matrix| (matrix.rows, matrix.cols, matrix.ld);
        assert_eq!([what.a, what.b, what.d].map(size), [(5, 7, 5), (3, 7, 3), (5, 3, 5)]);
        assert_eq!((what.batch, what.transposed), (2, [false, true]));
        assert_eq!(describe(&GemmShape { batch: 1 << 31, ..shape }), None);
    }
}
