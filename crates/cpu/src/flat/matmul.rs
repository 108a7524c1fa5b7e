//! Matrix products, row-major.

use super::elementwise::scale;
use super::pool::{isa, pieces, with_team};
use super::{Done, Span};
use crate::gemm::{self, Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_local};

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
}

impl Product {
    fn multiply_adds(&self) -> usize {
        self.m.saturating_mul(self.n).saturating_mul(self.k)
    }

    fn describe<'a>(&self, a: *const f32, b: *const f32, c: *mut f32) -> Gemm<'a> {
        let k = if self.alpha == 0.0 { 0 } else { self.k };
        let beta = if self.beta == 0.0 { Beta::Overwrite } else { Beta::Accumulate };
        let (a, b) = (MatRef::row_major(a, self.k), MatRef::row_major(b, self.n));
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
        return pieces(batch, 1, p.multiply_adds() / 4, |range| {
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
