//! Choosing one column of each row.

use super::process_team::ProcessTeam;
use super::{Failed, Run, Span};
use crate::kernel::argmax::argmax_row;
use crate::kernel::sampling::{NoDistribution, Sampling, draw};
use crate::team::Split;
use ironhorse_core::eager::{Argmax, Rows, Sample, uniform_of_seed};

impl Run for Argmax {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, Rows { rows, cols }) = (ProcessTeam.isa(), self.rows);
        // SAFETY: guaranteed by the caller of `run`.
        let (logits, out) =
            unsafe { (Span::<f32>::of(self.logits, rows * cols), Span::from_raw(self.out, rows)) };
        ProcessTeam.rows(rows, cols, 1, |row| {
            // SAFETY: nobody writes the logits; rows have one task each.
            unsafe { out.set(row, argmax_row(isa, logits.row(row, cols).all()) as i32) };
        })?;
        Ok(())
    }
}

impl Run for Sample {
    /// Writes nothing if a row has no distribution.
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, Rows { rows, cols }) = (ProcessTeam.isa(), self.rows);
        // SAFETY: guaranteed by the caller of `run`.
        let (logits, seeds, out) = unsafe {
            let seeds = Span::from_raw(self.seeds.cast_mut(), rows).all();
            (Span::<f32>::of(self.logits, rows * cols), seeds, Span::from_raw(self.out, rows))
        };
        let &Self { temperature, top_k, top_p, .. } = self;
        let choice = Sampling { temperature, top_k, top_p };
        // Columns, or -1 and -2 for rows without a distribution.
        let mut drawn = vec![0_i32; rows];
        let shared = Span::of_slice(&mut drawn);
        ProcessTeam.rows(rows, cols, 16, |row| {
            // SAFETY: nobody writes the logits; rows have one task each.
            unsafe {
                let column =
                    match draw(isa, logits.row(row, cols).all(), &choice, uniform_of_seed(seeds[row])) {
                        Ok(column) => column,
                        Err(NoDistribution::NotFinite) => -1,
                        Err(NoDistribution::Empty) => -2,
                    };
                shared.set(row, column);
            }
        })?;
        if let Some(row) = drawn.iter().position(|&column| column < 0) {
            let not_finite = "a logit is NaN or +inf, expected finite numbers or -inf";
            let why = if drawn[row] == -1 { not_finite } else { "no logit is above -inf" };
            return Err(Failed::Row { row, why });
        }
        // SAFETY: the tasks are done; `out` shares no memory with the logits.
        unsafe { out.all_mut().copy_from_slice(&drawn) };
        Ok(())
    }
}
