//! Matrix products, row-major.

use super::elementwise::scale;
use super::pool::{isa, pieces, with_team};
use super::{Done, Span};
use crate::gemm::{self, Beta, Gemm, Group, LocalScratch, MatMut, MatRef, gemm_grouped, gemm_local};

/// Multiply-adds of a product below which waking threads costs more than it gains.
const WORTH_IT: usize = 1 << 19;
/// Products of no more than this many multiply-adds, and no side longer than [`SMALL_SIDE`], are made by one thread.
const SMALL: usize = 1 << 20;
const SMALL_SIDE: usize = 256;

/// c\[m, n\] = alpha a\[m, k\] b\[k, n\] + beta c
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a, rows of b.
    pub k: usize,
    /// Factor of the product; if 0, a and b are not read.
    pub alpha: f32,
    /// Factor of the old c; if 0, it is not read.
    pub beta: f32,
    /// Whether a lies in memory as \[k, m\], and b as \[n, k\].
    pub transposed: [bool; 2],
}

impl Product {
    fn multiply_adds(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    fn describe<'a>(&self, a: *const f32, b: *const f32, c: *mut f32) -> Gemm<'a> {
        let k = if self.alpha == 0.0 { 0 } else { self.k };
        let beta = if self.beta == 0.0 { Beta::Overwrite } else { Beta::Accumulate };
        let lies = |ptr, rows, cols, transposed| {
            if transposed { MatRef::row_major(ptr, rows).transposed() } else { MatRef::row_major(ptr, cols) }
        };
        let a = lies(a, self.m, self.k, self.transposed[0]);
        let b = lies(b, self.k, self.n, self.transposed[1]);
        Gemm::new((self.m, self.n, k), a, b, MatMut { ptr: c, rs: self.n }).alpha(self.alpha).beta(beta)
    }
}

/// One product.
///
/// # Safety
/// See [the module](super); a: m·k, b: k·n, c: m·n.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gemm(a: Span<f32>, b: Span<f32>, c: Span<f32>, p: &Product) -> Done {
    // SAFETY: a batch of one.
    unsafe { gemm_batched(a, b, c, 1, p) }
}

/// `batch` products of matrices that lie one after the other.
///
/// # Safety
/// See [the module](super); a: batch·m·k, b: batch·k·n, c: batch·m·n.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gemm_batched(a: Span<f32>, b: Span<f32>, c: Span<f32>, batch: usize, p: &Product) -> Done {
    if c.is_empty() {
        return Ok(());
    }
    if p.beta != 0.0 && p.beta != 1.0 {
        // SAFETY: in place, by the contract.
        unsafe { scale(c, c, p.beta)? };
    }
    let isa = isa();
    let (a_step, b_step, c_step) = (p.m * p.k, p.k * p.n, p.m * p.n);
    let (a, b, c) = (Address(a.ptr()), Address(b.ptr()), Address(c.ptr()));
    let describe = |i: usize| p.describe(a.at(i * a_step), b.at(i * b_step), c.at(i * c_step));
    if p.multiply_adds() <= SMALL && p.m.max(p.n).max(p.k) <= SMALL_SIDE {
        return pieces(batch, 1, p.multiply_adds() * 4, |range| {
            let mut scratch = LocalScratch::new();
            // SAFETY: product i of the batch lies inside all three; tasks write different ones.
            range.for_each(|i| unsafe { gemm_local(&mut scratch, isa, &describe(i)) });
        });
    }
    with_team(p.multiply_adds() >= WORTH_IT, |team, workspace| {
        // SAFETY: as above.
        (0..batch).try_for_each(|i| unsafe { gemm::gemm(team, workspace, isa, &describe(i)) })
    })
}

/// One product of several, of matrices that begin this many elements into the arrays.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its sizes; beta is 0 or 1.
    pub product: Product,
    /// Where a, b and c begin.
    pub from: [usize; 3],
}

/// Several products of sizes of their own: the experts of a layer.
///
/// # Safety
/// See [the module](super); the matrices of each part lie inside the arrays, and no two parts write the same elements.
///
/// # Errors
/// See [the module](super).
pub unsafe fn gemm_parts(a: Span<f32>, b: Span<f32>, c: Span<f32>, parts: &[Part]) -> Done {
    let (a, b, c) = (Address(a.ptr()), Address(b.ptr()), Address(c.ptr()));
    let product = |i: usize| {
        let Part { product, from } = &parts[i];
        product.describe(a.at(from[0]), b.at(from[1]), c.at(from[2]))
    };
    let sizes = |part: &Part| [part.product.m, part.product.n, part.product.k];
    let most =
        parts.iter().map(sizes).fold([0; 3], |most, part| std::array::from_fn(|i| most[i].max(part[i])));
    let work = parts.iter().fold(0_usize, |sum, part| sum.saturating_add(part.product.multiply_adds()));
    let group = Group { count: parts.len(), most, product: &product };
    // SAFETY: the caller's.
    with_team(work >= WORTH_IT, |team, workspace| unsafe { gemm_grouped(team, workspace, isa(), &group) })
}

/// An address that tasks may share: what is done there is settled by the op.
#[derive(Clone, Copy)]
struct Address(*mut f32);

// SAFETY: a number; following it is unsafe.
unsafe impl Sync for Address {}

impl Address {
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}
