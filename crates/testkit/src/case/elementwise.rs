//! Cases of GELU and addition.

use super::{Case, Kit};
use ironhorse_core::Precision;
use ironhorse_core::op::{Add, GeluBwd, GeluFwd};

const SIZES: [usize; 9] = [0, 1, 5, 31, 33, 129, 1003, 4099, 98_304];

pub(super) fn cases(p: Precision) -> Vec<Case> {
    let mut cases = Vec::new();
    for n in SIZES {
        for in_place in [false, true] {
            cases.push(gelu_fwd(p, n, in_place, 6.0));
            cases.push(gelu_bwd(p, n, in_place, 6.0));
        }
        cases.extend(["no", "a", "b"].map(|in_place| add(p, n, in_place)));
    }
    cases.push(gelu_fwd(p, 65, false, 1e4)); // x³ is large, tanh saturates: nothing may overflow
    cases.push(gelu_bwd(p, 65, false, 1e4));
    cases
}

fn gelu_fwd(p: Precision, n: usize, in_place: bool, range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("n{n} in place {in_place} range {range}"));
    let inp = kit.slot([n]);
    let out = if in_place { inp } else { kit.slot([n]) };
    kit.random(inp, -range, range);
    kit.finish(GeluFwd { out, inp })
}

fn gelu_bwd(p: Precision, n: usize, in_place: bool, range: f32) -> Case {
    let mut kit = Kit::with_precision(p, format!("n{n} in place {in_place} range {range}"));
    let [d_out, inp] = [(); 2].map(|()| kit.slot([n]));
    let d_inp = if in_place { d_out } else { kit.slot([n]) };
    kit.random(inp, -range, range);
    kit.finish(GeluBwd { d_inp, d_out, inp })
}

fn add(p: Precision, n: usize, in_place: &str) -> Case {
    let mut kit = Kit::with_precision(p, format!("n{n} in place {in_place}"));
    let [a, b] = [(); 2].map(|()| kit.slot([n]));
    let out = match in_place {
        "a" => a,
        "b" => b,
        _ => kit.slot([n]),
    };
    kit.finish(Add { out, a, b })
}
