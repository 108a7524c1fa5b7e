//! Cases of SwiGLU and GeGLU.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Gate, SwigluBwd, SwigluFwd};

/// (rows, F)
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [5, 1], [31, 5], [33, 31], [7, 129], [65, 256], [3, 1003], [0, 48], [17, 6144]];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for gate in Gate::ALL {
        for shape in SHAPES {
            // An element alone must be as near as a tensor. The exponent of GELU's tanh is 49 at x = -8, where its rounding
            // in f32 is a relative error of 3e-6; at -4 it is 11.
            let range = if gate == Gate::Silu || shape[1] > 1 { 8.0 } else { 4.0 };
            cases.push(fwd(p, shape, gate, range));
            for act in [Act::Left, Act::Apart, Act::InPlace] {
                cases.extend([false, true].map(|in_place| bwd(p, shape, (gate, in_place, act), range)));
            }
        }
        cases.push(fwd(p, [3, 65], gate, 1e4)); // the exponential overflows: the gate is x or 0
        cases.push(bwd(p, [3, 65], (gate, false, Act::Apart), 1e4));
    }
    cases
}

/// What the backward does with the recomputed result of the forward: leaves it out, or writes it to a slot of its own or in place.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Left,
    Apart,
    InPlace,
}

/// What a case's name says about its gate.
fn note(gate: Gate) -> &'static str {
    if gate == Gate::Silu { "" } else { " GELU" }
}

fn fwd(p: Precision, [rows, width]: [usize; 2], gate: Gate, range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("rows {rows} F{width} range {range}{}", note(gate)));
    let op = SwigluFwd { out: kit.slot([rows, width]), inp: kit.slot([rows, 2 * width]), gate };
    kit.draw(op.inp, -range, range);
    kit.finish(op)
}

fn bwd(
    p: Precision,
    [rows, width]: [usize; 2],
    (gate, in_place, act): (Gate, bool, Act),
    range: f32,
) -> Case {
    let name = format!("rows {rows} F{width} in place {in_place} act {act:?} range {range}{}", note(gate));
    let mut kit = Kit::with_precision(p, name);
    let (d_out, inp) = (kit.slot([rows, width]), kit.slot([rows, 2 * width]));
    let d_inp = if in_place { inp } else { kit.slot([rows, 2 * width]) };
    kit.draw(inp, -range, range);
    let act = match act {
        Act::Left => None,
        Act::Apart => Some(kit.slot([rows, width])),
        Act::InPlace => Some(d_out),
    };
    kit.finish(SwigluBwd { d_inp, act, d_out, inp, gate })
}
