//! RMS and layer normalisation.

use super::columns::rows_and_columns;
use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type, fill_nan};
use crate::element::{Blocks, Elem};
use crate::kernel::norm::{Norm, NormBwd, column_sums};
use crate::team::Split;
use ironhorse_core::eager::{
    Array, Float, LayerNorm, LayerNormBwd, ResidualRmsNorm, RmsNorm, RmsNormBwd, Rows,
};

/// The arrays of a norm; a layer norm has a bias.
struct Forward {
    x: Array,
    terms: Option<[Array; 2]>,
    weight: Array,
    bias: Option<Array>,
    y: Array,
    mean: Array,
    rstd: Array,
    rows: Rows,
}

impl Forward {
    /// # Safety
    /// As [`Run::run`].
    unsafe fn run(&self, eps: f64) -> Result<(), Failed> {
        let Rows { rows, cols } = self.rows;
        if cols == 0 {
            // SAFETY: guaranteed by the caller of `run`.
            unsafe { fill_nan([self.mean, self.rstd], rows) };
            return Ok(());
        }
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`.
            unsafe {
                let matrix = |a: Array| Span::<T>::of(a, rows * cols);
                let norm = Norm {
                    x: matrix(self.x),
                    terms: self.terms.map(|terms| terms.map(matrix)),
                    weight: Span::of(self.weight, cols),
                    bias: self.bias.map(|bias| Span::of(bias, cols)),
                    y: matrix(self.y),
                    mean: Span::of(self.mean, rows),
                    rstd: Span::of(self.rstd, rows),
                    rows,
                };
                norm.forward::<Blocks>(&ProcessTeam, eps)?;
            }
        });
        Ok(())
    }
}

impl Run for RmsNorm {
    unsafe fn run(&self) -> Result<(), Failed> {
        let &Self { x, weight, y, rstd, rows, eps } = self;
        let mean = Array::none(rstd.float);
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { Forward { x, terms: None, weight, bias: None, y, mean, rstd, rows }.run(eps) }
    }
}

impl Run for ResidualRmsNorm {
    unsafe fn run(&self) -> Result<(), Failed> {
        let &Self { x, residual, weight, y, sum, rows, eps } = self;
        let none = Array::none(Float::F32);
        let terms = Some([x, residual]);
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { Forward { x: sum, terms, weight, bias: None, y, mean: none, rstd: none, rows }.run(eps) }
    }
}

impl Run for LayerNorm {
    unsafe fn run(&self) -> Result<(), Failed> {
        let &Self { x, weight, bias, y, mean, rstd, rows, eps } = self;
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { Forward { x, terms: None, weight, bias: Some(bias), y, mean, rstd, rows }.run(eps) }
    }
}

/// The arrays of a norm's gradient; that of a layer norm has means.
struct Backward {
    d_y: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    d_x: Array,
    d_weight: Array,
    d_bias: Array,
    rows: Rows,
}

impl Backward {
    /// # Safety
    /// As [`Run::run`].
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n, Rows { rows, cols }) = (ProcessTeam.isa(), self.rows.elements(), self.rows);
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows of `d_x` are written by one task each, after they were read.
            unsafe {
                let [d_y, x, d_x] = [self.d_y, self.x, self.d_x].map(|a| Span::<T>::of(a, n));
                let [weight, d_weight, d_bias] =
                    [self.weight, self.d_weight, self.d_bias].map(|a| Span::<T>::of(a, cols));
                let [mean, rstd] = [self.mean, self.rstd].map(|a| Span::<<T as Elem>::Acc>::of(a, rows));
                let norm = NormBwd { d_y, x, weight, mean, rstd, d_x };
                rows_and_columns(self.rows, 5, [d_weight, d_bias], |row, [dots, sums]| {
                    let (d_y, x) = (d_y.row(row, cols), x.row(row, cols));
                    if d_weight.is_some() {
                        column_sums(isa, dots, sums, d_y.all(), x.all(), norm.statistics(row));
                    } else {
                        crate::kernel::elementwise::add_to(isa, sums, d_y.all());
                    }
                    if d_x.is_some() {
                        norm.d_x_row::<Blocks>(isa, row, false);
                    }
                })?;
            }
        });
        Ok(())
    }
}

impl Run for RmsNormBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let &Self { d_y, x, weight, rstd, d_x, d_weight, rows } = self;
        let (mean, d_bias) = (Array::none(rstd.float), Array::none(x.float));
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { Backward { d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows }.run() }
    }
}

impl Run for LayerNormBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let &Self { d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows } = self;
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { Backward { d_y, x, weight, mean, rstd, d_x, d_weight, d_bias, rows }.run() }
    }
}
