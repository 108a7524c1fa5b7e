//! Elementwise ops.

use super::columns::rows_and_columns;
use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type};
use crate::element::{Elem, Real};
use crate::kernel::elementwise::{self as kernel, relu_sums};
use crate::kernel::tasks::{pieces, rows};
use crate::team::Split;
use ironhorse_core::eager::{
    Array, Binary, BinaryFn, Gate, ScaleBiasRelu, ScaleBiasReluBwd, SwigluBwd, Unary, UnaryBwd, UnaryFn,
};

/// How much an element costs, in light operations.
fn weight(op: UnaryFn) -> usize {
    if matches!(op, UnaryFn::Square | UnaryFn::Scale(_)) { 1 } else { 12 }
}

impl Run for Unary {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (n, op) = (self.n, self.op);
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [x, y] = unsafe { [self.x, self.y].map(|a| Span::<T>::of(a, n)) };
            pieces(&ProcessTeam, weight(op), ([x], [y]), |isa, [x], [y]| kernel::unary(isa, op, x, y))?;
        });
        Ok(())
    }
}

impl Run for UnaryBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (n, op) = (if self.d_x.is_some() { self.n } else { 0 }, self.op);
        by_type!(self.d_y.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [d_y, x, d_x] = unsafe { [self.d_y, self.x, self.d_x].map(|a| Span::<T>::of(a, n)) };
            let windows = ([d_y, x], [d_x]);
            pieces(&ProcessTeam, weight(op), windows, |isa, from, [d_x]| kernel::unary_bwd(isa, op, from, d_x))?;
        });
        Ok(())
    }
}

impl Run for Binary {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (n, op) = (self.n, self.op);
        let weight = if op == BinaryFn::Swiglu { 12 } else { 1 };
        by_type!(self.a.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [a, b, y] = unsafe { [self.a, self.b, self.y].map(|a| Span::<T>::of(a, n)) };
            pieces(&ProcessTeam, weight, ([a, b], [y]), |isa, from, [y]| kernel::binary(isa, op, from, y))?;
        });
        Ok(())
    }
}

impl Run for SwigluBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let none = Array::none(self.d_y.float);
        by_type!(self.d_y.float, T => {
            let window = |a: Array| {
                // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
                unsafe { Span::<T>::of(a, self.n) }
            };
            let from = [self.d_y, self.gate, self.up].map(window);
            let to = [self.d_gate, self.d_up, none].map(window);
            pieces(&ProcessTeam, 12, (from, to), kernel::swiglu_bwd)?;
        });
        Ok(())
    }
}

impl Run for ScaleBiasRelu {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (n, cols, scale) = (self.rows.elements(), self.rows.cols, self.scale);
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows have one task each.
            let ([x, y], bias) = unsafe {
                ([self.x, self.y].map(|a| Span::<T>::of(a, n)), Span::of(self.bias, cols))
            };
            rows(&ProcessTeam, (self.rows, 1), ([x], [y]), |isa, [x], [y]| {
                kernel::scale_bias_relu(isa, [x, bias], y, Real::of(scale));
            })?;
        });
        Ok(())
    }
}

impl Run for ScaleBiasReluBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let y = match self.gate {
            Gate::Result(y) if !self.expanded => y,
            _ => {
                return Err(Failed::Unsupported(
                    "fused_scale_bias_relu_bwd: on the host `d_y` must have every element, and the gate must be the result",
                ));
            }
        };
        let (isa, n, cols) = (ProcessTeam.isa(), self.rows.elements(), self.rows.cols);
        by_type!(y.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows of `d_x` are written by one task each, after they were read.
            unsafe {
                let [d_y, y, d_x] = [self.d_y, y, self.d_x].map(|a| Span::<T>::of(a, n));
                let d_bias = Span::<T>::of(self.d_bias, cols);
                let factor = <T as Elem>::Acc::of(self.scale);
                rows_and_columns(self.rows, 2, [d_bias], |row, [sums]| {
                    let [d_y, y, d_x] = [d_y, y, d_x].map(|x| x.row(row, cols));
                    if d_bias.is_some() {
                        relu_sums(isa, sums, d_y.all(), y.all());
                    }
                    if d_x.is_some() {
                        kernel::scale_bias_relu_bwd(isa, [d_y, y], d_x, factor);
                    }
                })?;
            }
        });
        Ok(())
    }
}
