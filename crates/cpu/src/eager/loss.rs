//! Losses.

use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type, fill_nan, read, with_zeros, write};
use crate::element::{Elem, Real};
use crate::kernel::loss as kernel;
use crate::team::Split;
use ironhorse_core::eager::{
    AuxLoss, CrossEntropy, CrossEntropyBwd, CrossEntropyMean, LogProbs, LogProbsBwd, Rows, Targets,
};

/// The class indices of rows, shared between tasks.
#[derive(Clone, Copy)]
enum Classes {
    I32(Span<i32>),
    I64(Span<i64>),
}

impl Classes {
    /// # Safety
    /// There are `rows` indices.
    unsafe fn of(targets: Targets, rows: usize) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match targets {
                Targets::I32(at) => Self::I32(Span::from_raw(at.cast_mut(), rows)),
                Targets::I64(at) => Self::I64(Span::from_raw(at.cast_mut(), rows)),
            }
        }
    }

    /// The class of a row.
    ///
    /// # Safety
    /// Nobody writes it.
    unsafe fn get(self, row: usize) -> i64 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Self::I32(all) => all.value(row).into(),
                Self::I64(all) => all.value(row),
            }
        }
    }
}

impl Run for CrossEntropy {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, ignore, Rows { rows, cols }) = (ProcessTeam.isa(), self.ignore, self.rows);
        if cols == 0 {
            // SAFETY: guaranteed by the caller of `run`.
            unsafe { fill_nan([self.losses, self.lse], rows) };
            return Ok(());
        }
        // SAFETY: guaranteed by the caller of `run`.
        let targets = unsafe { Classes::of(self.targets, rows) };
        by_type!(self.logits.float, T => {
            type Acc = <T as Elem>::Acc;
            // SAFETY: guaranteed by the caller of `run`.
            let (logits, [losses, lse]) = unsafe {
                (Span::<T>::of(self.logits, rows * cols), [self.losses, self.lse].map(|a| Span::<Acc>::of(a, rows)))
            };
            ProcessTeam.rows(rows, cols, 16, |row| {
                // SAFETY: guaranteed by the caller of `run`; rows have one task each.
                unsafe {
                    let (x, target) = (logits.row(row, cols).all(), targets.get(row));
                    let (max, log_sum) = kernel::log_sum(isa, x);
                    let loss = match usize::try_from(target).ok().and_then(|i| x.get(i)) {
                        _ if target == ignore => 0.0,
                        Some(x) => log_sum - (x.load().wide() - max),
                        None => f64::NAN,
                    };
                    losses.set(row, Acc::of(loss));
                    lse.set(row, Acc::of(max + log_sum));
                }
            })?;
        });
        Ok(())
    }
}

impl Run for CrossEntropyMean {
    unsafe fn run(&self) -> Result<(), Failed> {
        let rows = 0..self.rows;
        // SAFETY: guaranteed by the caller of `run`; one thread.
        unsafe {
            let targets = Classes::of(self.targets, self.rows);
            let total: f64 = rows.clone().map(|row| read(self.losses, row)).sum();
            let counts = |row: &usize| targets.get(*row) != self.ignore;
            let count = if self.mean { rows.filter(counts).count() } else { 1 };
            write(self.loss, 0, total / count as f64);
            write(self.inv_count, 0, 1.0 / count as f64);
        }
        Ok(())
    }
}

impl Run for CrossEntropyBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, ignore, per_row) = (ProcessTeam.isa(), self.ignore, self.per_row);
        let Rows { rows, cols } = self.rows;
        if !self.d_logits.is_some() || rows * cols == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller of `run`; there is a row.
        let (targets, d_losses) = unsafe {
            let share = if self.inv_count.is_some() { read(self.inv_count, 0) } else { 1.0 };
            let d_loss = |row| read(self.d_loss, row) * share;
            let d_losses: Vec<f64> = (0..if per_row { rows } else { 1 }).map(d_loss).collect();
            (Classes::of(self.targets, rows), d_losses)
        };
        by_type!(self.logits.float, T => {
            type Acc = <T as Elem>::Acc;
            // SAFETY: guaranteed by the caller of `run`.
            let ([logits, to], lse) = unsafe {
                ([self.logits, self.d_logits].map(|a| Span::<T>::of(a, rows * cols)), Span::<Acc>::of(self.lse, rows))
            };
            ProcessTeam.rows(rows, cols, 12, |row| {
                let (x, to) = (logits.row(row, cols), to.row(row, cols));
                let factor = d_losses[if per_row { row } else { 0 }];
                // SAFETY: guaranteed by the caller of `run`; rows have one task each, and no slice lives while another is
                // written.
                unsafe {
                    let (target, lse) = (targets.get(row), lse.value(row));
                    let Some(at) = usize::try_from(target).ok().filter(|&i| i < cols && target != ignore) else {
                        let value = if target == ignore { 0.0 } else { f64::NAN };
                        return to.all_mut().fill(T::store(Acc::of(value)));
                    };
                    let log_p = x.value(at).load().wide() - lse.wide();
                    kernel::cross_entropy_d_row(isa, x, to, lse, Acc::of(factor));
                    // p - 1 = e^log_p - 1 without the cancellation when p is near 1.
                    to.set(at, T::store(Acc::of(log_p.exp_m1() * factor)));
                }
            })?;
        });
        Ok(())
    }
}

impl Run for LogProbs {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, Rows { rows, cols }) = (ProcessTeam.isa(), self.rows);
        if rows == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller of `run`.
        let ([logits, log_probs], targets) = unsafe {
            let windows = [self.logits, self.log_probs].map(|a| Span::<f32>::of(a, rows * cols));
            (windows, Span::from_raw(self.targets.cast_mut(), rows))
        };
        let total = with_zeros(rows, |losses| {
            let shared = Span::of_slice(losses);
            ProcessTeam.rows(rows, cols, 16, |row| {
                let (x, to) = (logits.row(row, cols), log_probs.row(row, cols));
                // SAFETY: guaranteed by the caller of `run`; rows have one task each.
                unsafe {
                    shared.set(row, kernel::log_probs_row(isa, x, to, targets.value(row) as usize));
                }
            })?;
            Ok::<_, Failed>(losses.iter().sum::<f64>())
        })?;
        // SAFETY: the tasks are done; `loss` shares no memory with the other arrays.
        unsafe { write(self.loss, 0, total / rows as f64) };
        Ok(())
    }
}

impl Run for LogProbsBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, scale, Rows { rows, cols }) = (ProcessTeam.isa(), self.scale as f32, self.rows);
        // SAFETY: guaranteed by the caller of `run`.
        let ([log_probs, d_logits], targets) = unsafe {
            let windows = [self.log_probs, self.d_logits].map(|a| Span::<f32>::of(a, rows * cols));
            (windows, Span::from_raw(self.targets.cast_mut(), rows))
        };
        ProcessTeam.rows(rows, cols, 8, |row| {
            let (x, d) = (log_probs.row(row, cols), d_logits.row(row, cols));
            // SAFETY: guaranteed by the caller of `run`; rows have one task each.
            unsafe {
                let target = targets.value(row) as usize;
                let kept = x.value(target);
                kernel::log_probs_d_row(isa, x, d, scale);
                // Here p - 1 = e^l - 1 without the cancellation when p is near 1.
                d.set(target, (f64::from(kept).exp_m1() * f64::from(scale)) as f32);
            }
        })?;
        Ok(())
    }
}

impl Run for AuxLoss {
    /// Runs on one thread. An expert chosen twice by a token counts once.
    unsafe fn run(&self) -> Result<(), Failed> {
        let (tokens, all) = (self.tokens as f64, self.experts);
        // SAFETY: guaranteed by the caller of `run`.
        let (probs, chosen) = unsafe {
            let chosen = Span::from_raw(self.chosen.cast_mut(), self.tokens * self.k);
            (Span::<f32>::of(self.probs, self.tokens * all).all(), chosen.all())
        };
        let (mut counts, mut sums) = (vec![0_u64; all], vec![0.0_f64; all]);
        for row in probs.chunks_exact(all.max(1)) {
            sums.iter_mut().zip(row).for_each(|(sum, &p)| *sum += f64::from(p));
        }
        for row in chosen.chunks_exact(self.k.max(1)) {
            let first = row.iter().enumerate().filter(|&(i, e)| !row[..i].contains(e));
            first.for_each(|(_, &e)| counts[e as usize] += 1);
        }
        let mut total = 0.0;
        for (e, (&count, sum)) in counts.iter().zip(sums).enumerate() {
            let (fraction, mean) = (count as f64 / tokens, sum / tokens);
            total += fraction * mean;
            // SAFETY: guaranteed by the caller of `run`.
            unsafe {
                write(self.fractions, e, fraction);
                write(self.means, e, mean);
            }
        }
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { write(self.loss, 0, f64::from(self.alpha as f32) * all as f64 * total) };
        Ok(())
    }
}
