//! What happens to gradients and parameters.

use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, with_zeros};
use crate::kernel::elementwise::{add_to, scale_by};
use crate::kernel::update::{
    self as kernel, ADAM_CHUNK, AdamWSettings, CLIP_EPS, Coefficients, NORM_CHUNK, adamw_update,
};
use crate::team::Split;
use ironhorse_core::eager::{AdamWStep, GradClip, ScatterAdd, ZeroGrad};

impl Run for AdamWStep {
    unsafe fn run(&self) -> Result<(), Failed> {
        let k = Coefficients::new(&AdamWSettings {
            lr: self.lr,
            beta1: self.beta1.into(),
            beta2: self.beta2.into(),
            eps: self.eps,
            weight_decay: self.weight_decay,
            step: self.step,
            grad_scale: 1.0,
        });
        // SAFETY: guaranteed by the caller of `run`.
        let [param, grad, m, v] =
            unsafe { [self.param, self.grad.cast_mut(), self.m, self.v].map(|x| Span::from_raw(x, self.n)) };
        let isa = ProcessTeam.isa();
        ProcessTeam.pieces(self.n, ADAM_CHUNK, 8, |r| {
            // SAFETY: tasks have disjoint ranges of what is written, which shares no memory with the rest.
            unsafe {
                let (w, g) = (param.get_mut(r.clone()), grad.get(r.clone()));
                adamw_update(isa, w, g, m.get_mut(r.clone()), v.get_mut(r), k);
            }
        })?;
        Ok(())
    }
}

impl Run for ZeroGrad {
    unsafe fn run(&self) -> Result<(), Failed> {
        // SAFETY: guaranteed by the caller of `run`.
        let grad = unsafe { Span::from_raw(self.grad, self.n) };
        // SAFETY: tasks have disjoint ranges.
        ProcessTeam.pieces(self.n, 1 << 16, 1, |r| unsafe { grad.get_mut(r) }.fill(0.0))?;
        Ok(())
    }
}

impl Run for GradClip {
    /// Multiplies by clip / (norm + 1e-6) if that is below 1, as PyTorch's `clip_grad_norm_` does; a norm that is NaN makes
    /// every gradient NaN.
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n) = (ProcessTeam.isa(), self.n);
        // SAFETY: guaranteed by the caller of `run`.
        let grad = unsafe { Span::from_raw(self.grad, n) };
        let norm = with_zeros(n.div_ceil(NORM_CHUNK), |partials| {
            // SAFETY: nobody writes the gradients here.
            unsafe { kernel::norm(&ProcessTeam, grad, Span::of_slice(partials)) }
        })?;
        // SAFETY: guaranteed by the caller of `run`; it shares no memory with the gradients.
        unsafe { *self.total_norm = norm };
        let factor = self.clip / (norm + CLIP_EPS);
        if factor >= 1.0 {
            return Ok(());
        }
        // SAFETY: tasks have disjoint ranges.
        ProcessTeam.pieces(n, 1 << 14, 1, |r| unsafe { scale_by(isa, grad.get_mut(r), factor) })?;
        Ok(())
    }
}

/// Tasks: each owns the table rows whose number has its remainder, so that every row has one owner and one order.
const OWNERS: usize = 16;

impl Run for ScatterAdd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, width, n) = (ProcessTeam.isa(), self.width, self.n * self.width);
        // SAFETY: guaranteed by the caller of `run`; every index is a row of the table.
        let (indices, table, rows) = unsafe {
            let indices = Span::from_raw(self.indices.cast_mut(), self.n).all();
            let count = indices.iter().max().map_or(0, |&i| i as usize + 1);
            let table = Span::from_raw(self.table, count * width);
            (indices, table, Span::from_raw(self.rows.cast_mut(), n))
        };
        // On one thread a single owner of all looks at the indices once, not 16 times.
        let (small, each) = (n < 1 << 19, n / OWNERS * 4);
        ProcessTeam.pieces(OWNERS, if small { OWNERS } else { 1 }, each, |owners| {
            for (i, &row) in
                indices.iter().enumerate().filter(|(_, row)| owners.contains(&(**row as usize % OWNERS)))
            {
                // SAFETY: the owner alone uses this row of the table.
                unsafe { add_to(isa, table.row(row as usize, width).all_mut(), rows.row(i, width).all()) };
            }
        })?;
        Ok(())
    }
}
