//! Cases of the RMS norms.

use super::norm::{EPS, InPlace, NormAccums, NormCases, NormShape, WIDE, bwd_kit, residual_kit};
use super::{Case, Kit};
use crate::oracle::rmsnorm::rstd;
use ironhorse_core::op::{Gain, ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};
use ironhorse_core::{Precision, Slot};

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let norm = NormCases {
        fwd: |p, shape| fwd::<false>(p, shape, 1.0),
        apply: apply::<false>,
        residual: residual::<false>,
        bwd: bwd::<false>,
    };
    let mut cases = norm.all(p, &WIDE);
    cases.push(fwd::<false>(p, [2, 3, 129], 1e-3)); // so small that eps shows
    cases.push(fwd::<false>(p, [2, 3, 129], 1e4));
    let one_plus = NormCases {
        fwd: |p, shape| fwd::<true>(p, shape, 1.0),
        apply: apply::<true>,
        residual: residual::<true>,
        bwd: bwd::<true>,
    };
    cases.extend(one_plus.all(p, &[[2, 33, 640], [1, 1, 1152]]));
    cases
}

/// Whether the weight is 1 + weight.
const fn gain<const ONE_PLUS: bool>() -> Gain {
    if ONE_PLUS { Gain::OnePlusWeight } else { Gain::Weight }
}

/// What a case's name says about it.
const fn note<const ONE_PLUS: bool>() -> &'static str {
    if ONE_PLUS { " 1 + weight" } else { "" }
}

fn fwd<const ONE_PLUS: bool>(p: Precision, [b, t, c]: NormShape, range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} range {range}{}", note::<ONE_PLUS>()));
    let op = RmsNormFwd {
        out: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        inp: kit.slot([b, t, c]),
        weight: kit.param([c]),
        eps: EPS,
        gain: gain::<ONE_PLUS>(),
    };
    kit.draw(op.inp, -range, 2.0 * range);
    kit.finish(op)
}

fn residual<const ONE_PLUS: bool>(p: Precision, [b, t, c]: NormShape, in_place: InPlace) -> Case {
    let (mut kit, [a, other, residual]) = residual_kit(p, [b, t, c], in_place, note::<ONE_PLUS>());
    let op = ResidualRmsNormFwd {
        residual,
        out: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        a,
        b: other,
        weight: kit.param([c]),
        eps: EPS,
        gain: gain::<ONE_PLUS>(),
    };
    kit.draw(a, -1.0, 2.0);
    kit.finish(op)
}

/// Gives `inp` random values and the statistic its true ones; returns those.
fn set_stats(kit: &mut Kit, inp: Slot, slot: Slot) -> Vec<f32> {
    let values: Vec<f64> = kit.random(inp, -1.0, 2.0).into_iter().map(f64::from).collect();
    let rows = values.chunks_exact(inp.shape.cols());
    kit.set(slot, rows.map(|row| rstd(row, f64::from(EPS)) as f32).collect())
}

fn apply<const ONE_PLUS: bool>(p: Precision, [b, t, c]: NormShape) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c}{}", note::<ONE_PLUS>()));
    let op = RmsNormApply {
        out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        gain: gain::<ONE_PLUS>(),
    };
    set_stats(&mut kit, op.inp, op.rstd);
    kit.finish(op)
}

fn bwd<const ONE_PLUS: bool>(p: Precision, [b, t, c]: NormShape, accums: NormAccums) -> Case {
    let mut kit = bwd_kit(p, [b, t, c], accums, note::<ONE_PLUS>());
    let op = RmsNormBwd {
        d_inp: kit.slot([b, t, c]),
        d_weight: kit.grad([c]),
        d_out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        accum_inp: accums.inp,
        accum: accums.params,
        gain: gain::<ONE_PLUS>(),
    };
    let rstds = set_stats(&mut kit, op.inp, op.rstd);
    if c == 1 {
        // g - x̂·g·x̂ with x̂² all but 1: a rounding of g shows rstd times.
        kit.floor = f64::from(rstds.into_iter().fold(0.0, f32::max));
    }
    kit.finish(op)
}
