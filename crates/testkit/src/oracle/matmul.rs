//! Products of batches of matrices, as nested loops.

use super::Pools;
use ironhorse_core::Result;
use ironhorse_core::op::Matmul;

pub(super) fn matmul(pools: &mut Pools, op: &Matmul) -> Result<()> {
    let (a, b) = (pools.read(op.a)?, pools.read(op.b)?);
    let &[count, rows, cols] = op.out.shape.dims() else { return Ok(()) };
    let (inner, [flip_a, flip_b]) = (op.inner(), op.transposed);
    let mut out = match op.add {
        Some(add) => pools.read(add)?.iter().map(|x| f64::from(op.beta) * x).collect(),
        None => vec![0.0; op.out.numel()],
    };
    for n in 0..count {
        let (a, b) = (&a[n * rows * inner..], &b[n * inner * cols..]);
        for r in 0..rows {
            for c in 0..cols {
                let of_a = |k: usize| if flip_a { a[k * rows + r] } else { a[r * inner + k] };
                let of_b = |k: usize| if flip_b { b[c * inner + k] } else { b[k * cols + c] };
                let dot: f64 = (0..inner).map(|k| of_a(k) * of_b(k)).sum();
                out[(n * rows + r) * cols + c] += f64::from(op.alpha) * dot;
            }
        }
    }
    pools.write(op.out, &out)
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::Matmul;

    /// A = ((1, 2), (3, 4)), B = ((0, 1), (5, 6)): A·B = ((10, 13), (20, 27)), A·Bᵀ = ((2, 17), (4, 39)),
    /// Aᵀ·B = ((15, 19), (20, 26)).
    #[test]
    fn products_by_hand() {
        for (transposed, want) in [
            ([false, false], [10.0, 13.0, 20.0, 27.0]),
            ([false, true], [2.0, 17.0, 4.0, 39.0]),
            ([true, false], [15.0, 19.0, 20.0, 26.0]),
        ] {
            let mut kit = Kit::new("matmul");
            let (out, a) = (kit.slot([1, 2, 2]), kit.f32s([1, 2, 2], &[1.0, 2.0, 3.0, 4.0]));
            let (b, add) = (kit.f32s([1, 2, 2], &[0.0, 1.0, 5.0, 6.0]), kit.f32s([1, 2, 2], &[4.0; 4]));
            let op = Matmul { out, a, b, add: Some(add), transposed, alpha: 2.0, beta: -0.5 };
            kit.finish(op).expect_f64(out, &want.map(|x| 2.0 * x - 2.0));
        }
    }
}
