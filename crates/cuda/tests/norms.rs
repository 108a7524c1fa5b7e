//! The backward of norms of so many rows that each group of warps has several, on a real GPU:
//! `cargo test -p ironhorse-cuda --test norms -- --ignored`

#![allow(clippy::unwrap_used, reason = "a test")]

use ironhorse_core::Precision;
use ironhorse_core::op::{Accum, Gain, LayerNormBwd, RmsNormBwd};
use ironhorse_cuda::{CudaEngine, Settings};
use ironhorse_testkit::{Case, Check, Kit, check_against};

fn layernorm(rows: usize, width: usize, accum_inp: Accum) -> Case {
    let mut kit =
        Kit::with_precision(Precision::BF16, format!("{rows} rows of {width}, d_inp {accum_inp:?}"));
    let op = LayerNormBwd {
        d_inp: kit.slot([1, rows, width]),
        d_weight: kit.grad([width]),
        d_bias: kit.grad([width]),
        d_out: kit.slot([1, rows, width]),
        inp: kit.slot([1, rows, width]),
        mean: kit.stat([1, rows]),
        rstd: kit.stat([1, rows]),
        weight: kit.param([width]),
        accum_inp,
        accum: Accum::Write,
    };
    kit.draw(op.mean, -0.5, 0.5);
    kit.draw(op.rstd, 0.5, 2.0);
    kit.finish(op)
}

fn rmsnorm(rows: usize, width: usize, gain: Gain) -> Case {
    let mut kit = Kit::with_precision(Precision::BF16, format!("{rows} rows of {width}, {gain:?}"));
    let op = RmsNormBwd {
        d_inp: kit.slot([1, rows, width]),
        d_weight: kit.grad([width]),
        d_out: kit.slot([1, rows, width]),
        inp: kit.slot([1, rows, width]),
        rstd: kit.stat([1, rows]),
        weight: kit.param([width]),
        accum_inp: Accum::Add,
        accum: Accum::Write,
        gain,
    };
    kit.draw(op.rstd, 0.5, 2.0);
    kit.finish(op)
}

#[test]
#[ignore = "needs a GPU"]
fn groups_of_warps_pass_over_many_rows() {
    let cases = [
        layernorm(5303, 768, Accum::Add),
        layernorm(3203, 1600, Accum::Add),
        layernorm(3203, 1600, Accum::Write),
        layernorm(16_001, 264, Accum::Add),
        rmsnorm(5303, 640, Gain::OnePlusWeight),
        rmsnorm(2503, 2048, Gain::Weight),
    ];
    let mut engine = CudaEngine::new(Settings::default()).unwrap();
    for case in cases {
        let check = Check { twice: true, ..Check::default() };
        let report = check_against(&mut engine, &case, case.expected(), check).unwrap();
        println!("{report:?}");
    }
}
