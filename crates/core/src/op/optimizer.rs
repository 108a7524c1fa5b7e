//! The update: global gradient norm and AdamW over all parameters at once.

use super::numerics::{Arithmetic, Numerics};
use super::spec::{Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// `norm = √Σ g²` over every gradient, summed in a fixed order; `halt = 1` where `halt` was not 0 already or where the norm
/// or the loss is not finite. Only the host clears `halt`, so no update after a bad one is made until the host has seen it,
/// however many are in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm {
    /// one f32
    pub norm: Slot,
    /// one f32: 0, or 1 where [`AdamW`] must change nothing
    pub halt: Slot,
    /// the whole gradient pool, flat
    pub grads: Slot,
    /// one f32, the loss that the gradients are of
    pub loss: Slot,
}

impl OpSpec for GradNorm {
    const NAME: &'static str = "grad_norm";
    slots!(Write norm, Update halt, Read grads, Read loss);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("grads", &self.grads)])?;
        let scalars = [("norm", &self.norm), ("halt", &self.halt), ("loss", &self.loss)];
        c.all_f32(&scalars)?;
        scalars.iter().try_for_each(|(name, slot)| c.numel(name, slot, 1))
    }

    fn numerics(&self, _: &str) -> Numerics {
        // Up to 250,000 terms: asks for partial sums or a wider accumulator, as it should.
        Numerics::new(Arithmetic::PositiveSum(2e-6))
    }

    fn flops(&self) -> u64 {
        2 * self.grads.numel() as u64
    }
}

/// AdamW on every parameter in one pass, with the scalars `lr, beta1, beta2, eps, weight_decay, grad_clip, step`:
/// `g = grad·min(1, grad_clip/(norm + 1e-6))`, `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`,
/// `w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps)`; decay only where the parameter table says so.
///
/// With bf16 parameters `w` is the master, kept in one of two ways. An f32 `master` holds it whole, and the parameters
/// become `w` rounded up or down at random, the nearer the likelier, decided by the scalars `seed` and `step` and the
/// element's index. An i16 `master` holds what the parameters lack: they become `w` rounded to the nearest, and both
/// together are `w` to the bit ([`split_master`](crate::split_master)).
///
/// bf16 moments are widened, used and updated in f32, and rounded at random when they are stored
/// ([`RandomRounding`](crate::RandomRounding)); the step itself uses them before that. A norm that is not finite and a
/// `halt` that is not 0 leave everything as it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// the whole parameter pool, flat
    pub params: Slot,
    /// the whole pool of master weights, flat, f32 or i16; where the parameters are bf16
    pub master: Option<Slot>,
    /// the whole gradient pool, flat
    pub grads: Slot,
    /// the whole pool of first moments, flat; f32, or bf16 where the parameters are
    pub moment1: Slot,
    /// the whole pool of second moments, flat; like the first
    pub moment2: Slot,
    /// one f32, from [`GradNorm`]
    pub norm: Slot,
    /// one f32, from [`GradNorm`]: nothing is changed unless it is 0
    pub halt: Slot,
}

impl OpSpec for AdamW {
    const NAME: &'static str = "adamw";
    slots!(Update params, Update master, Read grads, Update moment1, Update moment2, Read norm, Read halt);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.all_f32(&[("norm", &self.norm), ("halt", &self.halt)])?;
        c.same_float(&[("params", &self.params)])?;
        c.same_float(&[("moment1", &self.moment1), ("moment2", &self.moment2)])?;
        if self.moment1.dtype == DType::BF16 && self.params.dtype != DType::BF16 {
            return c.fail(format!("bf16 moments go with bf16 `params`, which are {}", self.params.dtype));
        }
        c.same_float(&[("grads", &self.grads)])?;
        c.numel("norm", &self.norm, 1)?;
        c.numel("halt", &self.halt, 1)?;
        match &self.master {
            Some(master) if self.params.dtype == DType::BF16 => {
                if !matches!(master.dtype, DType::F32 | DType::I16) {
                    return c.fail(format!("`master` is {}, expected f32 or i16", master.dtype));
                }
                c.numel("master", master, self.params.numel())?;
            }
            None if self.params.dtype == DType::F32 => {}
            _ => return c.fail("`master` goes with bf16 `params`, and only with them".into()),
        }
        let flat = [("grads", &self.grads), ("moment1", &self.moment1), ("moment2", &self.moment2)];
        flat.iter().try_for_each(|(name, slot)| c.numel(name, slot, self.params.numel()))
    }

    fn numerics(&self, _: &str) -> Numerics {
        // A dozen roundings per element.
        Numerics::new(Arithmetic::Elementwise(2e-6)).random_rounding()
    }

    fn flops(&self) -> u64 {
        14 * self.params.numel() as u64
    }

    fn bytes(&self) -> Option<u64> {
        let [params, grads, moment1, moment2, norm, halt] =
            [self.params, self.grads, self.moment1, self.moment2, self.norm, self.halt]
                .map(|slot| slot.bytes() as u64);
        let master = self.master.map_or(0, |slot| slot.bytes() as u64);
        // weights beside a whole master are only written
        let weights =
            if self.master.is_some_and(|slot| slot.dtype == DType::F32) { params } else { 2 * params };
        Some(weights + 2 * (master + moment1 + moment2) + grads + norm + halt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        }
    }

    #[test]
    fn traffic_is_what_the_choice_of_memory_leaves() {
        let bf16 = crate::Precision::BF16;
        let of = |precision| crate::op::Op::from(op(precision)).bytes() - 8; // the norm and whether to halt
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
        let text = "adamw: bf16 moments go with bf16 `params`, which are f32";
        assert_eq!(refused(op(P::F32.with_bf16_moments())), text);
        let good = op(P::BF16);
        let moment2 = Slot { dtype: DType::BF16, ..good.moment2 };
        assert_eq!(refused(AdamW { moment2, ..good }), "adamw: `moment2` is bf16, expected f32");
        let master = good.master.map(|slot| Slot { dtype: DType::BF16, ..slot });
        assert_eq!(refused(AdamW { master, ..good }), "adamw: `master` is bf16, expected f32 or i16");
        let both = "adamw: `master` goes with bf16 `params`, and only with them";
        assert_eq!(refused(AdamW { master: None, ..good }), both);
        let residual = op(P::BF16.with_residual()).master;
        assert_eq!(refused(AdamW { master: residual, ..op(P::F32) }), both);
        let short = residual.map(|slot| Slot { shape: Shape::new([63]), ..slot });
        assert_eq!(refused(AdamW { master: short, ..good }), "adamw: `master` has 63 elements, expected 64");
    }
}
