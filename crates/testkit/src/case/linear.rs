//! Cases of the linear layers.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, Act, LinearBwdInput, LinearBwdWeight, LinearFwd, PreAct};

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

/// Sizes of real models: whole tiles, and a few rows more.
const WIDE: [[usize; 4]; 6] = [
    [2, 32, 128, 384],
    [1, 130, 256, 192],
    [2, 64, 768, 2304],
    [1, 128, 3072, 768],
    [1, 256, 768, 768],
    [2, 256, 768, 256],
];

/// Few rows, as in decoding: weights that are not a multiple of a block, and rows of the weight of many lengths.
/// Those of 1600 and 6400 columns with many rows of the weight fill a block with several groups of bytes, and the last block is not full.
/// Those of 11008 and 14336 columns are longer than a thread reads at once.
const FEW: [[usize; 4]; 13] = [
    [1, 1, 64, 50],
    [1, 1, 64, 3075],
    [1, 1, 1600, 403],
    [1, 1, 6400, 205],
    [2, 1, 1600, 333],
    [3, 1, 48, 17],
    [7, 1, 768, 403],
    [8, 1, 3072, 41],
    [1, 1, 1600, 3077],
    [1, 1, 6400, 771],
    [2, 1, 1600, 3077],
    [1, 1, 11008, 385],
    [1, 1, 14336, 7],
];

/// Sizes that take too long for a test suite.
fn is_large([b, t, c, oc]: [usize; 4]) -> bool {
    b * t * c * oc > 10_000_000
}

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for present in [false, true] {
            cases.extend(acts().map(|act| fwd(p, shape, present, act)));
            cases.extend(ACCUMS.map(|accum| bwd_weight(p, shape, present, accum)));
        }
        cases.extend(acts().map(|act| bwd_input(p, shape, act)));
    }
    for shape in FEW {
        cases.push(fwd(p, shape, false, None));
        cases.extend(acts().map(|act| fwd(p, shape, true, act)));
    }
    for shape in WIDE {
        cases.extend(acts().map(|act| fwd(p, shape, true, act)));
        cases.extend(Act::ALL.iter().map(|&act| bwd_input(p, shape, Some(act))));
        cases.push(bwd_weight(p, shape, true, (Accum::FirstWrites, 0)));
        cases.push(bwd_weight(p, shape, true, (Accum::FirstWrites, 1)));
    }
    cases
}

/// No activation, then every activation.
fn acts() -> impl Iterator<Item = Option<Act>> {
    [None].into_iter().chain(Act::ALL.iter().copied().map(Some))
}

/// The part of a case's name for an item of [`acts`].
fn fused(act: Option<Act>) -> String {
    act.map_or_else(|| "gelu false".into(), |act| format!("{} true", act.name()))
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

fn fwd(p: Precision, [b, t, c, oc]: [usize; 4], bias: bool, act: Option<Act>) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} OC{oc} bias {bias} {}", fused(act)));
    kit.large = is_large([b, t, c, oc]);
    let op = LinearFwd {
        out: kit.slot([b, t, oc]),
        pre: act.map(|act| PreAct { act, slot: kit.slot([b, t, oc]) }),
        inp: kit.slot([b, t, c]),
        weight: kit.param([oc, c]),
        bias: bias.then(|| kit.param([oc])),
    };
    kit.finish(op)
}

fn bwd_input(p: Precision, [b, t, c, oc]: [usize; 4], act: Option<Act>) -> Case {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} OC{oc} {}", fused(act)));
    kit.large = is_large([b, t, c, oc]);
    let op = LinearBwdInput {
        d_inp: kit.slot([b, t, c]),
        d_out: kit.slot([b, t, oc]),
        weight: kit.param([oc, c]),
        pre: act.map(|act| PreAct { act, slot: kit.slot([b, t, c]) }),
    };
    if let Some(pre) = op.pre {
        kit.draw(pre.slot, -4.0, 4.0);
    }
    kit.finish(op)
}
