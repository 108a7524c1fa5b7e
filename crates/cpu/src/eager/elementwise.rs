//! Elementwise ops.

use super::columns::rows_and_columns;
use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type};
use crate::element::{Elem, Real};
use crate::kernel::elementwise::{self as kernel, relu_sums};
use crate::team::Split;
use ironhorse_core::eager::{
    Array, Binary, BinaryFn, Gate, ScaleBiasRelu, ScaleBiasReluBwd, SwigluBwd, Unary, UnaryBwd, UnaryFn,
};

/// Elements a task handles.
const CHUNK: usize = 1 << 14;

/// How much an element costs, in light operations.
fn weight(op: UnaryFn) -> usize {
    if matches!(op, UnaryFn::Square | UnaryFn::Scale(_)) { 1 } else { 12 }
}

impl Run for Unary {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n, op) = (ProcessTeam.isa(), self.n, self.op);
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [x, y] = unsafe { [self.x, self.y].map(|a| Span::<T>::of(a, n)) };
            ProcessTeam.pieces(n, CHUNK, weight(op), |r| {
                kernel::unary(isa, op, x.part(r.clone()), y.part(r));
            })?;
        });
        Ok(())
    }
}

impl Run for UnaryBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n, op) = (ProcessTeam.isa(), if self.d_x.is_some() { self.n } else { 0 }, self.op);
        by_type!(self.d_y.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [d_y, x, d_x] = unsafe { [self.d_y, self.x, self.d_x].map(|a| Span::<T>::of(a, n)) };
            ProcessTeam.pieces(n, CHUNK, weight(op), |r| {
                kernel::unary_bwd(isa, op, [d_y, x].map(|x| x.part(r.clone())), d_x.part(r));
            })?;
        });
        Ok(())
    }
}

impl Run for Binary {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n, op) = (ProcessTeam.isa(), self.n, self.op);
        let weight = if op == BinaryFn::Swiglu { 12 } else { 1 };
        by_type!(self.a.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let [a, b, y] = unsafe { [self.a, self.b, self.y].map(|a| Span::<T>::of(a, n)) };
            ProcessTeam.pieces(n, CHUNK, weight, |r| {
                kernel::binary(isa, op, [a, b].map(|x| x.part(r.clone())), y.part(r));
            })?;
        });
        Ok(())
    }
}

impl Run for SwigluBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n) = (ProcessTeam.isa(), self.n);
        by_type!(self.d_y.float, T => {
            // SAFETY: guaranteed by the caller of `run`; tasks have disjoint ranges.
            let (from, to) = unsafe {
                let to = [self.d_gate, self.d_up, Array::none(self.d_y.float)];
                let window = |a: Array| Span::<T>::of(a, n);
                ([self.d_y, self.gate, self.up].map(window), to.map(window))
            };
            ProcessTeam.pieces(n, CHUNK, 12, |r| {
                kernel::swiglu_bwd(isa, from.map(|x| x.part(r.clone())), to.map(|x| x.part(r.clone())));
            })?;
        });
        Ok(())
    }
}

impl Run for ScaleBiasRelu {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, n, cols, scale) = (ProcessTeam.isa(), self.rows.elements(), self.rows.cols, self.scale);
        by_type!(self.x.float, T => {
            // SAFETY: guaranteed by the caller of `run`; rows have one task each.
            let ([x, y], bias) = unsafe {
                ([self.x, self.y].map(|a| Span::<T>::of(a, n)), Span::of(self.bias, cols))
            };
            ProcessTeam.rows(self.rows.rows, cols, 1, |row| {
                kernel::scale_bias_relu(isa, [x.row(row, cols), bias], y.row(row, cols), Real::of(scale));
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
