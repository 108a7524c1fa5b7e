//! Cases of the experts' linear layers.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, GroupedLinearBwdInput, GroupedLinearBwdWeight, GroupedLinearFwd};

/// Rows of each expert, C, OC.
type Groups = (&'static [usize], usize, usize);

const SHAPES: [Groups; 18] = [
    (&[1], 1, 1),
    (&[1, 1, 1], 129, 33),
    (&[31, 0, 33], 5, 33),
    (&[0, 0, 7, 0], 48, 80),
    (&[37], 129, 65),
    (&[3, 4, 5, 8], 80, 48),
    (&[130, 1, 2], 257, 129),
    (&[0, 64], 64, 512),
    (&[5, 9], 1003, 1),
    (&[0, 0], 48, 5),
    (&[32, 32, 32, 32], 64, 512),
    (&[1, 2, 3, 0, 0, 1, 4, 2, 2, 1, 5, 6, 7, 8, 9, 10], 33, 96),
    (&[17, 100, 11], 256, 64),
    (&[16, 3, 0, 45], 128, 192),
    (&[2, 2], 768, 1024),
    (&[130, 0, 3, 200], 128, 384),
    (&[0, 500, 12], 31, 50),
    (&[600], 64, 256), // so many rows that pairs of blocks multiply them, and an odd number of tiles
];

/// Sizes of real models.
const WIDE: [Groups; 5] = [
    (&[100, 0, 300, 112], 768, 1536),
    (&[128, 128], 3072, 768),
    (&[1, 1, 1, 1], 768, 12_288),
    (&[300, 0, 724], 64, 12_800), // several whole tiles for every block of a large GPU
    (&[700, 0, 1029], 64, 640),   // pairs, with an odd number of columns of tiles
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for groups in SHAPES {
        cases.extend(fwds(p, groups));
        cases.push(bwd_input(p, groups));
        cases.extend(ACCUMS.map(|accum| bwd_weight(p, groups, accum)));
    }
    for groups in WIDE {
        cases.extend(fwds(p, groups));
        cases.push(bwd_input(p, groups));
        cases.push(bwd_weight(p, groups, (Accum::FirstWrites, 0)));
        cases.push(bwd_weight(p, groups, (Accum::FirstWrites, 1)));
    }
    cases
}

fn kit(p: Precision, (rows, c, oc): Groups, more: &str) -> Kit {
    let mut kit = Kit::with_precision(p, format!("rows {rows:?} C{c} OC{oc}{more}"));
    kit.large = rows.iter().sum::<usize>() * c * oc > 10_000_000 || rows.len() * c * oc > 10_000_000;
    kit
}

/// The index of each expert's first row, then the number of rows.
pub(super) fn offsets(kit: &mut Kit, rows: &[usize]) -> ironhorse_core::Slot {
    let mut ends = vec![0];
    for &rows in rows {
        ends.push(ends[ends.len() - 1] + rows as i32);
    }
    kit.i32s([ends.len()], &ends)
}

/// The cases of the forward: without SwiGLU, and with it if OC is even.
fn fwds(p: Precision, groups: Groups) -> Vec<Case> {
    let halves = groups.2.is_multiple_of(2);
    [false, true].into_iter().filter(|&act| halves || !act).map(|act| fwd(p, groups, act)).collect()
}

fn fwd(p: Precision, groups: Groups, act: bool) -> Case {
    let mut kit = kit(p, groups, if act { " SwiGLU" } else { "" });
    let (rows, c, oc) = (groups.0.iter().sum(), groups.1, groups.2);
    let op = GroupedLinearFwd {
        out: kit.slot([rows, oc]),
        act: act.then(|| kit.slot([rows, oc / 2])),
        inp: kit.slot([rows, c]),
        weight: kit.param([groups.0.len(), oc, c]),
        offsets: offsets(&mut kit, groups.0),
    };
    kit.finish(op)
}

fn bwd_input(p: Precision, groups: Groups) -> Case {
    let mut kit = kit(p, groups, "");
    let (rows, c, oc) = (groups.0.iter().sum(), groups.1, groups.2);
    let op = GroupedLinearBwdInput {
        d_inp: kit.slot([rows, c]),
        d_out: kit.slot([rows, oc]),
        weight: kit.param([groups.0.len(), oc, c]),
        offsets: offsets(&mut kit, groups.0),
    };
    kit.finish(op)
}

fn bwd_weight(p: Precision, groups: Groups, (accum, micro_step): (Accum, u32)) -> Case {
    let mut kit = kit(p, groups, &format!(" {accum:?} micro-step {micro_step}"));
    kit.scalars.micro_step = micro_step;
    let (rows, c, oc) = (groups.0.iter().sum(), groups.1, groups.2);
    let op = GroupedLinearBwdWeight {
        d_weight: kit.grad([groups.0.len(), oc, c]),
        d_out: kit.slot([rows, oc]),
        inp: kit.slot([rows, c]),
        offsets: offsets(&mut kit, groups.0),
        accum,
    };
    kit.finish(op)
}
