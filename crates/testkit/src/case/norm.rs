//! What the cases of layer norms and RMS norms share: their shapes, names and slots in place.

use super::{ACCUMS, Case, Kit};
use ironhorse_core::op::Accum;
use ironhorse_core::{Precision, Slot};

pub(super) const EPS: f32 = 1e-5;

/// (B, T, C)
pub(super) type NormShape = [usize; 3];

const SHAPES: [NormShape; 9] = [
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
/// Widths of models, where engines take other paths.
pub(super) const WIDE: [NormShape; 9] = [
    [1, 33, 768],
    [2, 65, 1024],
    [3, 100, 1600],
    [1, 1, 768],
    [8, 1, 1600],
    [1, 3, 3072],
    [1, 1, 4096],
    [2, 17, 5120],
    [1, 19, 8192],
];

/// Which term of the residual the sum replaces.
#[derive(Clone, Copy, Debug)]
pub(super) enum InPlace {
    No,
    A,
    B,
}

/// How a backward stores its results: the input's gradient, the parameters', and in which micro-step.
#[derive(Clone, Copy)]
pub(super) struct NormAccums {
    pub inp: Accum,
    pub params: Accum,
    pub micro_step: u32,
}

/// The cases of one kind of norm.
pub(super) struct NormCases {
    pub fwd: fn(Precision, NormShape) -> Case,
    pub apply: fn(Precision, NormShape) -> Case,
    pub residual: fn(Precision, NormShape, InPlace) -> Case,
    pub bwd: fn(Precision, NormShape, NormAccums) -> Case,
}

impl NormCases {
    /// The cases of every op in every shape, and in those of `wide`.
    pub fn all(&self, p: Precision, wide: &[NormShape]) -> Vec<Case> {
        let mut cases = Vec::new();
        for shape in SHAPES {
            cases.extend([(self.fwd)(p, shape), (self.apply)(p, shape)]);
            cases.extend([InPlace::No, InPlace::A, InPlace::B].map(|place| (self.residual)(p, shape, place)));
            for (i, (params, micro_step)) in ACCUMS.into_iter().enumerate() {
                let inp = ACCUMS[(i + 1) % ACCUMS.len()].0;
                cases.push((self.bwd)(p, shape, NormAccums { inp, params, micro_step }));
            }
        }
        for &shape in wide {
            cases.extend([(self.fwd)(p, shape), (self.apply)(p, shape)]);
            cases.extend([InPlace::No, InPlace::A].map(|place| (self.residual)(p, shape, place)));
            for (inp, micro_step) in [(Accum::Write, 0), (Accum::Add, 1)] {
                let accums = NormAccums { inp, params: Accum::FirstWrites, micro_step };
                cases.push((self.bwd)(p, shape, accums));
            }
        }
        cases
    }
}

/// The kit of a residual case, whose name has this note, and its slots `a`, `b` and `residual`.
pub(super) fn residual_kit(
    p: Precision,
    [b, t, c]: NormShape,
    in_place: InPlace,
    note: &str,
) -> (Kit, [Slot; 3]) {
    let mut kit = Kit::with_precision(p, format!("B{b} T{t} C{c} in place {in_place:?}{note}"));
    let [first, second] = [(); 2].map(|()| kit.slot([b, t, c]));
    let residual = match in_place {
        InPlace::No => kit.slot([b, t, c]),
        InPlace::A => first,
        InPlace::B => second,
    };
    (kit, [first, second, residual])
}

/// The kit of a backward case, whose name has this note.
pub(super) fn bwd_kit(p: Precision, [b, t, c]: NormShape, accums: NormAccums, note: &str) -> Kit {
    let NormAccums { inp, params, micro_step } = accums;
    let name = format!("B{b} T{t} C{c} d_inp {inp:?}, rest {params:?}, micro-step {micro_step}{note}");
    let mut kit = Kit::with_precision(p, name);
    kit.scalars.micro_step = micro_step;
    kit
}
