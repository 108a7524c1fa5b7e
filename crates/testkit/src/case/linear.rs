//! Cases of the linear layers.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::{LinearBwdInput, LinearBwdWeight, LinearFwd};

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

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for present in [false, true] {
            cases.push(fwd(shape, present, false));
            cases.push(fwd(shape, present, true));
            cases.push(bwd_input(shape, present));
            cases.extend(ACCUMS.map(|(accum, micro_step)| {
                let [b, t, c, oc] = shape;
                let name =
                    format!("B{b} T{t} C{c} OC{oc} d_bias {present} {accum:?} micro-step {micro_step}");
                let mut kit = Kit::new(name);
                kit.scalars.micro_step = micro_step;
                let op = LinearBwdWeight {
                    d_weight: kit.grad([oc, c]),
                    d_bias: present.then(|| kit.grad([oc])),
                    d_out: kit.slot([b, t, oc]),
                    inp: kit.slot([b, t, c]),
                    accum,
                };
                kit.finish(op)
            }));
        }
    }
    cases
}

fn fwd([b, t, c, oc]: [usize; 4], bias: bool, gelu: bool) -> Case {
    let mut kit = Kit::new(format!("B{b} T{t} C{c} OC{oc} bias {bias} gelu {gelu}"));
    let op = LinearFwd {
        out: kit.slot([b, t, oc]),
        pre: gelu.then(|| kit.slot([b, t, oc])),
        inp: kit.slot([b, t, c]),
        weight: kit.param([oc, c]),
        bias: bias.then(|| kit.param([oc])),
    };
    kit.finish(op)
}

fn bwd_input([b, t, c, oc]: [usize; 4], gelu: bool) -> Case {
    let mut kit = Kit::new(format!("B{b} T{t} C{c} OC{oc} gelu {gelu}"));
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
