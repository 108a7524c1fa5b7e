//! Cases of adapters of experts.
#![allow(clippy::single_range_in_vec_init)] // a layer with one adapter has one range of columns

use super::grouped::offsets;
use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{
    Accum, GroupedLoraBwdHidden, GroupedLoraBwdInput, GroupedLoraBwdWeight, GroupedLoraFwd, LoraParts,
};
use std::ops::Range;

/// Rows of each expert, columns of the layer's result, the rank, and the columns that the parts are.
type Sizes = (&'static [usize], usize, usize, &'static [Range<usize>]);

const SHAPES: [Sizes; 12] = [
    (&[1], 1, 1, &[0..1]),
    (&[31, 0, 33], 33, 1, &[0..33]),
    (&[0, 0, 7, 0], 48, 4, &[0..24, 24..48]),
    (&[1, 1, 1], 129, 16, &[0..65, 97..129]),
    (&[130, 1, 2], 80, 31, &[16..48]),
    (&[3, 4, 5, 8], 40, 33, &[0..20, 20..40]),
    (&[0, 0], 16, 4, &[0..16]),
    (&[5, 0], 24, 2, &[0..0, 8..9]),
    (&[37, 129], 64, 8, &[0..32, 32..64]),
    (&[16, 3, 0, 45], 272, 24, &[0..136, 136..272]),
    (&[2, 130], 256, 136, &[128..256]),
    (&[1, 2, 3, 0, 0, 1, 4, 2, 2, 1, 5, 6, 7, 8, 9, 10], 96, 5, &[48..96]),
];

/// Sizes of real models: gate and up of experts, and down.
const WIDE: [Sizes; 2] =
    [(&[100, 0, 300, 112], 1536, 16, &[0..768, 768..1536]), (&[256, 1, 255], 2048, 64, &[0..2048])];

/// Rows of each expert, C and P·r of the gradient of an input.
const INPUTS: [(&[usize], usize, usize); 7] = [
    (&[1], 1, 1),
    (&[31, 0, 33], 33, 5),
    (&[130, 2], 129, 48),
    (&[3, 64, 1], 136, 16),
    (&[0, 0], 8, 4),
    (&[0, 7, 150], 80, 136),
    (&[100, 0, 156], 768, 32),
];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for sizes in SHAPES.into_iter().chain(WIDE) {
        cases.extend([fwd(p, sizes), bwd_hidden(p, sizes)]);
        cases.extend(ACCUMS.map(|accum| bwd_weight(p, sizes, accum)));
    }
    cases.extend(INPUTS.map(|sizes| bwd_input(p, sizes)));
    cases
}

fn kit(p: Precision, (rows, oc, rank, parts): Sizes, more: &str) -> (Kit, LoraParts) {
    let mut kit = Kit::with_precision(p, format!("rows {rows:?} OC{oc} r{rank} {parts:?}{more}"));
    kit.large = rows.iter().sum::<usize>() * oc * rank > 10_000_000;
    (kit, LoraParts::new(parts).unwrap_or_default())
}

fn fwd(p: Precision, sizes: Sizes) -> Case {
    let ((mut kit, parts), (rows, oc, rank, _)) = (kit(p, sizes, ""), sizes);
    let (count, experts) = (rows.iter().sum(), rows.len());
    let (out, hidden) = (kit.slot([count, oc]), kit.slot([count, parts.count() * rank]));
    let (b, offsets) = (kit.param([experts, parts.rows(), rank]), offsets(&mut kit, rows));
    kit.finish(GroupedLoraFwd { out, hidden, b, offsets, parts, scale: 1.7 })
}

fn bwd_hidden(p: Precision, sizes: Sizes) -> Case {
    let ((mut kit, parts), (rows, oc, rank, _)) = (kit(p, sizes, ""), sizes);
    let (count, experts) = (rows.iter().sum(), rows.len());
    let (d_hidden, d_out) = (kit.slot([count, parts.count() * rank]), kit.slot([count, oc]));
    let (b, offsets) = (kit.param([experts, parts.rows(), rank]), offsets(&mut kit, rows));
    kit.finish(GroupedLoraBwdHidden { d_hidden, d_out, b, offsets, parts, scale: 0.6 })
}

fn bwd_weight(p: Precision, sizes: Sizes, (accum, micro_step): (Accum, u32)) -> Case {
    let (mut kit, parts) = kit(p, sizes, &format!(" {accum:?} micro-step {micro_step}"));
    let (rows, oc, rank, _) = sizes;
    let (count, experts) = (rows.iter().sum(), rows.len());
    kit.scalars.micro_step = micro_step;
    let (d_b, d_out) = (kit.grad([experts, parts.rows(), rank]), kit.slot([count, oc]));
    let (hidden, offsets) = (kit.slot([count, parts.count() * rank]), offsets(&mut kit, rows));
    kit.finish(GroupedLoraBwdWeight { d_b, d_out, hidden, offsets, parts, scale: 2.5, accum })
}

fn bwd_input(p: Precision, (rows, c, wide): (&[usize], usize, usize)) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows:?} C{c} P·r {wide}"));
    let count = rows.iter().sum();
    let (d_inp, d_hidden) = (kit.slot([count, c]), kit.slot([count, wide]));
    let (a, offsets) = (kit.param([rows.len(), wide, c]), offsets(&mut kit, rows));
    kit.finish(GroupedLoraBwdInput { d_inp, d_hidden, a, offsets })
}
