//! The update: global gradient norm and AdamW over all parameters at once.

use super::spec::{Checker, OpSpec, slots};
use crate::{DType, Result, Slot};

/// `norm = √Σ g²` over every gradient, summed in a fixed order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm {
    /// one f32
    pub norm: Slot,
    /// the whole gradient pool, flat
    pub grads: Slot,
}

impl OpSpec for GradNorm {
    const NAME: &'static str = "grad_norm";
    slots!(Write norm, Read grads);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.same_float(&[("grads", &self.grads)])?;
        c.all_f32(&[("norm", &self.norm)])?;
        c.numel("norm", &self.norm, 1)
    }

    fn flops(&self) -> u64 {
        2 * self.grads.numel() as u64
    }
}

/// AdamW on every parameter in one pass, with the scalars `lr, beta1, beta2, eps, weight_decay, grad_clip, step`:
/// `g = grad·min(1, grad_clip/(norm + 1e-6))`, `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`,
/// `w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps)`; decay only where the parameter table says so.
///
/// With bf16 parameters `w` is the f32 master, and the parameters become `w` rounded up or down at random, the nearer
/// the likelier, decided by the scalars `seed` and `step` and the element's index. A norm that is not finite leaves
/// everything as it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// the whole parameter pool, flat
    pub params: Slot,
    /// the whole pool of master weights, flat, f32; where the parameters are bf16
    pub master: Option<Slot>,
    /// the whole gradient pool, flat
    pub grads: Slot,
    /// the whole pool of first moments, flat
    pub moment1: Slot,
    /// the whole pool of second moments, flat
    pub moment2: Slot,
    /// one f32, from [`GradNorm`]
    pub norm: Slot,
}

impl OpSpec for AdamW {
    const NAME: &'static str = "adamw";
    slots!(Update params, Update master, Read grads, Update moment1, Update moment2, Read norm);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        c.all_f32(&[("moment1", &self.moment1), ("moment2", &self.moment2), ("norm", &self.norm)])?;
        c.same_float(&[("params", &self.params)])?;
        c.same_float(&[("grads", &self.grads)])?;
        c.numel("norm", &self.norm, 1)?;
        match &self.master {
            Some(master) if self.params.dtype == DType::BF16 => {
                c.all_f32(&[("master", master)])?;
                c.numel("master", master, self.params.numel())?;
            }
            None if self.params.dtype == DType::F32 => {}
            _ => return c.fail("`master` goes with bf16 `params`, and only with them".into()),
        }
        let flat = [("grads", &self.grads), ("moment1", &self.moment1), ("moment2", &self.moment2)];
        flat.iter().try_for_each(|(name, slot)| c.numel(name, slot, self.params.numel()))
    }

    fn flops(&self) -> u64 {
        14 * self.params.numel() as u64
    }
}
