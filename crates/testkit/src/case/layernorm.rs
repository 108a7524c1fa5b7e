//! Cases of the layer norms.

use super::{ACCUMS, Case, Kit};
use crate::oracle::layernorm::stats;
use ironhorse_core::op::{Accum, LayerNormApply, LayerNormBwd, LayerNormFwd, ResidualLayerNormFwd};
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
const EPS: f32 = 1e-5;

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, -1.0));
        cases.push(apply(p, shape));
        cases.extend([InPlace::No, InPlace::A, InPlace::B].map(|in_place| residual(p, shape, in_place)));
        for (i, accum) in ACCUMS.into_iter().enumerate() {
            cases.push(bwd(p, shape, ACCUMS[(i + 1) % ACCUMS.len()].0, accum));
        }
    }
    cases.push(bwd(p, [1, 37, 80], Accum::Write, (Accum::Write, 0))); // the combinations that models use
    cases.push(bwd(p, [1, 37, 80], Accum::Add, (Accum::FirstWrites, 0)));
    // Widths of real models, for which engines use other kernels.
    for shape in [[1, 33, 768], [2, 65, 1024], [3, 100, 1600], [1, 1, 768], [8, 1, 1600], [1, 3, 3072]] {
        cases.push(fwd(p, shape, -1.0));
        cases.push(apply(p, shape));
        cases.extend([InPlace::No, InPlace::A].map(|in_place| residual(p, shape, in_place)));
        cases.push(bwd(p, shape, Accum::Write, (Accum::FirstWrites, 0)));
        cases.push(bwd(p, shape, Accum::Add, (Accum::FirstWrites, 1)));
    }
    cases.push(fwd(p, [2, 3, 129], 10.0)); // mean much larger than the spread: sums of squares lose the variance
    cases
}

/// Inputs are uniform in `offset..offset + 3`. An offset of -1 gives a mean of 1/2, so that no mean is 0.
fn fwd(p: Precision, [b, t, c]: [usize; 3], offset: f32) -> Case {
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
    kit.random(op.inp, offset, offset + 3.0);
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
    kit.random(a, -1.0, 2.0);
    kit.finish(op)
}

/// Sets random values in `inp` and the matching statistics; returns the values of `rstd`.
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

fn apply(p: Precision, [b, t, c]: [usize; 3]) -> Case {
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

fn bwd(p: Precision, [b, t, c]: [usize; 3], accum_inp: Accum, (accum, micro_step): (Accum, u32)) -> Case {
    let name = format!("B{b} T{t} C{c} d_inp {accum_inp:?}, rest {accum:?}, micro-step {micro_step}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    let op = LayerNormBwd {
        d_inp: kit.slot([b, t, c]),
        d_weight: kit.grad([c]),
        d_bias: kit.grad([c]),
        d_out: kit.slot([b, t, c]),
        inp: kit.slot([b, t, c]),
        mean: kit.stat([b, t]),
        rstd: kit.stat([b, t]),
        weight: kit.param([c]),
        accum_inp,
        accum,
    };
    let rstds = set_stats(&mut kit, op.inp, op.mean, op.rstd);
    if c == 1 {
        // g - mean(g) is 0 and rstd is 316, so the rounding error of g is multiplied by 316.
        kit.floor = f64::from(rstds.into_iter().fold(0.0, f32::max));
    }
    kit.finish(op)
}
