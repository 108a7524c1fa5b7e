//! Products of batches of matrices, on the GEMM.

use super::Ctx;
use super::grouped::products;
use crate::gemm::{Beta, Gemm, Group, MatMut, MatRef};
use crate::kernel::update::scaled;
use crate::memory::Span;
use ironhorse_core::Result;
use ironhorse_core::op::Matmul;

/// Elements of `add` that one task scales.
const CHUNK: usize = 1 << 14;

pub fn matmul(ctx: &mut Ctx<'_>, op: &Matmul) -> Result<()> {
    let (out, a, b) = (ctx.f32(op.out)?, ctx.f32(op.a)?, ctx.f32(op.b)?);
    let &[count, m, n] = op.out.shape.dims() else { return Ok(()) };
    let k = op.inner();
    if let Some(add) = op.add {
        let (add, isa, beta) = (ctx.f32(add)?, ctx.isa, op.beta);
        ctx.chunks(out.len(), CHUNK, |r, _| {
            // SAFETY: tasks have disjoint ranges of `out`, which shares no memory with `add`.
            unsafe { scaled(isa, out.get_mut(r.clone()), add.get(r), beta) };
        })?;
    }
    let beta = if op.add.is_some() { Beta::Accumulate } else { Beta::Overwrite };
    let product = |i: usize| {
        let (a, b) = (operand(a, i, [m, k], op.transposed[0]), operand(b, i, [k, n], op.transposed[1]));
        let c = MatMut { ptr: out.ptr().wrapping_add(i * m * n), rs: n };
        Gemm::new((m, n, k), a, b, c).beta(beta).alpha(op.alpha)
    };
    let group = Group::new(count, [m, n, k], &product);
    // SAFETY: shapes and aliasing were checked by `Op::check`; every product has a result of its own.
    unsafe { products(ctx, &group) }
}

/// Matrix number `i` of a batch, which is multiplied as this many rows and columns.
fn operand(span: Span<f32>, i: usize, [rows, cols]: [usize; 2], transposed: bool) -> MatRef {
    let start = span.ptr().wrapping_add(i * rows * cols).cast_const();
    if transposed { MatRef::row_major(start, rows).transposed() } else { MatRef::row_major(start, cols) }
}
