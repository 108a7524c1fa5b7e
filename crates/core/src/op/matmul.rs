//! Products of whole batches of matrices, from which the update of Muon is made.

use super::linear::PRODUCT;
use super::numerics::BF16_UNIT;
use super::spec::{Checker, named, op};
use crate::{Result, Slot};

op! {
    /// `out = alpha · op(a) · op(b) + beta · add` for every matrix of a batch, where `op` transposes or does nothing.
    /// Without `add` the product alone. Sums are f32; the result is rounded once.
    pub struct Matmul {
        /// (n,M,N)
        pub out: Slot = Write,
        /// (n,M,K), or (n,K,M) transposed
        pub a: Slot = Read,
        /// (n,K,N), or (n,N,K) transposed
        pub b: Slot = Read,
        /// (n,M,N)
        pub add: Option<Slot> = Read,
        /// Whether `a` and `b` are transposed.
        pub transposed: [bool; 2],
        /// The factor of the product.
        pub alpha: f32,
        /// The factor of `add`.
        pub beta: f32,
    }
    name "matmul"
    check(op, c) {
        c.same_float(named!(op: out, a, b))?;
        let [n, rows, inner] = oriented(c, "a", &op.a, op.transposed[0])?;
        let [_, _, cols] = oriented(c, "b", &op.b, op.transposed[1])?;
        let b = if op.transposed[1] { [n, cols, inner] } else { [n, inner, cols] };
        c.shape("b", &op.b, b)?;
        c.shape("out", &op.out, [n, rows, cols])?;
        match &op.add {
            Some(add) => {
                c.shape("add", add, [n, rows, cols])?;
                c.dtype("add", add, op.out.dtype)
            }
            None => Ok(()),
        }
    }
    numerics { PRODUCT.bf16_engines(1.5 * BF16_UNIT) }
    flops(op) { 2 * op.out.numel() as u64 * op.inner() as u64 }
    bytes(op) {
        // a matrix times its own transpose is read once
        let b = if op.a == op.b { 0 } else { op.b.bytes() };
        (op.out.bytes() + op.a.bytes() + b + op.add.map_or(0, |add| add.bytes())) as u64
    }
    operands(a, b)
}

impl Matmul {
    /// K: how many terms a sum has.
    pub fn inner(&self) -> usize {
        self.a.shape.dims()[if self.transposed[0] { 1 } else { 2 }]
    }
}

/// The batch, rows and columns of an operand as it is multiplied.
fn oriented(c: &Checker, name: &str, slot: &Slot, transposed: bool) -> Result<[usize; 3]> {
    match *slot.shape.dims() {
        [n, rows, cols] => Ok(if transposed { [n, cols, rows] } else { [n, rows, cols] }),
        _ => {
            c.fail(format!("`{name}` is {}, expected (matrices, rows, columns)", slot.shape))?;
            Ok([0; 3])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{DType, Pool, Shape};

    fn slot(offset: usize, dims: [usize; 3]) -> Slot {
        Slot { pool: Pool::Io, offset, shape: Shape::new(dims), dtype: DType::F32 }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let (out, a, b) = (slot(0, [2, 3, 4]), slot(4096, [2, 3, 5]), slot(8192, [2, 5, 4]));
        let good = Matmul { out, a, b, add: None, transposed: [false; 2], alpha: 1.0, beta: 0.0 };
        good.check().unwrap();
        assert_eq!((good.inner(), good.flops()), (5, 2 * 2 * 3 * 4 * 5));
        let gram = Matmul { out: slot(0, [2, 3, 3]), b: a, transposed: [false, true], ..good };
        gram.check().unwrap();
        assert_eq!(crate::op::Op::from(gram).bytes(), 4 * (18 + 30));
        let other = Matmul { out: slot(0, [2, 5, 5]), b: a, transposed: [true, false], ..good };
        other.check().unwrap();
        assert_eq!(other.inner(), 3);
        let refused = |op: Matmul| op.check().unwrap_err().to_string();
        assert_eq!(
            refused(Matmul { transposed: [false, true], ..good }),
            "matmul: `b` is [2, 5, 4], expected [2, 5, 5]"
        );
        assert_eq!(
            refused(Matmul { out: slot(0, [1, 3, 4]), ..good }),
            "matmul: `out` is [1, 3, 4], expected [2, 3, 4]"
        );
        assert_eq!(
            refused(Matmul { add: Some(a), ..good }),
            "matmul: `add` is [2, 3, 5], expected [2, 3, 4]"
        );
        let flat = Slot { shape: Shape::new([30]), ..a };
        assert_eq!(
            refused(Matmul { a: flat, ..good }),
            "matmul: `a` is [30], expected (matrices, rows, columns)"
        );
    }
}
