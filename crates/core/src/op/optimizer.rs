//! The update: global gradient norm and AdamW over all parameters at once.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, named, op};
use crate::{DType, Result, Slices, Slot};

op! {
    /// `norm = √Σ g²` over every gradient, summed in a fixed order: piece by piece
    /// ([`PIECE_ELEMENTS`](crate::ranks::PIECE_ELEMENTS)), and then over the pieces. Where the op that wrote a gradient has summed
    /// its squares already, an engine may add those sums instead, without `slices`. `halt` becomes 1 if it was not 0 already, or if
    /// the norm or the loss is non-finite. Only the host clears `halt`: after a bad step no further update is made until the host
    /// has seen it, however many steps are in flight.
    pub struct GradNorm {
        /// one f32
        pub norm: Slot = Write,
        /// one f32: 0, or 1 if the optimizer must change nothing
        pub halt: Slot = Update,
        /// the whole gradient pool, flat
        pub grads: Slot = Read,
        /// one f32, the loss
        pub loss: Slot = Read,
        /// The parts of the gradients that this rank has the sums of, if it does not have all: the norm is that over all ranks,
        /// which exchange the sums of their pieces
        pub slices: Option<Slices>,
    }
    name "grad_norm"
    check(op, c) {
        c.same_float(named!(op: grads))?;
        c.dtypes(named!(op: norm, halt, loss), DType::F32)?;
        c.numels(named!(op: norm, halt, loss), 1)
    }
    numerics {
        // Up to 250,000 terms: this bound requires partial sums or a wider accumulator.
        Numerics::new(Arithmetic::PositiveSum(2e-6))
    }
    flops(op) { 2 * op.grads.numel() as u64 }
}

op! {
    /// AdamW in one pass on every parameter that the parameter table assigns to it, with the scalars `lr`, `beta1`, `beta2`,
    /// `eps`, `weight_decay`, `grad_clip` and `step`:
    /// `g = grad·min(1, grad_clip/(norm + 1e-6))`, `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`,
    /// `w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps)`. Decay applies to the parameters that the parameter table
    /// marks.
    ///
    /// With bf16 parameters `w` is the master weight, stored in one of two ways. An f32 `master` holds `w` itself, and the
    /// parameters are `w` with stochastic rounding, decided by the scalars `seed` and `step` and the element's index. An
    /// i16 `master` holds the residual of `w` rounded to the nearest bf16: parameter and residual together restore `w`
    /// exactly ([`split_master`](crate::split_master)).
    ///
    /// bf16 moments are updated in f32 and stored with stochastic rounding ([`RandomRounding`](crate::RandomRounding)); the
    /// step itself uses the unrounded ones. If the norm is non-finite or `halt` is not 0, nothing changes.
    pub struct AdamW {
        /// the whole parameter pool, flat
        pub params: Slot = Update,
        /// the whole pool of master weights, flat, f32 or i16; required if and only if the parameters are bf16
        pub master: Option<Slot> = Update,
        /// the whole gradient pool, flat
        pub grads: Slot = Read,
        /// the whole pool of first moments, flat; f32, or bf16 if the parameters are bf16
        pub moment1: Slot = Update,
        /// the whole pool of second moments, flat; the same type as the first. It is shorter than the others by the
        /// parameters of another optimizer
        pub moment2: Slot = Update,
        /// one f32, from [`GradNorm`]
        pub norm: Slot = Read,
        /// one f32, from [`GradNorm`]: nothing is changed unless it is 0
        pub halt: Slot = Read,
        /// Which element of the flat pools the slots begin with, a multiple of 64: 0 where they are whole
        pub first: usize,
    }
    name "adamw"
    check(op, c) {
        c.dtypes(named!(op: norm, halt), DType::F32)?;
        if op.first % 64 != 0 {
            return c.fail(format!("`first` is {}, expected a multiple of 64", op.first));
        }
        c.same_float(named!(op: params))?;
        c.same_float(named!(op: moment1, moment2))?;
        if op.moment1.dtype == DType::BF16 && op.params.dtype != DType::BF16 {
            return c.fail(format!("bf16 moments need bf16 `params`, which are {}", op.params.dtype));
        }
        c.same_float(named!(op: grads))?;
        c.numels(named!(op: norm, halt), 1)?;
        check_master(c, &op.params, op.master.as_ref())?;
        c.numels(named!(op: grads, moment1), op.params.numel())?;
        if op.moment2.numel() > op.params.numel() {
            let (found, most) = (op.moment2.numel(), op.params.numel());
            return c.fail(format!("`moment2` has {found} elements, expected at most {most}"));
        }
        Ok(())
    }
    numerics {
        // A dozen rounding errors per element.
        Numerics::new(Arithmetic::Elementwise(2e-6)).random_rounding()
    }
    flops(op) { 14 * op.moment2.numel() as u64 }
    bytes(op) {
        let master = op.master.map_or(0, |slot| slot.dtype.size());
        // With an f32 master, the parameters are only written.
        let passes = if op.master.is_some_and(|slot| slot.dtype == DType::F32) { 1 } else { 2 };
        let state = passes * op.params.dtype.size() + 2 * (master + 2 * op.moment1.dtype.size());
        (op.moment2.numel() * (state + op.grads.dtype.size()) + op.norm.bytes() + op.halt.bytes()) as u64
    }
}

/// Checks the master weights of flat parameters.
pub(super) fn check_master(c: &Checker, params: &Slot, master: Option<&Slot>) -> Result<()> {
    match master {
        Some(master) if params.dtype == DType::BF16 => {
            if !matches!(master.dtype, DType::F32 | DType::I16) {
                return c.fail(format!("`master` is {}, expected f32 or i16", master.dtype));
            }
            c.numel("master", master, params.numel())
        }
        None if params.dtype == DType::F32 => Ok(()),
        _ => c.fail("`master` is required with bf16 `params` and not allowed otherwise".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpSpec;
    use crate::{Pool, Shape};

    fn op(precision: crate::Precision) -> AdamW {
        let flat = |pool| Slot { pool, offset: 0, shape: Shape::new([64]), dtype: precision.of(pool) };
        let one = |offset| Slot { pool: Pool::Io, offset, shape: Shape::new([1]), dtype: DType::F32 };
        AdamW {
            params: flat(Pool::Params),
            master: precision.has_master().then(|| flat(Pool::Master)),
            grads: flat(Pool::Grads),
            moment1: flat(Pool::Moment1),
            moment2: flat(Pool::Moment2),
            norm: one(0),
            halt: one(64),
            first: 0,
        }
    }

    #[test]
    fn traffic_is_what_the_choice_of_memory_leaves() {
        let bf16 = crate::Precision::BF16;
        let of = |precision| crate::op::Op::from(op(precision)).bytes() - 8; // without `norm` and `halt`
        assert_eq!(of(crate::Precision::F32), 64 * 28);
        assert_eq!(of(bf16), 64 * 28);
        assert_eq!(of(bf16.with_residual()), 64 * 26);
        assert_eq!(of(bf16.with_bf16_moments()), 64 * 20);
        assert_eq!(of(bf16.with_residual().with_bf16_moments()), 64 * 18);
    }

    #[test]
    fn every_choice_of_memory_is_accepted_and_what_does_not_go_together_refused() {
        use crate::Precision as P;
        for base in [P::BF16, P::BF16_F32_GRADS] {
            for precision in [
                base,
                base.with_residual(),
                base.with_bf16_moments(),
                base.with_residual().with_bf16_moments(),
            ] {
                op(precision).check().unwrap();
            }
        }
        let refused = |op: AdamW| op.check().unwrap_err().to_string();
        let text = "adamw: bf16 moments need bf16 `params`, which are f32";
        assert_eq!(refused(op(P::F32.with_bf16_moments())), text);
        let good = op(P::BF16);
        let moment2 = Slot { dtype: DType::BF16, ..good.moment2 };
        assert_eq!(refused(AdamW { moment2, ..good }), "adamw: `moment2` is bf16, expected f32");
        let master = good.master.map(|slot| Slot { dtype: DType::BF16, ..slot });
        assert_eq!(refused(AdamW { master, ..good }), "adamw: `master` is bf16, expected f32 or i16");
        let both = "adamw: `master` is required with bf16 `params` and not allowed otherwise";
        assert_eq!(refused(AdamW { master: None, ..good }), both);
        let residual = op(P::BF16.with_residual()).master;
        assert_eq!(refused(AdamW { master: residual, ..op(P::F32) }), both);
        let short = residual.map(|slot| Slot { shape: Shape::new([63]), ..slot });
        assert_eq!(refused(AdamW { master: short, ..good }), "adamw: `master` has 63 elements, expected 64");
    }
}
