//! Cases of the layer norms.

use super::norm::{EPS, InPlace, NormAccums, NormCases, NormShape, WIDE, bwd_kit, residual_kit};
use super::{Case, Kit};
use crate::oracle::layernorm::stats;
use ironhorse_core::op::{Accum, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd};
use ironhorse_core::{Precision, Slot};

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let norm = NormCases { fwd: |p, shape| fwd(p, shape, -1.0), apply, residual, bwd };
    let mut cases = norm.all(p, &WIDE);
    // The pairs a model uses.
    for (inp, params) in [(Accum::Write, Accum::Write), (Accum::Add, Accum::FirstWrites)] {
        cases.push(bwd(p, [1, 37, 80], NormAccums { inp, params, micro_step: 0 }));
    }
    cases.push(fwd(p, [2, 3, 129], 10.0)); // mean much larger than the spread: sums of squares lose the variance
    cases
}

/// Inputs are `offset` to `offset + 3`: an offset of -1 has a mean of 1/2, so that no mean is 0.
fn fwd(p: Precision, [b, t, c]: NormShape, offset: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} from {offset}"));
    let op = LayerNormFwd {
        out: kit.slot([b, t, c]),
        mean: kit.stat([b, t]),
        rstd: kit.stat([b, t]),
        inp: kit.slot([b, t, c]),
        weight: kit.param([c]),
        bias: kit.param([c]),
        eps: EPS,
    };
    kit.draw(op.inp, offset, offset + 3.0);
    kit.finish(op)
}

fn residual(p: Precision, [b, t, c]: NormShape, in_place: InPlace) -> Case {
    let (mut kit, [a, other, residual]) = residual_kit(p, [b, t, c], in_place, "");
    let op = ResidualLayerNormFwd {
        residual,
        out: kit.slot([b, t, c]),
        mean: kit.stat([b, t]),
        rstd: kit.stat([b, t]),
        a,
        b: other,
        weight: kit.param([c]),
        bias: kit.param([c]),
        eps: EPS,
    };
    kit.draw(a, -1.0, 2.0);
    kit.finish(op)
}

/// Gives `inp` random values and the statistics their true ones; returns the values of `rstd`.
fn set_stats(kit: &mut Kit, inp: Slot, mean: Slot, rstd: Slot) -> Vec<f32> {
    let values: Vec<f64> = kit.random(inp, -1.0, 2.0).into_iter().map(f64::from).collect();
    let (means, rstds): (Vec<f32>, Vec<f32>) = values
        .chunks_exact(inp.shape.cols())
        .map(|row| stats(row, f64::from(EPS)))
        .map(|(mean, rstd)| (mean as f32, rstd as f32))
        .unzip();
    kit.set(mean, means);
    kit.set(rstd, rstds.clone());
    rstds
}

fn apply(p: Precision, [b, t, c]: NormShape) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c}"));
    let op = LayerNormApply {
        out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        mean: kit.stat([b, t]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        bias: kit.param([c]),
    };
    set_stats(&mut kit, op.inp, op.mean, op.rstd);
    kit.finish(op)
}

fn bwd(p: Precision, [b, t, c]: NormShape, accums: NormAccums) -> Case {
    let mut kit = bwd_kit(p, [b, t, c], accums, "");
    let op = LayerNormBwd {
        d_inp: kit.slot([b, t, c]),
        d_weight: kit.grad([c]),
        d_bias: kit.grad([c]),
        d_out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        mean: kit.stat([b, t]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        accum_inp: accums.inp,
        accum: accums.params,
    };
    let rstds = set_stats(&mut kit, op.inp, op.mean, op.rstd);
    if c == 1 {
        // g - mean(g) is 0, times an rstd of 316: one rounding of g shows as 316 roundings.
        kit.floor = f64::from(rstds.into_iter().fold(0.0, f32::max));
    }
    kit.finish(op)
}
