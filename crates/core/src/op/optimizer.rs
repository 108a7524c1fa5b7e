//! The update: global gradient norm and AdamW over all parameters at once.

use super::spec::{Checker, OpSpec, slots};
use crate::{Result, Slot};

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
        c.all_f32(&[("norm", &self.norm), ("grads", &self.grads)])?;
        c.numel("norm", &self.norm, 1)
    }

    fn flops(&self) -> u64 {
        2 * self.grads.numel() as u64
    }
}

/// AdamW on every parameter in one pass, with the scalars `lr, beta1, beta2, eps, weight_decay, grad_clip, step`:
/// `g = grad·min(1, grad_clip/(norm + 1e-6))`, `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`,
/// `w = w - lr·wd·w - lr·(m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps)`; decay only where the parameter table says so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// the whole parameter pool, flat
    pub params: Slot,
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
    slots!(Update params, Read grads, Update moment1, Update moment2, Read norm);

    fn check(&self) -> Result<()> {
        let c = Checker(Self::NAME);
        let flat = [
            ("params", &self.params),
            ("grads", &self.grads),
            ("moment1", &self.moment1),
            ("moment2", &self.moment2),
        ];
        c.all_f32(&flat)?;
        c.all_f32(&[("norm", &self.norm)])?;
        c.numel("norm", &self.norm, 1)?;
        flat.iter().try_for_each(|(name, slot)| c.numel(name, slot, self.params.numel()))
    }

    fn flops(&self) -> u64 {
        14 * self.params.numel() as u64
    }
}
