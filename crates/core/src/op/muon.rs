//! Muon: momentum whose matrices are orthogonalised before they are added to the weights.
//!
//! Between [`MuonMomentum`] and [`MuonUpdate`] a program has the products of Newton–Schulz as
//! [`Matmul`], which [`NewtonSchulz`] describes.

use super::Matmul;
use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, named, op};
use crate::{DType, Result, Slot};

/// A step of Newton–Schulz: `X ← a·X + (b·A + c·A²)·X` with `A = X·Xᵀ`, which drives every singular value of X to the
/// neighbourhood of 1. Where X has more rows than columns, `A = Xᵀ·X` and it is multiplied from the right, so that A has
/// the shorter side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewtonSchulz {
    /// (n,rows,cols), read.
    pub x: Slot,
    /// (n,side,side), where side is the smaller of rows and cols: A.
    pub gram: Slot,
    /// (n,side,side): b·A + c·A².
    pub poly: Slot,
    /// (n,rows,cols), the new X.
    pub out: Slot,
}

impl NewtonSchulz {
    /// The steps that Muon makes.
    pub const STEPS: usize = 5;
    /// a, b and c of a step: chosen to raise small singular values quickly; after five steps those above 0.003 of the
    /// Frobenius norm are between 0.68 and 1.21.
    pub const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

    /// Its three products.
    pub fn products(self) -> [Matmul; 3] {
        let Self { x, gram, poly, out } = self;
        let wide = x.shape.dims().get(1) <= x.shape.dims().get(2);
        let [a, b, c] = Self::COEFFICIENTS;
        let plain = Matmul { out, a: x, b: x, add: None, transposed: [false; 2], alpha: 1.0, beta: 0.0 };
        let left = if wide { [poly, x] } else { [x, poly] };
        [
            Matmul { out: gram, transposed: [!wide, wide], ..plain },
            Matmul { out: poly, a: gram, b: gram, add: Some(gram), alpha: c, beta: b, ..plain },
            Matmul { a: left[0], b: left[1], add: Some(x), beta: a, ..plain },
        ]
    }
}

op! {
    /// The momentum of some matrices of one size, scaled to a Frobenius norm of 1, with the scalar `grad_clip`:
    /// `g = grad·min(1, grad_clip/(norm + 1e-6))`, `m = μ·m + (1-μ)·g`, `u = μ·m + (1-μ)·g` (Nesterov) and
    /// `out = u/‖u‖`, or 0 where `‖u‖` is below 1e-30. If the norm is non-finite or `halt` is not 0, `m` does not change
    /// and `out` is 0.
    ///
    /// The matrices are those of [`muon_matrices`](crate::muon_matrices) for the size of `out`, from number `first` on.
    /// bf16 moments are stored with stochastic rounding; `out` uses the unrounded ones.
    pub struct MuonMomentum {
        /// (n,rows,cols)
        pub out: Slot = Write,
        /// the whole pool of first moments, flat
        pub moment1: Slot = Update,
        /// the whole gradient pool, flat
        pub grads: Slot = Read,
        /// one f32, from [`GradNorm`](super::GradNorm)
        pub norm: Slot = Read,
        /// one f32, from [`GradNorm`](super::GradNorm)
        pub halt: Slot = Read,
        /// The number of the first matrix.
        pub first: usize,
        /// μ
        pub momentum: f32,
    }
    name "muon_momentum"
    check(op, c) {
        c.dtypes(named!(op: norm, halt), DType::F32)?;
        c.numels(named!(op: norm, halt), 1)?;
        c.same_float(named!(op: out))?;
        c.same_float(named!(op: moment1))?;
        c.same_float(named!(op: grads))?;
        check_matrices(c, "out", &op.out, &op.moment1)?;
        c.numel("grads", &op.grads, op.moment1.numel())
    }
    numerics(_op, arg) {
        // A handful of rounding errors per element; the norm is a sum of squares in wider numbers.
        let numerics = Numerics::new(Arithmetic::Elementwise(2e-6));
        if arg == "moment1" { numerics.random_rounding() } else { numerics }
    }
    flops(op) { 10 * op.out.numel() as u64 }
    bytes(op) {
        // the norm must be known before anything is scaled: gradients and moments are read twice
        let per = 2 * op.grads.dtype.size() + 3 * op.moment1.dtype.size() + op.out.dtype.size();
        (op.out.numel() * per) as u64
    }
}

impl MuonMomentum {
    /// Below this Frobenius norm a matrix has no direction and is not moved.
    pub const LEAST_NORM: f64 = 1e-30;
}

op! {
    /// Moves the matrices of [`MuonMomentum`] by what Newton–Schulz made of its result, with the scalars `lr` and
    /// `weight_decay`: `w = w - lr·wd·w - lr·scale·inp`. Decay applies to the parameters that the parameter table marks.
    /// Master weights are as in [`AdamW`](super::AdamW). If the norm is non-finite or `halt` is not 0, nothing changes.
    pub struct MuonUpdate {
        /// the whole parameter pool, flat
        pub params: Slot = Update,
        /// the whole pool of master weights, flat, f32 or i16; required if and only if the parameters are bf16
        pub master: Option<Slot> = Update,
        /// (n,rows,cols)
        pub inp: Slot = Read,
        /// one f32, from [`GradNorm`](super::GradNorm)
        pub norm: Slot = Read,
        /// one f32, from [`GradNorm`](super::GradNorm)
        pub halt: Slot = Read,
        /// The number of the first matrix.
        pub first: usize,
        /// The factor of the step.
        pub scale: f32,
    }
    name "muon_update"
    check(op, c) {
        c.dtypes(named!(op: norm, halt), DType::F32)?;
        c.numels(named!(op: norm, halt), 1)?;
        c.same_float(named!(op: params, inp))?;
        super::optimizer::check_master(c, &op.params, op.master.as_ref())?;
        check_matrices(c, "inp", &op.inp, &op.params)
    }
    numerics { Numerics::new(Arithmetic::Elementwise(2e-6)).random_rounding() }
    flops(op) { 4 * op.inp.numel() as u64 }
    bytes(op) {
        let master = op.master.map_or(0, |slot| 2 * slot.dtype.size());
        // With an f32 master, the parameters are only written.
        let passes = if op.master.is_some_and(|slot| slot.dtype == DType::F32) { 1 } else { 2 };
        (op.inp.numel() * (op.inp.dtype.size() + master + passes * op.params.dtype.size())) as u64
    }
}

impl MuonUpdate {
    /// The factor that gives the step of a matrix of this size the root mean square of AdamW's, about 0.2: an orthogonal
    /// matrix has 1/√(its longer side).
    pub fn scale_of([rows, cols]: [usize; 2]) -> f32 {
        (0.2 * (rows.max(cols) as f64).sqrt()) as f32
    }
}

/// Checks a batch of matrices of the flat `pool`.
fn check_matrices(c: &Checker, name: &str, slot: &Slot, pool: &Slot) -> Result<()> {
    if slot.shape.dims().len() != 3 {
        return c.fail(format!("`{name}` is {}, expected (matrices, rows, columns)", slot.shape));
    }
    if slot.numel() > pool.numel() {
        let (found, most) = (slot.numel(), pool.numel());
        return c.fail(format!("`{name}` has {found} elements, expected at most {most}, which the pool has"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;
    use crate::{Builder, Pool, Precision};

    fn ops(precision: Precision) -> (MuonMomentum, MuonUpdate) {
        let mut b = Builder::with_precision(precision);
        b.muon_group([("w", [6, 4], 2)], true);
        let [norm, halt] = ["norm", "halt"].map(|name| b.io(name, [1], DType::F32));
        let x = b.io("x", [2, 3, 4], precision.weights);
        let [params, grads, moment1, master] =
            [Pool::Params, Pool::Grads, Pool::Moment1, Pool::Master].map(|pool| b.flat(pool));
        let master = precision.has_master().then_some(master);
        (
            MuonMomentum { out: x, moment1, grads, norm, halt, first: 0, momentum: 0.95 },
            MuonUpdate { params, master, inp: x, norm, halt, first: 0, scale: 0.4 },
        )
    }

    #[test]
    fn every_way_to_keep_the_state_is_accepted() {
        let small = Precision::BF16.with_residual().with_bf16_moments();
        for (precision, bytes) in [
            (Precision::F32, [24, 12]),
            (Precision::BF16, [18, 12]),
            (Precision::BF16_F32_GRADS, [22, 12]),
            (small, [12, 10]),
        ] {
            let (momentum, update) = ops(precision);
            let (momentum, update) = (Op::from(momentum), Op::from(update));
            momentum.check().unwrap();
            update.check().unwrap();
            assert_eq!([momentum.bytes(), update.bytes()], bytes.map(|bytes| 24 * bytes));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |op: Op| op.check().unwrap_err().to_string();
        let (momentum, update) = ops(Precision::F32);
        let flat = Slot { shape: crate::Shape::new([24]), ..momentum.out };
        assert_eq!(
            refused(MuonMomentum { out: flat, ..momentum }.into()),
            "muon_momentum: `out` is [24], expected (matrices, rows, columns)"
        );
        let long = Slot { shape: crate::Shape::new([3, 6, 4]), ..momentum.out };
        assert_eq!(
            refused(MuonUpdate { inp: long, ..update }.into()),
            "muon_update: `inp` has 72 elements, expected at most 32, which the pool has"
        );
        let (_, narrow) = ops(Precision::BF16);
        assert_eq!(
            refused(MuonUpdate { master: None, ..narrow }.into()),
            "muon_update: `master` is required with bf16 `params` and not allowed otherwise"
        );
    }

    #[test]
    fn a_step_of_newton_schulz_has_the_shorter_side() {
        for (shape, transposed) in [([2, 3, 5], [false, true]), ([2, 5, 3], [true, false])] {
            let mut b = Builder::new();
            let [x, out] = [(); 2].map(|()| b.activation(shape, DType::F32));
            let [gram, poly] = [(); 2].map(|()| b.activation([2, 3, 3], DType::F32));
            let products = NewtonSchulz { x, gram, poly, out }.products();
            products.iter().for_each(|&product| Op::from(product).check().unwrap());
            assert_eq!(products[0].transposed, transposed);
            assert_eq!(products.map(|product| product.inner()), [5, 3, 3]);
        }
    }

    #[test]
    fn the_step_of_a_matrix_is_as_large_as_that_of_adamw() {
        assert!((MuonUpdate::scale_of([100, 25]) - 2.0).abs() < 1e-6);
        assert!((MuonUpdate::scale_of([25, 400]) - 4.0).abs() < 1e-6);
    }
}
