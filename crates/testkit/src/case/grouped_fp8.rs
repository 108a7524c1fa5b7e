//! Cases of the experts' products of 8-bit numbers.

use super::grouped::offsets;
use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::{Accum, GroupedFp8, GroupedFp8BwdWeight};
use ironhorse_core::{Fp8, Precision, Shape, Slot};

/// Rows of each expert, N, K. Of gradients of weights the sums of rows are multiples of 16.
type Groups = (&'static [usize], usize, usize);

const SHAPES: [Groups; 12] = [
    (&[16], 16, 16),
    (&[1, 0, 15], 48, 32),
    (&[31, 0, 33], 32, 144),
    (&[0, 0, 7, 9], 48, 80),
    (&[37, 11], 64, 128),
    (&[3, 4, 5, 4], 256, 272),
    (&[130, 1, 13], 320, 128),
    (&[0, 64], 64, 512),
    (&[1, 2, 3, 0, 0, 1, 4, 2, 2, 1, 5, 6, 7, 8, 9, 13], 64, 96),
    (&[17, 100, 11], 256, 64),
    (&[16, 3, 0, 45], 128, 256),
    (&[130, 0, 3, 203], 192, 384),
];

/// Sizes of real models.
const WIDE: [Groups; 4] = [
    (&[100, 0, 300, 112], 768, 1536),
    (&[129, 127], 3072, 768),
    (&[3, 5, 4, 4], 768, 12_288),
    (&[300, 0, 724], 12_800, 128), // several whole tiles for every block of a large GPU
];

const FORMATS: [[Fp8; 2]; 2] = [[Fp8::E4M3; 2], [Fp8::E5M2, Fp8::E4M3]];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for groups in SHAPES {
        for formats in FORMATS {
            cases.push(rows(p, groups, formats, false, true));
            cases.push(rows(p, groups, formats, true, false));
        }
        cases.extend(ACCUMS.map(|accum| weight(p, groups, FORMATS[1], accum)));
        cases.push(weight(p, groups, FORMATS[0], (Accum::FirstWrites, 1)));
    }
    for groups in WIDE {
        cases.push(rows(p, groups, FORMATS[0], false, true));
        cases.push(rows(p, groups, FORMATS[1], true, false));
        cases.push(weight(p, groups, FORMATS[1], (Accum::FirstWrites, 0)));
    }
    cases.push(rows(p, SHAPES[3], FORMATS[0], false, false));
    cases
}

fn kit(p: Precision, (rows, n, k): Groups, more: &str) -> Kit {
    let mut kit = Kit::with_precision(p, format!("rows {rows:?} N{n} K{k} {more}"));
    kit.large = rows.iter().sum::<usize>() * n * k > 10_000_000 || rows.len() * n * k > 10_000_000;
    kit
}

/// Random numbers of a format.
fn operand(kit: &mut Kit, shape: impl Into<Shape>, format: Fp8) -> Slot {
    let slot = kit.fp8(shape, format);
    kit.draw_fp8(slot, [-100.0, 100.0], Some(format));
    slot
}

fn inverses(kit: &mut Kit) -> [Slot; 2] {
    [0.125, 1.0 / 4096.0].map(|inverse| {
        let slot = kit.stat([1]);
        kit.set(slot, vec![inverse]);
        slot
    })
}

fn rows(p: Precision, groups: Groups, [of_a, of_b]: [Fp8; 2], beside: bool, fast: bool) -> Case {
    let mut kit = kit(p, groups, &format!("{of_a} {of_b} beside {beside} fast {fast}"));
    let (counts, n, k) = groups;
    let out = kit.slot([counts.iter().sum(), n]);
    let a = operand(&mut kit, [out.shape.rows(), k], of_a);
    let b = if beside {
        operand(&mut kit, [n, counts.len() * k], of_b)
    } else {
        operand(&mut kit, [counts.len(), n, k], of_b)
    };
    let [a_inverse, b_inverse] = inverses(&mut kit);
    let offsets = offsets(&mut kit, counts);
    kit.finish(GroupedFp8 { out, a, b, a_inverse, b_inverse, offsets, beside, fast })
}

fn weight(p: Precision, groups: Groups, formats: [Fp8; 2], (accum, micro_step): (Accum, u32)) -> Case {
    let [of_out, of_inp] = formats;
    let mut kit = kit(p, groups, &format!("{of_out} {of_inp} {accum:?} micro-step {micro_step}"));
    kit.scalars.micro_step = micro_step;
    let (counts, oc, ic) = groups;
    let all = counts.iter().sum();
    let d_weight = kit.grad([counts.len(), oc, ic]);
    let (d_out, inp) = (operand(&mut kit, [oc, all], of_out), operand(&mut kit, [ic, all], of_inp));
    let [d_out_inverse, inp_inverse] = inverses(&mut kit);
    let offsets = offsets(&mut kit, counts);
    kit.finish(GroupedFp8BwdWeight { d_weight, d_out, inp, d_out_inverse, inp_inverse, offsets, accum })
}
