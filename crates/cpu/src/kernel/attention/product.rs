//! Matrix products inside a task: f32 on the matrix kernels, f64 in a plain loop.

use crate::element::Real;
use crate::gemm::{Beta, Gemm, LocalScratch, MatMut, MatRef, gemm_dots, gemm_local};
use crate::isa::Isa;

/// A matrix: element (i, j) at `ptr + i * rs + j * cs`.
#[derive(Clone, Copy)]
pub struct Mat<A> {
    /// Element (0, 0).
    pub ptr: *mut A,
    /// Elements from one row to the next.
    pub rs: usize,
    /// Elements from one column to the next.
    pub cs: usize,
}

impl<A> Mat<A> {
    /// Rows of `cols`, one after the other.
    pub fn new(x: &mut [A], cols: usize) -> Self {
        Self { ptr: x.as_mut_ptr(), rs: cols, cs: 1 }
    }

    /// The rows from `first` on.
    pub fn rows_from(self, first: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(first * self.rs), ..self }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { ptr: self.ptr, rs: self.cs, cs: self.rs }
    }
}

/// c (m,n) = or += a (m,k) · b (k,n)
///
/// # Safety
/// `a` and `b` are readable, `c` has contiguous rows and is writable, and overlaps neither.
pub unsafe fn product<A: Real>(
    (scratch, isa): (&mut LocalScratch, Isa),
    [m, n, k]: [usize; 3],
    [a, b]: [Mat<A>; 2],
    c: Mat<A>,
    beta: Beta,
) {
    if A::IS_F32 {
        let [a, b] = [a, b].map(|m| MatRef { ptr: m.ptr.cast_const().cast(), rs: m.rs, cs: m.cs });
        let gemm = Gemm::new((m, n, k), a, b, MatMut { ptr: c.ptr.cast(), rs: c.rs }).beta(beta);
        // SAFETY: `A` is f32; the rest is guaranteed by the caller.
        return unsafe { gemm_local(scratch, isa, &gemm) };
    }
    for i in 0..m {
        for j in 0..n {
            // SAFETY: (i, p), (p, j) and (i, j) are inside the matrices that the caller guarantees.
            unsafe {
                let term = |p: usize| *a.ptr.add(i * a.rs + p * a.cs) * *b.ptr.add(p * b.rs + j * b.cs);
                let at = c.ptr.add(i * c.rs + j);
                let old = if beta == Beta::Accumulate { *at } else { A::ZERO };
                *at = old + (0..k).map(term).fold(-A::ZERO, |sum, term| sum + term);
            }
        }
    }
}

/// c (n) = a (1,k) · b (k,n), where the columns of b are contiguous: a dot product each, in f32.
///
/// # Safety
/// `A` is f32; `a` and `b` are readable.
pub unsafe fn dots<A: Real>(isa: Isa, k: usize, [a, b]: [Mat<A>; 2], c: &mut [A]) {
    debug_assert!(A::IS_F32);
    let [a, b] = [a, b].map(|m| MatRef { ptr: m.ptr.cast_const().cast(), rs: m.rs, cs: m.cs });
    let gemm = Gemm::new((1, c.len(), k), a, b, MatMut { ptr: c.as_mut_ptr().cast(), rs: c.len() });
    // SAFETY: guaranteed by the caller; `c` is a slice that this call holds alone.
    unsafe { gemm_dots(isa, &gemm) };
}
