//! Choosing one column of each row of logits.

use super::rows::{Team, empty};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::{Args, Grid};
use crate::kernels::Spec;
use ironhorse_core::eager::{Argmax, Float, Sample};

const FILE: &str = "sampling/eager.cu";

impl Launch for Argmax {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { logits, out, rows } = *self;
        if empty(rows) {
            return Ok(());
        }
        let team = Team::streamed(rows.cols, 16, 512);
        let args = Args::new().at(out).arrays([logits]).u64s([rows.rows, rows.cols]).u32(team.lanes);
        at.launch(&Spec::of(FILE, logits.float).kernel("argmax"), team.grid(rows.rows), args)
    }
}

impl Launch for Sample {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let rows = self.rows;
        if empty(rows) {
            return Ok(());
        }
        // Weights are whole multiples of 1 / scale; the sum of all stays below 2^63, and a weight has 52 bits at most.
        let scale = 2_f64.powi((62 - (usize::BITS - rows.cols.leading_zeros()) as i32).min(52));
        let top_k = self.top_k.map_or(0, |k| u32::try_from(k).unwrap_or(0));
        let top_p = if self.top_k.is_some() { 0.0 } else { self.top_p.unwrap_or(0.0) };
        let args = Args::new().at(self.out).arrays([self.logits]).at(self.seeds);
        let args = args.u32(rows.cols as u32).f64(self.temperature.into()).f64(scale);
        let kernel = Spec::of(FILE, self.logits.float).kernel("choose");
        at.launch(&kernel, Grid::linear(rows.rows, 1024), args.u32(top_k).f32(top_p))
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    vec![Spec::of(FILE, Float::F32)]
}
