//! Softmax over rows, and the top-k choice of a router.

use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type};
use crate::kernel::softmax as kernel;
use crate::kernel::tasks::rows;
use crate::kernel::topk::{largest_columns, top_weights};
use crate::team::Split;
use ironhorse_core::eager::{Rows, Softmax, SoftmaxBwd, SoftmaxTopk};

impl Run for Softmax {
    unsafe fn run(&self) -> Result<(), Failed> {
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows have one task each.
            let [x, y] = unsafe { [self.x, self.y].map(|a| Span::<T>::of(a, self.rows.elements())) };
            rows(&ProcessTeam, (self.rows, 16), ([x], [y]), |isa, [x], [y]| kernel::softmax(isa, x, y))?;
        });
        Ok(())
    }
}

impl Run for SoftmaxBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let sizes = Rows { rows: if self.d_x.is_some() { self.rows.rows } else { 0 }, ..self.rows };
        by_type!(self.y.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows have one task each.
            let [d_y, y, d_x] = unsafe { [self.d_y, self.y, self.d_x].map(|a| Span::<T>::of(a, sizes.elements())) };
            rows(&ProcessTeam, (sizes, 4), ([d_y, y], [d_x]), |isa, from, [d_x]| kernel::softmax_bwd(isa, from, d_x))?;
        });
        Ok(())
    }
}

impl Run for SoftmaxTopk {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, k, Rows { rows, cols }) = (ProcessTeam.isa(), self.k, self.rows);
        // SAFETY: guaranteed by the caller of `run`.
        let (x, weights, indices) = unsafe {
            let weights = Span::<f32>::of(self.weights, rows * k);
            (Span::<f32>::of(self.x, rows * cols), weights, Span::from_raw(self.indices, rows * k))
        };
        // A task is several rows, which share the list of columns.
        ProcessTeam.pieces(rows, ((1 << 12) / cols.max(1)).max(1), cols.saturating_mul(16), |range| {
            let mut order = Vec::with_capacity(cols);
            for row in range {
                // SAFETY: rows have one task each; what is written shares no memory with `x`.
                let (x, weights, indices) = unsafe {
                    (x.row(row, cols).all(), weights.row(row, k).all_mut(), indices.row(row, k).all_mut())
                };
                largest_columns(isa, x, k, &mut order);
                top_weights(x, &order[..k], weights, indices);
            }
        })?;
        Ok(())
    }
}
