//! Cases of the RMS norms.

use super::{ACCUMS, Case, Kit};
use crate::oracle::rmsnorm::rstd;
use ironhorse_core::op::{Accum, ResidualRmsNormFwd, RmsNormApply, RmsNormBwd, RmsNormFwd};
use ironhorse_core::{Precision, Slot};

/// (B, T, C)
const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [3, 5, 1],
    [1, 31, 5],
    [1, 1, 48],
    [2, 33, 31],
    [1, 37, 80],
    [2, 65, 129],
    [1, 3, 1003],
    [0, 5, 48],
];
/// Widths of real models, for which engines use other kernels.
const WIDE: [[usize; 3]; 6] =
    [[1, 33, 768], [2, 65, 1024], [3, 100, 1600], [1, 1, 768], [8, 1, 1600], [1, 3, 3072]];
const EPS: f32 = 1e-5;

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, 1.0));
        cases.push(apply(p, shape));
        cases.extend([InPlace::No, InPlace::A, InPlace::B].map(|in_place| residual(p, shape, in_place)));
        for (i, accum) in ACCUMS.into_iter().enumerate() {
            cases.push(bwd(p, shape, ACCUMS[(i + 1) % ACCUMS.len()].0, accum));
        }
    }
    for shape in WIDE {
        cases.push(fwd(p, shape, 1.0));
        cases.push(apply(p, shape));
        cases.extend([InPlace::No, InPlace::A].map(|in_place| residual(p, shape, in_place)));
        cases.push(bwd(p, shape, Accum::Write, (Accum::FirstWrites, 0)));
        cases.push(bwd(p, shape, Accum::Add, (Accum::FirstWrites, 1)));
    }
    cases.push(fwd(p, [2, 3, 129], 1e-3)); // so small that eps matters
    cases.push(fwd(p, [2, 3, 129], 1e4));
    cases
}

fn fwd(p: Precision, [b, t, c]: [usize; 3], range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} range {range}"));
    let op = RmsNormFwd {
        out: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        inp: kit.slot([b, t, c]),
        weight: kit.param([c]),
        eps: EPS,
    };
    kit.random(op.inp, -range, 2.0 * range);
    kit.finish(op)
}

#[derive(Clone, Copy, Debug)]
enum InPlace {
    No,
    A,
    B,
}

fn residual(p: Precision, [b, t, c]: [usize; 3], in_place: InPlace) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} in place {in_place:?}"));
    let [a, other] = [(); 2].map(|()| kit.slot([b, t, c]));
    let residual = match in_place {
        InPlace::No => kit.slot([b, t, c]),
        InPlace::A => a,
        InPlace::B => other,
    };
    let op = ResidualRmsNormFwd {
        residual,
        out: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        a,
        b: other,
        weight: kit.param([c]),
        eps: EPS,
    };
    kit.random(a, -1.0, 2.0);
    kit.finish(op)
}

/// Sets random values in `inp` and the matching statistic; returns the values of the statistic.
fn set_stats(kit: &mut Kit, inp: Slot, slot: Slot) -> Vec<f32> {
    let values: Vec<f64> = kit.random(inp, -1.0, 2.0).into_iter().map(f64::from).collect();
    let rows = values.chunks_exact(inp.shape.cols());
    kit.set(slot, rows.map(|row| rstd(row, f64::from(EPS)) as f32).collect())
}

fn apply(p: Precision, [b, t, c]: [usize; 3]) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c}"));
    let op = RmsNormApply {
        out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
    };
    set_stats(&mut kit, op.inp, op.rstd);
    kit.finish(op)
}

fn bwd(p: Precision, [b, t, c]: [usize; 3], accum_inp: Accum, (accum, micro_step): (Accum, u32)) -> Case {
    let name = format!("B{b} T{t} C{c} d_inp {accum_inp:?}, rest {accum:?}, micro-step {micro_step}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    let op = RmsNormBwd {
        d_inp: kit.slot([b, t, c]),
        d_weight: kit.grad([c]),
        d_out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        accum_inp,
        accum,
    };
    let rstds = set_stats(&mut kit, op.inp, op.rstd);
    if c == 1 {
        // g - x̂·g·x̂ cancels because x̂² is almost 1, so the rounding error of g is multiplied by rstd.
        kit.floor = f64::from(rstds.into_iter().fold(0.0, f32::max));
    }
    kit.finish(op)
}
