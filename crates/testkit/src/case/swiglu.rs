//! Cases of SwiGLU.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{SwigluBwd, SwigluFwd};

/// (rows, F)
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [5, 1], [31, 5], [33, 31], [7, 129], [65, 256], [3, 1003], [0, 48], [17, 6144]];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(fwd(p, shape, 8.0));
        cases.extend([false, true].map(|in_place| bwd(p, shape, in_place, 8.0)));
    }
    cases.push(fwd(p, [3, 65], 1e4)); // the exponential overflows; the gate is open or shut
    cases.push(bwd(p, [3, 65], false, 1e4));
    cases
}

fn fwd(p: Precision, [rows, width]: [usize; 2], range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows} F{width} range {range}"));
    let op = SwigluFwd { out: kit.slot([rows, width]), inp: kit.slot([rows, 2 * width]) };
    kit.random(op.inp, -range, range);
    kit.finish(op)
}

fn bwd(p: Precision, [rows, width]: [usize; 2], in_place: bool, range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows} F{width} in place {in_place} range {range}"));
    let (d_out, inp) = (kit.slot([rows, width]), kit.slot([rows, 2 * width]));
    let d_inp = if in_place { inp } else { kit.slot([rows, 2 * width]) };
    kit.random(inp, -range, range);
    kit.finish(SwigluBwd { d_inp, d_out, inp })
}
