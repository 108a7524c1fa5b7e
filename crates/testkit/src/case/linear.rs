//! Cases of the linear layers.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, LinearBwdInput, LinearBwdWeight, LinearFwd};

/// (B, T, C, OC)
const SHAPES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [1, 1, 129, 33],
    [1, 31, 5, 33],
    [3, 11, 48, 80],
    [1, 37, 129, 65],
    [2, 65, 80, 48],
    [1, 130, 257, 129],
    [1, 3, 48, 1024],
    [1, 5, 1003, 1],
    [0, 4, 48, 5],
];

/// The same, as models have them: whole tiles, and a few rows beyond.
const WIDE: [[usize; 4]; 6] = [
    [2, 32, 128, 384],
    [1, 130, 256, 192],
    [2, 64, 768, 2304],
    [1, 128, 3072, 768],
    [1, 256, 768, 768],
    [2, 256, 768, 256],
];

/// More products than a test suite should wait for.
fn is_large([b, t, c, oc]: [usize; 4]) -> bool {
    b * t * c * oc > 10_000_000
}

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for present in [false, true] {
            cases.push(fwd(p, shape, present, false));
            cases.push(fwd(p, shape, present, true));
            cases.push(bwd_input(p, shape, present));
            cases.extend(ACCUMS.map(|accum| bwd_weight(p, shape, present, accum)));
        }
    }
    for shape in WIDE {
        cases.push(fwd(p, shape, true, false));
        cases.push(fwd(p, shape, true, true));
        cases.push(bwd_input(p, shape, true));
        cases.push(bwd_weight(p, shape, true, (Accum::FirstWrites, 0)));
        cases.push(bwd_weight(p, shape, true, (Accum::FirstWrites, 1)));
    }
    cases
}

fn bwd_weight(
    p: Precision,
    [b, t, c, oc]: [usize; 4],
    d_bias: bool,
    (accum, micro_step): (Accum, u32),
) -> Case {
    let name = format!("B{b} T{t} C{c} OC{oc} d_bias {d_bias} {accum:?} micro-step {micro_step}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    kit.large = is_large([b, t, c, oc]);
    let op = LinearBwdWeight {
        d_weight: kit.grad([oc, c]),
        d_bias: d_bias.then(|| kit.grad([oc])),
        d_out: kit.slot([b, t, oc]),
        inp: kit.slot([b, t, c]),
        accum,
    };
    kit.finish(op)
}

fn fwd(p: Precision, [b, t, c, oc]: [usize; 4], bias: bool, gelu: bool) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} OC{oc} bias {bias} gelu {gelu}"));
    kit.large = is_large([b, t, c, oc]);
    let op = LinearFwd {
        out: kit.slot([b, t, oc]),
        pre: gelu.then(|| kit.slot([b, t, oc])),
        inp: kit.slot([b, t, c]),
        weight: kit.param([oc, c]),
        bias: bias.then(|| kit.param([oc])),
    };
    kit.finish(op)
}

fn bwd_input(p: Precision, [b, t, c, oc]: [usize; 4], gelu: bool) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} OC{oc} gelu {gelu}"));
    kit.large = is_large([b, t, c, oc]);
    let op = LinearBwdInput {
        d_inp: kit.slot([b, t, c]),
        d_out: kit.slot([b, t, oc]),
        weight: kit.param([oc, c]),
        gelu_pre: gelu.then(|| kit.slot([b, t, c])),
    };
    if let Some(pre) = op.gelu_pre {
        kit.random(pre, -4.0, 4.0);
    }
    kit.finish(op)
}
