//! Functions of one or two numbers, element by element.

use super::layout::{THREADS, aligned, pointers};
use super::{Launch, OnStream};
use crate::Result;
use crate::args::Grid;
use crate::kernels::Spec;
use ironhorse_core::eager::{Array, Binary, BinaryFn, Float, SwigluBwd, Unary, UnaryBwd, UnaryFn};

const FILE: &str = "elementwise/eager.cu";

/// Blocks for `n` elements: a thread has 16 bytes.
fn grid(n: usize, float: Float) -> Grid {
    Grid::linear(n.div_ceil(THREADS * 16 / float.size()), THREADS as u32)
}

impl Launch for Unary {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { op, x, y, n } = *self;
        let (name, a) = match op {
            UnaryFn::Silu => ("silu_fwd", 0.0),
            UnaryFn::Act(act) => (act.ops()[0], 0.0),
            UnaryFn::GeluErf => ("gelu_erf", 0.0),
            UnaryFn::Square => ("square", 0.0),
            UnaryFn::Scale(a) => ("scale", a),
        };
        if n == 0 {
            return Ok(());
        }
        let args = pointers([y, x]).u64(n as u64).u32(aligned(&[x, y]).into()).f64(a);
        at.launch(&Spec::of(FILE, x.float).kernel(name), grid(n, x.float), args)
    }
}

impl Launch for UnaryBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { op, d_y, x, d_x, n } = *self;
        let name = match op {
            UnaryFn::Silu => "silu_bwd",
            UnaryFn::Act(act) => act.ops()[1],
            UnaryFn::GeluErf => "gelu_erf_bwd",
            UnaryFn::Square => "square_bwd",
            // The gradient of a scale does not read `x`.
            // SAFETY: guaranteed by the caller of `launch`; the arrays have the same lengths and types.
            UnaryFn::Scale(_) => return unsafe { Unary { op, x: d_y, y: d_x, n }.launch(at) },
        };
        two(at, name, [d_y, x], d_x, n)
    }
}

impl Launch for Binary {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let name = match self.op {
            BinaryFn::Add => "add",
            BinaryFn::Mul => "mul",
            BinaryFn::Swiglu => "swiglu",
        };
        two(at, name, [self.a, self.b], self.y, self.n)
    }
}

fn two(at: &OnStream<'_>, name: &'static str, [a, b]: [Array; 2], y: Array, n: usize) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    let args = pointers([y, a, b]).u64(n as u64).u32(aligned(&[a, b, y]).into());
    at.launch(&Spec::of(FILE, a.float).kernel(name), grid(n, a.float), args)
}

impl Launch for SwigluBwd {
    unsafe fn launch(&self, at: &OnStream<'_>) -> Result<()> {
        let Self { d_y, gate, up, d_gate, d_up, n } = *self;
        if n == 0 || !(d_gate.is_some() || d_up.is_some()) {
            return Ok(());
        }
        let arrays = [d_gate, d_up, d_y, gate, up];
        let args = pointers(arrays).u64(n as u64).u32(aligned(&arrays).into());
        at.launch(&Spec::of(FILE, d_y.float).kernel("swiglu_bwd"), grid(n, d_y.float), args)
    }
}

/// Every specialisation.
pub(super) fn specs() -> Vec<Spec> {
    Spec::of_all(FILE)
}
