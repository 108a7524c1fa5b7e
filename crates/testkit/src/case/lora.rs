//! Cases of adapters beside linear layers.
#![allow(clippy::single_range_in_vec_init)] // a layer with one adapter has one range of columns

use super::{ACCUMS, Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, LoraBwdHidden, LoraBwdInput, LoraBwdWeight, LoraFwd, LoraParts};
use std::ops::Range;

/// Rows, columns of the layer's result, the rank, and the columns that the parts are.
type Sizes = (usize, usize, usize, &'static [Range<usize>]);

const SHAPES: [Sizes; 9] = [
    (1, 1, 1, &[0..1]),
    (31, 33, 1, &[0..33]),
    (33, 48, 4, &[0..24, 24..36, 36..48]),
    (1, 129, 16, &[0..65, 97..129]),
    (65, 80, 31, &[16..48]),
    (130, 31, 3, &[30..31]),
    (7, 40, 33, &[0..20, 20..40]),
    (0, 16, 4, &[0..16]),
    (5, 24, 2, &[0..0, 8..9]),
];

/// Sizes of real models: q and v of a layer, gate and up, one projection.
const WIDE: [Sizes; 3] = [
    (128, 1536, 16, &[0..1024, 1280..1536]),
    (256, 2048, 64, &[0..1024, 1024..2048]),
    (200, 768, 8, &[0..768]),
];

/// Rows, C and P·r of the gradient of an input.
const INPUTS: [[usize; 3]; 6] =
    [[1, 1, 1], [31, 33, 5], [33, 129, 48], [130, 65, 16], [0, 8, 4], [128, 768, 32]];

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
    let mut kit = Kit::with_precision(p, format!("rows {rows} OC{oc} r{rank} {parts:?}{more}"));
    kit.large = rows * oc * rank > 10_000_000;
    (kit, LoraParts::new(parts).unwrap_or_default())
}

fn fwd(p: Precision, sizes: Sizes) -> Case {
    let ((mut kit, parts), (rows, oc, rank, _)) = (kit(p, sizes, ""), sizes);
    let (out, hidden) = (kit.slot([rows, oc]), kit.slot([rows, parts.count() * rank]));
    let b = kit.param([parts.rows(), rank]);
    kit.finish(LoraFwd { out, hidden, b, parts, scale: 1.7 })
}

fn bwd_hidden(p: Precision, sizes: Sizes) -> Case {
    let ((mut kit, parts), (rows, oc, rank, _)) = (kit(p, sizes, ""), sizes);
    let (d_hidden, d_out) = (kit.slot([rows, parts.count() * rank]), kit.slot([rows, oc]));
    let b = kit.param([parts.rows(), rank]);
    kit.finish(LoraBwdHidden { d_hidden, d_out, b, parts, scale: 0.6 })
}

fn bwd_weight(p: Precision, sizes: Sizes, (accum, micro_step): (Accum, u32)) -> Case {
    let (mut kit, parts) = kit(p, sizes, &format!(" {accum:?} micro-step {micro_step}"));
    let (rows, oc, rank, _) = sizes;
    kit.scalars.micro_step = micro_step;
    let (d_b, d_out) = (kit.grad([parts.rows(), rank]), kit.slot([rows, oc]));
    let hidden = kit.slot([rows, parts.count() * rank]);
    kit.finish(LoraBwdWeight { d_b, d_out, hidden, parts, scale: 2.5, accum })
}

fn bwd_input(p: Precision, [rows, c, wide]: [usize; 3]) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows} C{c} P·r {wide}"));
    let (d_inp, d_hidden, a) = (kit.slot([rows, c]), kit.slot([rows, wide]), kit.param([wide, c]));
    kit.finish(LoraBwdInput { d_inp, d_hidden, a })
}
